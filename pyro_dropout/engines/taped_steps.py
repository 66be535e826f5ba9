"""Recorded steps of a small network on a tape: the same tensors at every step, and no Python between operations."""

from collections.abc import Callable, Sequence

from torch import Tensor

from pyro_dropout.engines.program import Program
from pyro_dropout.engines.tape import NoTapeError, Tape


class TapedSteps:
    """Steps whose tensor operations are replayed in memory of their own.

    Args:
        tape: its first result is the loss.
        index: the inputs among those of the tape that are given anew to each step: rows of the data.
        then: what follows the operations of the tape: the optimiser, where it is not on the tape.
    """

    def __init__(self, tape: Tape, index: Sequence[Tensor], then: Callable[[], object] | None) -> None:
        self._tape, self._index, self._then = tape, index, then

    def begin(self) -> None:
        """Look at what may have changed between two rounds of steps."""
        self._tape.begin()

    def __call__(self, index: Sequence[Tensor]) -> Tensor:
        """Take a step, and return the loss before it."""
        for mine, given in zip(self._index, index, strict=True):
            mine.copy_(given)
        loss = self._tape()[0].clone()  # the next step writes over it
        if self._then is not None:
            self._then()
        return loss


def taped(
    program: Program,
    changed: Sequence[Tensor],
    fixed: Sequence[Tensor],
    index: Sequence[Tensor],
    then: Callable[[list[Tensor]], Callable[[], object]] | None = None,
) -> TapedSteps | None:
    """Return the steps of a program that was recorded; None if they do not fit on a tape.

    Args:
        program: its inputs are those that follow. Its first output is the loss, after those that it writes over inputs.
        changed: what steps change: parameters, their number, and what the program writes into.
        fixed: what stays the same from step to step; changes between two rounds of steps are seen.
        index: an example of what is given anew to each step.
        then: makes what follows the program in each step, from its outputs.
    """
    own = [each.clone() for each in index]
    inputs = [*changed, *fixed, *own]
    changing = [*range(len(changed)), *range(len(inputs) - len(own), len(inputs))]
    try:
        tape = Tape(program.graph, inputs, changing)
    except NoTapeError:
        return None
    return TapedSteps(tape, own, None if then is None else then(tape.results))
