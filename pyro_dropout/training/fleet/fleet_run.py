"""The training of a fleet."""

from collections.abc import Callable

from torch import Tensor

from pyro_dropout.generative.random_state import RandomState, forked, random_state, set_random_state
from pyro_dropout.protocols import Record
from pyro_dropout.training.runner import TrainingRun


class FleetRun(TrainingRun):
    """The training of a fleet.

    Attributes:
        total: how many steps ``fit`` takes.
        names: the name of each of ``values``: its path in the first replica's model or guide.
        facts: what must be the same when the training is resumed.
        random: the states of the generators that a seed has started; None to draw from those of the process.
    """

    total: int
    names: list[str]
    facts: Callable[[], Record]
    random: RandomState | None

    def take_generators(self) -> None:
        """Continue with the generators of the whole process, which a checkpoint contains."""
        if self.random is not None:
            set_random_state(self.random)
            self.random = None

    def advance(self, steps: int) -> Tensor:
        """Take some steps, with the run's own generators if it has any; return the losses before each."""
        if self.random is None:
            return super().advance(steps)
        with forked():
            set_random_state(self.random)
            losses = super().advance(steps)
            self.random = random_state()
        return losses
