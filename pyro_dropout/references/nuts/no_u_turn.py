"""One step of the no-U-turn sampler for all chains at once, as functions of arrays without branches.

The tree is that of Betancourt (2017): multinomial weights, doubled until it turns back. It is built leaf by leaf, not
by recursion (Phan et al. 2019): block starts at each level of the tree say where a leaf completes two halves, which are
then checked for a turn as the recursion would do. Chains are rows of a batch. Each is at its own leaf of its own tree,
so none waits for another, and a step does the same operations for all of them. Momenta are in units of the square
roots of the masses, p ~ N(0, I), and z moves by s·p, with s the scale of each z.

The functions take numpy's arrays or torch's tensors. A short operation of numpy takes half the time of one of torch,
and torch's can be compiled into one kernel.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array: TypeAlias = Any  # one of numpy or of torch

_TOO_FAR = 1000.0  # a larger increase in energy counts as a divergence

# One leaf takes three random numbers for each chain: Gumbel noise, by which a leaf of the new half is chosen; an
# exponential one, by which the new half is taken; and a uniform one, for the side that grows next.
LEAF, HALF, SIDE = range(3)


class Randoms:
    """Random numbers of each chain: noise for its leaves, and momenta in a ring, (chains, rows, size + more).

    The k-th momentum of a chain is in row k modulo the number of rows. Those that were used must be replaced before
    others are needed in their rows. The last ``more`` coordinates stay 0.
    """

    def __init__(self, seed: int, chains: int, size: int, more: int, rows: int) -> None:
        self._uniform = [np.random.default_rng([seed, c, 0]) for c in range(chains)]
        self._normal = [np.random.default_rng([seed, c, 1]) for c in range(chains)]
        self._size, self.ring = size, np.zeros((chains, rows, size + more))
        for row, random in zip(self.ring, self._normal, strict=True):
            row[:, :size] = random.standard_normal((rows, size))
        self._used = np.zeros(chains, np.int64)

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

    def noise(self, steps: int) -> NDArray[np.float64]:
        """Return the noise of each of some steps, (steps, chains, 3)."""
        noise = 1 - self.uniform(steps).swapaxes(0, 1)  # never 0
        noise[..., [LEAF, HALF]] = -np.log(noise[..., [LEAF, HALF]])
        with np.errstate(divide="ignore"):  # 1 gives infinite noise, by which the leaf is chosen
            noise[..., LEAF] = -np.log(noise[..., LEAF])
        return np.ascontiguousarray(noise)


class Tree(NamedTuple):
    """The trees of all chains: C chains, d coordinates, L levels, one more than the largest depth."""

    z: Array  # the end that grows, (C, d)
    p: Array  # its momentum
    slope: Array  # the gradient of the energy there
    back_z: Array  # the other end
    back_p: Array
    back_slope: Array
    chosen_z: Array  # the point chosen so far, from the tree without its new half
    chosen_slope: Array
    new_z: Array  # the point chosen from the new half
    new_slope: Array
    sum_p: Array  # the sum of momenta of all points, the new half included
    start_p: Array  # the momentum at the start of the current block of 2^l points of each level l, (C, L, d)
    before_p: Array  # the momentum at the point before that block
    before_sum: Array  # the sum of momenta before that block
    chosen_energy: Array  # U of the chosen points, (C, 1)
    new_energy: Array
    best: Array  # the largest log-weight plus Gumbel noise in the new half
    weight: Array  # log-weight of the tree without its new half
    new_weight: Array  # log-weight of that half
    origin: Array  # potential plus kinetic energy of the first point
    acceptance: Array  # the sum of Metropolis probabilities
    points: Array  # number of points, the first included
    depth: Array  # number of doublings
    sign: Array  # 1 if the tree grows forward in time, and -1 if backward
    gain: Array  # the energy of the first point less that of the last one
    diverged: Array  # 1 if the trajectory diverged; 0 otherwise
    ended: Array  # 1 if it ended for any reason


def kit(array: Array) -> Any:
    """Return the library of an array."""
    return torch if isinstance(array, torch.Tensor) else np


def numpy_of(values: Array) -> NDArray[Any]:
    """Return tensors and arrays as arrays."""
    found: NDArray[Any] = values.cpu().numpy() if isinstance(values, Tensor) else values
    return found


def counts_of(numbers: Array) -> NDArray[np.int64]:
    """Return the numbers of a column (C, 1) as integers."""
    return numpy_of(numbers)[:, 0].astype(np.int64)


def integers(values: Sequence[int], like: Array) -> Array:
    """Return integers as an array of the same library and device as another."""
    return torch.tensor(values, device=like.device) if isinstance(like, torch.Tensor) else np.array(values)


def row_of(rows: Array, number: Array) -> Array:
    """Return for each chain one of its rows, (C, M, d) to (C, d); ``number`` is (C, 1)."""
    if isinstance(rows, torch.Tensor):
        return rows.gather(1, number[..., None].expand(-1, 1, rows.shape[2]))[:, 0]
    return rows[np.arange(len(rows)), number[:, 0]]


def planted(z: Array, energy: Array, slope: Array, levels: int) -> Tree:
    """Return trees of one point (C, d) each, without momentum; ``energy`` is (C, 1)."""
    xp = kit(z)
    none, zero = xp.zeros_like(z), xp.zeros_like(energy)
    level = xp.stack([none] * levels, 1)
    vectors = [z, none, slope, z, none, slope, z, slope, z, slope, none]
    points = integers([0] * len(z), z)[:, None]
    return Tree._make([*vectors, level, level, level, energy, energy, *[zero] * 5, points, *[zero] * 5])


def refreshed(tree: Tree, which: Array, momentum: Array, sign: Array, stays: Array) -> Tree:
    """Return the trees; of the chains ``which``, new ones that start at the chosen point with this momentum and sign.

    Where it ``stays``, the chosen point remains the first one, whatever the tree finds. All but momenta are (C, 1).
    """
    xp = kit(momentum)

    def new(value: Array | float, old: Array) -> Array:
        return xp.where(which[..., None] if old.ndim == 3 else which, value, old)

    start = momentum[:, None]
    lowest = -np.inf
    return tree._replace(
        z=new(tree.chosen_z, tree.z),
        p=new(momentum, tree.p),
        slope=new(tree.chosen_slope, tree.slope),
        back_z=new(tree.chosen_z, tree.back_z),
        back_p=new(momentum, tree.back_p),
        back_slope=new(tree.chosen_slope, tree.back_slope),
        sum_p=new(momentum, tree.sum_p),
        start_p=new(start, tree.start_p),
        before_sum=new(0.0, tree.before_sum),
        best=new(lowest, tree.best),
        weight=new(xp.where(stays, np.inf, 0.0), tree.weight),
        new_weight=new(lowest, tree.new_weight),
        origin=new(tree.chosen_energy + 0.5 * (momentum * momentum).sum(-1, keepdims=True), tree.origin),
        acceptance=new(0.0, tree.acceptance),
        points=new(1, tree.points),
        depth=new(0.0, tree.depth),
        sign=new(sign, tree.sign),
        diverged=new(0.0, tree.diverged),
        ended=new(0.0, tree.ended),
    )


def halfway(tree: Tree, step: Array, scale: Array) -> tuple[Array, Array]:
    """Return the positions after one leapfrog step, and the momenta half a step before; steps (C, 1), scales (C, d)."""
    move = tree.sign * step * scale
    half = tree.p - 0.5 * move * tree.slope
    return tree.z + move * half, half


def grown(
    tree: Tree, z: Array, half: Array, energy: Array, slope: Array, step: Array, scale: Array, noise: Array
) -> Tree:
    """Return the trees with one more leaf each.

    The leaves' positions z, (C, d), and momenta half a step before are those of ``halfway``; energy is (C,), its slope
    (C, d), and noise (C, 3).
    """
    xp = kit(z)
    energy = energy[:, None]
    p = half - 0.5 * (tree.sign * step * scale) * slope
    total = energy + 0.5 * (p * p).sum(-1, keepdims=True)
    gain = tree.origin - xp.where(xp.isfinite(total), total, np.inf)
    diverged = ~(gain > -_TOO_FAR)
    sum_p = tree.sum_p + p
    # A leaf of the new half is chosen with its share of the weight: the one with the largest Gumbel key is.
    key = gain + noise[:, LEAF, None]
    taken = key > tree.best
    new_z, new_slope = xp.where(taken, z, tree.new_z), xp.where(taken, slope, tree.new_slope)
    new_energy = xp.where(taken, energy, tree.new_energy)
    new_weight = xp.logaddexp(tree.new_weight, gain)
    start_p, before_p, before_sum, complete, halves, whole = _starts_and_turns(tree, p, sum_p)
    stopped = diverged | halves  # then no point of the new half may be chosen: it would not be reversible
    doubled = complete & ~stopped
    # The new half is taken with the odds of its weight to the old one's (biased progressive sampling).
    swapped = doubled & (-noise[:, HALF, None] < new_weight - tree.weight)
    depth = tree.depth + (complete | stopped)
    ended = stopped | (doubled & (whole | (depth >= tree.start_p.shape[1] - 1)))
    again = doubled & ~ended
    sign = xp.where(again, xp.where(noise[:, SIDE, None] < 0.5, 1.0, -1.0), tree.sign)
    flipped = sign != tree.sign
    far_p = xp.where(flipped, p, tree.back_p)
    deep = again[..., None]
    return Tree(
        z=xp.where(flipped, tree.back_z, z),
        p=xp.where(flipped, tree.back_p, p),
        slope=xp.where(flipped, tree.back_slope, slope),
        back_z=xp.where(flipped, z, tree.back_z),
        back_p=far_p,
        back_slope=xp.where(flipped, slope, tree.back_slope),
        chosen_z=xp.where(swapped, new_z, tree.chosen_z),
        chosen_slope=xp.where(swapped, new_slope, tree.chosen_slope),
        new_z=new_z,
        new_slope=new_slope,
        sum_p=sum_p,
        # In the direction of the next half, the whole tree is the block that starts at its far end.
        start_p=xp.where(deep, far_p[:, None], start_p),
        before_p=before_p,
        before_sum=xp.where(deep, 0.0, before_sum),
        chosen_energy=xp.where(swapped, new_energy, tree.chosen_energy),
        new_energy=new_energy,
        best=xp.where(again, -np.inf, xp.maximum(key, tree.best)),
        weight=xp.where(doubled, xp.logaddexp(tree.weight, new_weight), tree.weight),
        new_weight=xp.where(again, -np.inf, new_weight),
        origin=tree.origin,
        acceptance=tree.acceptance + xp.exp(xp.where(gain < 0, gain, 0.0)),
        points=tree.points + 1,
        depth=depth,
        sign=sign,
        gain=gain,
        diverged=diverged + xp.zeros_like(gain),
        ended=ended + xp.zeros_like(gain),
    )


def _starts_and_turns(tree: Tree, p: Array, sum_p: Array) -> list[Array]:
    """Return the three block starts with a leaf added, and what the leaf completes, three flags (C, 1).

    They say whether it completes the new half, whether that turns back at any level, and whether the whole tree does.
    Points are numbered from 0 at the far end of the tree, so the new half has the numbers 2^depth to 2^(depth+1) - 1,
    and block l starts at each multiple of 2^l.
    """
    levels = tree.start_p.shape[1]
    xp, size, number = kit(p), integers([2**level for level in range(levels)], p), tree.points
    starts = (number & (size - 1) == 0)[..., None]
    start_p = xp.where(starts, p[:, None], tree.start_p)
    before_p = xp.where(starts, tree.p[:, None], tree.before_p)
    before_sum = xp.where(starts, tree.sum_p[:, None], tree.before_sum)
    # At level l the points a..b and c..e are two blocks of 2^l points each, and e is the leaf.
    a, b, c, e = start_p[:, 1:], before_p[:, :-1], start_p[:, :-1], p[:, None]
    whole, second = sum_p[:, None] - before_sum[:, 1:], sum_p[:, None] - before_sum[:, :-1]
    to_c, from_b = whole - second + c, second + b
    # A full turn looks straight from end to end; the checks across the two halves detect it.
    pairs = ((a, whole), (e, whole), (a, to_c), (c, to_c), (b, from_b), (e, from_b))
    turns = number < 0  # nowhere
    for left, right in pairs:
        turns = turns | ((left * right).sum(-1) <= 0)
    turns = turns & ((number + 1) & (size[1:] - 1) == 0)
    last = size[1:] == number + 1  # the whole tree, at the end of its new half
    flags = (each.any(-1, keepdims=True) for each in (last, turns & ~last, turns & last))
    return [start_p, before_p, before_sum, *flags]
