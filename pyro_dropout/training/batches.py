"""Mini-batches of data in memory: rows, in random order. Those of a ``DataLoader`` are a ``Stream``."""

from collections.abc import Iterator

import torch
from torch import Tensor

from pyro_dropout.engines.engine import CHAIN

_AHEAD = 8 * CHAIN  # batches that are drawn at once, as long as they are
_MOST = 2**21  # indices at most


class Batches:
    """Mini-batches of indices, shuffled and without replacement within an epoch.

    The few left over at the end of an epoch are skipped in it. ``rows``, (count,) or (replicas, count), are those to
    choose from, for one run or for each of several.
    """

    chained, together = True, CHAIN

    def __init__(self, size: int, rows: Tensor) -> None:
        self.size, self.rows = size, rows
        # A separate generator: the order does not depend on how many steps are taken at a time, or in total.
        self.generator = torch.Generator(rows.device).manual_seed(int(torch.randint(2**62, ())))
        self.waiting = rows.new_empty((0, *rows.shape[:-1], size))

    def example(self) -> list[Tensor]:
        """Return a batch like any other, as the input of a step."""
        return [self.rows[..., : self.size].contiguous()]

    def inputs(self, count: int) -> Iterator[list[Tensor]]:
        """Yield the next ``count`` batches, as inputs of steps."""
        return ([row] for row in self.take(count))

    def state(self) -> dict[str, Tensor]:
        """Return what later batches depend on."""
        return {"waiting": self.waiting, "order": self.generator.get_state()}

    def set_state(self, tensors: dict[str, Tensor]) -> None:
        """Restore a state."""
        self.waiting = tensors["waiting"].to(self.rows.device)
        self.generator.set_state(tensors["order"])

    def take(self, count: int) -> Tensor:
        """Return the next ``count`` batches, (count, size) or (count, replicas, size)."""
        while len(self.waiting) < count:
            each = self.rows.shape[-1] // self.size
            # So many epochs are drawn at a time that the order does not depend on how many batches are asked for.
            epochs = max(1, min(_AHEAD // each, _MOST // self.rows.numel()))
            draws = torch.rand((epochs, *self.rows.shape), device=self.rows.device, generator=self.generator)
            order = draws.argsort(dim=-1, stable=True)[..., : each * self.size]
            rows = self.rows.expand_as(draws).gather(-1, order).unflatten(-1, (each, self.size))
            self.waiting = torch.cat([self.waiting, rows.movedim(-2, 1).flatten(0, 1)])
        taken, self.waiting = self.waiting[:count], self.waiting[count:]
        return taken
