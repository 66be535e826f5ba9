"""Steps of small networks on a CPU as loops of C, compiled within a second or read from disk."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pyro_dropout.engines.engine import CannotError, Loop, Row, Step, Taken
from pyro_dropout.engines.kept_kernels import KeptKernels
from pyro_dropout.engines.program import Program, apart_in_memory


class Generated:
    """Writes a whole step, with its optimiser, as C."""

    name = "C"

    def loop(self, step: Step) -> Loop:
        """Return what takes the steps."""
        if step.t.is_cuda:
            raise CannotError("the tensors are on a GPU")
        if not step.small:
            raise CannotError("it has too many parameters")
        if not apart_in_memory([*step.flat, *step.row], len(step.changed)):
            raise CannotError("two of its tensors share memory")
        program = step.recorded
        own = [each.clone() for each in (*step.row, *program.outside())]
        return InC(step, program, own, in_c(program, [*step.flat, *own]))


class InC(Loop):
    """Steps in C, on the same tensors at every step."""

    name = Generated.name

    def __init__(self, step: Step, program: Program, own: list[Tensor], run: Callable[[], list[Tensor]]) -> None:
        super().__init__(step)
        self._outside, self._own, self._run = program.outside, own, run

    def one(self, row: Row) -> Taken:
        """Take a step."""
        for mine, given in zip(self._own, (*row, *self._outside()), strict=True):
            mine.copy_(given)
        return self._run()[0].clone(), True  # the next step writes over it


def in_c(program: Program, inputs: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
    """Return a recorded program in C, which runs on these very inputs.

    It returns the outputs that are not written over inputs; the next call writes over them.

    Raises:
        CannotError: the program cannot be written as C, or there is no compiler.
    """
    kept = KeptKernels(program.graph, list(inputs))
    found = kept.read() or kept.compile()
    if found is None:
        raise CannotError(kept.why)
    calls, results = found

    def run() -> list[Tensor]:
        with torch.no_grad():
            for function, args, named in calls:
                function(*args, **named)
        return results

    return run
