"""The random numbers of chains: each has its own, so its draws do not depend on how many others there are."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pyro_dropout.references.nuts.no_u_turn import HALF, LEAF, Array


class Randoms:
    """Random numbers of each chain: noise for its leaves, and momenta in a ring, (chains, rows, d).

    The k-th momentum of a chain is in row k modulo the number of rows. Those that were used must be replaced before
    others are needed in their rows.

    Args:
        seed: of all of them.
        chains: number of chains.
        size: number of coordinates.
        more: number of coordinates after them, which stay 0.
        rows: of the ring.
    """

    def __init__(self, seed: int, chains: int, size: int, more: int, rows: int) -> None:
        self._uniform = [np.random.default_rng([seed, c, 0]) for c in range(chains)]
        self._normal = [np.random.default_rng([seed, c, 1]) for c in range(chains)]
        self._size, self.ring = size, np.zeros((chains, rows, size + more))
        for row, random in zip(self.ring, self._normal, strict=True):
            row[:, :size] = random.standard_normal((rows, size))
        self._used = np.zeros(chains, np.int64)

    def momenta(self, on_torch: bool) -> Array:
        """Return the ring, as a tensor or as an array, which share their memory."""
        return torch.from_numpy(self.ring) if on_torch else self.ring

    def replace(self, used: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Replace the momenta that were used, and return where they are: chains and rows; ``used`` counts them."""
        rows = self.ring.shape[1]
        chains, places = [], []
        for c in np.flatnonzero(used > self._used):
            where = np.arange(self._used[c], used[c]) % rows
            self.ring[c, where, : self._size] = self._normal[c].standard_normal((len(where), self._size))
            chains.append(np.full(len(where), c))
            places.append(where)
        self._used = used
        return (np.concatenate(chains), np.concatenate(places)) if chains else (used[:0], used[:0])

    def grown(self, rows: int) -> Tensor:
        """Return a ring of at least so many rows, in place of the one before; nothing that is unused is lost."""
        before = self.ring
        chains, few, width = before.shape
        rows = max(rows, few)
        self.ring = np.zeros((chains, rows, width))
        for c, random in enumerate(self._normal):
            first = np.arange(self._used[c], self._used[c] + few)
            last = np.arange(self._used[c] + few, self._used[c] + rows)
            self.ring[c, first % rows] = before[c, first % few]
            self.ring[c, last % rows, : self._size] = random.standard_normal((len(last), self._size))
        return torch.from_numpy(self.ring)

    def uniform(self, steps: int) -> NDArray[np.float64]:
        """Return the uniform numbers of some steps, (chains, steps, 3)."""
        found = np.empty((len(self._uniform), steps, 3))
        for random, place in zip(self._uniform, found, strict=True):
            random.random(out=place)
        return found

    def noise(self, steps: int, on_torch: bool) -> Sequence[Array]:
        """Return the noise of each of some steps, (chains, 3)."""
        noise = 1 - self.uniform(steps).swapaxes(0, 1)  # never 0
        noise[..., [LEAF, HALF]] = -np.log(noise[..., [LEAF, HALF]])
        with np.errstate(divide="ignore"):  # 1 gives infinite noise, by which the leaf is chosen
            noise[..., LEAF] = -np.log(noise[..., LEAF])
        noise = np.ascontiguousarray(noise)
        return torch.from_numpy(noise).unbind(0) if on_torch else list(noise)
