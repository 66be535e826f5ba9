"""The training of a fleet, in one process or on several ranks.

Replicas do not interact in training, so ranks train theirs alone, and do not communicate until it is over.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from pyro_dropout.errors import DivergedError, PyroDropoutError
from pyro_dropout.generative.random_state import RandomState, forked, random_state, set_random_state
from pyro_dropout.protocols import Record
from pyro_dropout.training.checkpoints.training_checkpoint import Checkpoint
from pyro_dropout.training.distributed.process_group import Group
from pyro_dropout.training.fleet.replicas import Replica, tensors_in
from pyro_dropout.training.history import History
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


# --- several ranks ----------------------------------------------------------------------------------------------------


def folder_of_rank(group: Group, checkpoint: str | Path | Checkpoint, replicas: int) -> Checkpoint:
    """Return where this rank writes checkpoints; raise if the folder is from another number of ranks."""
    how = checkpoint if isinstance(checkpoint, Checkpoint) else Checkpoint(checkpoint)
    root = Path(how.folder)

    def look() -> tuple[dict[str, Tensor], None]:
        there = len(list(root.glob("rank-*"))) if root.is_dir() else 0
        if there and there != min(group.world, replicas):
            raise PyroDropoutError(
                f"{str(root)!r} holds checkpoints of a fleet on {there} processes, but these are {group.world}. Start"
                " as many as before to resume, or give another folder to start over."
            )
        return {}, None

    group.from_first(look)
    return dataclasses.replace(how, folder=root / f"rank-{group.rank:03d}")


def joined(group: Group, own: History | None, lost: str, replicas: int) -> History:
    """Return the history of all replicas, in order; NaN where a rank lost its replicas before the end.

    Args:
        group: the ranks.
        own: the history of this rank's replicas; None if it has none, or if all of them diverged.
        lost: why they diverged; "" if they did not. If all replicas of all ranks have, this is raised.
        replicas: how many the fleet has.
    """
    said = [each for each in group.gather_facts(lost) if each]
    if len(said) == min(group.world, replicas):
        raise DivergedError(said[0])
    flags = () if own is None else (own.compiled, own.losses.dtype == torch.float64)
    steps, compiled, wide = group.any(0 if own is None else own.steps, *(flags or (False, False)))
    times = torch.tensor([0.0, 0.0] if own is None else [own.seconds, own.compile_seconds], dtype=torch.float64)
    seconds, compiling = torch.stack(group.gather(times)).amax(0).tolist()
    losses = torch.full((steps, replicas), torch.nan, dtype=torch.float64 if wide else torch.float32)
    for rank in range(group.world):
        part = losses[:, rank :: group.world]
        if rank == group.rank and own is not None:
            part = own.losses.to(part.dtype)
        losses[:, rank :: group.world] = group.copied(part.contiguous(), rank)
    return History(losses, steps, seconds, compiling, bool(compiled), torch.get_float32_matmul_precision())


def exchange(group: Group, replicas: list[Replica], device: torch.device) -> None:
    """Give every rank what the others' replicas have learned, one stacked tensor at a time."""
    for rank in range(group.world):
        for tensors in zip(*map(tensors_in, replicas[rank :: group.world]), strict=True):
            learned = group.copied(torch.stack([tensor.detach() for tensor in tensors]), rank)
            for tensor, value in zip(tensors, learned, strict=True):
                tensor.data = value.to(device)
