"""Steps that were recorded once and are replayed without a compiler: on a tape, or operation by operation.

The gradient alone is recorded where the optimiser can be bound to it: torch's fused optimisers are faster than their
operations one by one. On a GPU many steps are captured in one CUDA graph.
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from pyro_dropout.engines.engine import Direct, Fixed, Loop, Step
from pyro_dropout.engines.inductor import Captured
from pyro_dropout.engines.program import Program
from pyro_dropout.engines.tape import NoTapeError, Tape
from pyro_dropout.engines.torch_internals import tree_leaves


class Replayed:
    """Records a step and replays it."""

    name = "recorded"

    def loop(self, step: Step) -> Loop:
        """Return what takes the steps."""
        on_gpu = step.t.is_cuda
        if step.gradient is None or step.move is None or (on_gpu and step.whole is not None and not step.huge):
            if on_gpu:
                return Captured(step, step.recorded, self.name)
            program = step.recorded
            return self._on_tape(step, program, step.changed, [step.lr]) or Captured(step, program, self.name)
        given = (step.values, step.t, *step.inputs, *step.row)
        program, loop = Program(step.gradient, *given, compile=False, fake=step.large), None
        if not step.guarded and not on_gpu:
            loop = self._on_tape(step, program, [*step.values, step.t], [], step.move)
        return loop or Direct(step, program, self.name)

    def _on_tape(
        self,
        step: Step,
        program: Program,
        changed: list[Tensor],
        fixed: list[Tensor],
        move: Callable[[list[Tensor]], None] | None = None,
    ) -> Loop | None:
        """Return the steps of a program on a tape; None if it does not fit on one."""
        own = [each.clone() for each in step.row]
        inputs = [*changed, *fixed, *tree_leaves(step.inputs), *own]
        changing = [*range(len(changed)), *range(len(inputs) - len(own), len(inputs))]
        try:
            tape = Tape(program.graph, inputs, changing)
        except NoTapeError:
            return None
        then = partial(move, tape.results[1:]) if move is not None else lambda: None
        return Fixed(step, self.name, own, tape, begin=tape.begin, then=then)
