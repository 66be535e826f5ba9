"""Members that several ranks train together: each rank has some of them, and all data."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_dropout.training.distributed.process_group import ALONE, Group


@dataclass(frozen=True)
class Share:
    """Which of some members a rank trains.

    A rank for which there is none trains a copy of the first, which does not count.

    Attributes:
        members: how many there are.
        group: the ranks.

    Example:
        >>> from pyro_dropout.training.distributed.process_group import Group
        >>> from pyro_dropout.training.ensemble.share import Share
        >>> [Share(3, Group(rank, 2)).own for rank in range(2)]
        [slice(0, 2, None), slice(2, 3, None)]
        >>> Share(1, Group(1, 2)).own, Share(1, Group(1, 2)).idle
        (slice(0, 1, None), True)
    """

    members: int
    group: Group = ALONE

    @property
    def idle(self) -> bool:
        """Whether there is no member for this rank."""
        return self.group.rank >= self.members

    @property
    def own(self) -> slice:
        """The members of this rank."""
        return slice(0, 1) if self.idle else self.group.share(self.members)

    def whole(self, own: Tensor) -> Tensor:
        """Return the rows of all members, in order, from those of this rank's."""
        world = self.group.world
        if world == 1:
            return own
        parts = []
        for rank in range(min(world, self.members)):
            share = Group(rank, world).share(self.members)
            theirs = own.new_empty(share.stop - share.start, *own.shape[1:])
            parts.append(self.group.copied(own if rank == self.group.rank else theirs, rank))
        return torch.cat(parts)

    def totals(self, own: list[Tensor]) -> list[Tensor]:
        """Return sums over all ranks, added in rank order, so that they are bitwise equal on all of them."""
        if self.group.world == 1:
            return own
        flat = torch.cat([each.reshape(-1) for each in own])
        total = torch.stack(self.group.gather(torch.zeros_like(flat) if self.idle else flat)).sum(0)
        parts = total.split([each.numel() for each in own])
        return [part.reshape(each.shape).to(each) for part, each in zip(parts, own, strict=True)]
