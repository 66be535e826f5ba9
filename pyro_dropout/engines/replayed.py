"""Steps that were recorded once and are replayed without a compiler: on a tape, or operation by operation.

The gradient alone is recorded where the optimiser can be bound to it: torch's fused optimisers are faster than their
operations one by one. On a GPU many steps are captured in one CUDA graph.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pyro_dropout.engines.engine import Direct, Loop, Row, Step, Taken
from pyro_dropout.engines.inductor import Captured, whole_on_gpu
from pyro_dropout.engines.program import Program
from pyro_dropout.engines.tape import NoTapeError, Tape
from pyro_dropout.engines.torch_internals import tree_leaves


class Replayed:
    """Records a step and replays it."""

    name = "recorded"

    def loop(self, step: Step) -> Loop:
        """Return what takes the steps."""
        on_gpu = step.t.is_cuda
        if step.gradient is None or step.bind is None or (on_gpu and step.whole is not None and not step.huge):
            if on_gpu:
                return whole_on_gpu(step, compile=False, name=self.name)
            program = step.recorded
            taped = self._taped(program, step.changed, [step.lr, *tree_leaves(step.inputs)], step.row)
            return Captured(step, program, self.name) if taped is None else OnTape(step, *taped)
        given = (step.values, step.t, *step.inputs, *step.row)
        program = Program(step.gradient, *given, compile=False, fake=step.large)
        taped = None
        if not step.guarded and not on_gpu:
            taped = self._taped(program, [*step.values, step.t], tree_leaves(step.inputs), step.row)
        if taped is None:
            return Direct(step, program, self.name)
        return OnTape(step, *taped, then=step.bind(taped[0].results[1:]))

    def _taped(
        self, program: Program, changed: Sequence[Tensor], fixed: Sequence[Tensor], row: Row
    ) -> tuple[Tape, list[Tensor]] | None:
        """Return the tape of a program, and the tensors that it reads each row from; None if it does not fit on one."""
        own = [each.clone() for each in row]
        inputs = [*changed, *fixed, *own]
        changing = [*range(len(changed)), *range(len(inputs) - len(own), len(inputs))]
        try:
            return Tape(program.graph, inputs, changing), own
        except NoTapeError:
            return None


class OnTape(Loop):
    """Steps in memory of their own, without Python between operations; ``then`` follows the tape: the optimiser."""

    name = Replayed.name

    def __init__(self, step: Step, tape: Tape, own: list[Tensor], then: Callable[[], None] | None = None) -> None:
        super().__init__(step)
        self._tape, self._own, self._then = tape, own, then

    def begin(self) -> None:
        """Compute what does not change from step to step."""
        self._tape.begin()

    def one(self, row: Row) -> Taken:
        """Take a step."""
        with torch.no_grad():
            for mine, given in zip(self._own, row, strict=True):
                mine.copy_(given)
            loss = self._tape()[0].clone()  # the next step writes over it
            if self._then is not None:
                self._then()
        return loss, True
