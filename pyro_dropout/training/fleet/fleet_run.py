"""The training of a fleet: of any networks, or of small ones, whose steps one kernel takes."""

from collections.abc import Callable

from pyro_dropout.protocols import Record
from pyro_dropout.training.one_kernel.fused_run import FusedRun
from pyro_dropout.training.runner import TrainingRun


class FleetRun(TrainingRun):
    """The training of a fleet.

    Attributes:
        total: how many steps ``fit`` takes.
        names: the name of each of ``values``: its path in the first replica's model or guide.
        facts: what must be the same when the training is resumed.
    """

    total: int
    names: list[str]
    facts: Callable[[], Record]


class FusedFleetRun(FusedRun, FleetRun):
    """The training of a fleet of small networks, a program of one kernel for each."""
