"""One chain of the no-U-turn sampler, as a generator that requests energies U(z) = -log p(y, z) and their gradients.

A chain yields positions and is sent their energies, so one call of the model can serve several chains, whatever the
length of their trajectories. The tree is that of Betancourt (2017): multinomial weights, doubled until it turns back.
Momenta are in units of the square roots of the masses, p ~ N(0, I), and z moves by s·p, with s the scale of each z.
"""

import math
from collections.abc import Generator
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]  # one vector of all coordinates
Result = TypeVar("Result")
# Yields positions, is sent (energy, gradient) of each, and returns a result.
Asks = Generator[Array, tuple[float, Array], Result]

_TOO_FAR = 1000.0  # a larger increase in energy counts as a divergence


class Point(NamedTuple):
    """A point on a trajectory.

    Attributes:
        z: the position.
        p: the momentum.
        energy: U(z).
        slope: its gradient.
    """

    z: Array
    p: Array
    energy: float
    slope: Array

    @property
    def total(self) -> float:
        """Potential plus kinetic energy; NaN counts as infinite."""
        found = self.energy + 0.5 * float(self.p @ self.p)
        return found if math.isfinite(found) else math.inf


@dataclass(frozen=True)
class Moved:
    """The result of a transition.

    Attributes:
        point: the new point.
        acceptance: the mean Metropolis probability along the trajectory.
        diverged: whether the trajectory diverged.
        depth: number of doublings of the trajectory.
    """

    point: Point
    acceptance: float
    diverged: bool
    depth: int


class _Tree(NamedTuple):
    left: Point
    right: Point
    chosen: Point
    log_weight: float
    sum_p: Array
    acceptance: float  # a sum over its leaves
    leaves: int
    turning: bool = False
    diverged: bool = False


@dataclass(frozen=True)
class Walker:
    """The transition kernel of a chain.

    Attributes:
        step: the leapfrog step size.
        scale: s, one number for each coordinate.
        random: the chain's random numbers.
        max_depth: maximum number of doublings of a trajectory.
    """

    step: float
    scale: Array
    random: np.random.Generator
    max_depth: int

    def leap(self, start: Point, direction: int) -> Asks[Point]:
        """Take one leapfrog step, forward or backward in time."""
        step = direction * self.step
        half = start.p - 0.5 * step * self.scale * start.slope
        z = start.z + step * self.scale * half
        energy, slope = yield z
        return Point(z, half - 0.5 * step * self.scale * slope, energy, slope)

    def refreshed(self, point: Point) -> Point:
        """Return the point with a new momentum."""
        return point._replace(p=self.random.standard_normal(point.z.shape))

    def move(self, start: Point) -> Asks[Moved]:
        """Take one transition, which leaves the posterior invariant."""
        start = self.refreshed(start)
        tree = _Tree(start, start, start, 0.0, start.p, 0.0, 0)
        depth = 0
        while depth < self.max_depth:
            direction = 1 if self.random.random() < 0.5 else -1
            new = yield from self._grow(tree.right if direction == 1 else tree.left, direction, depth, start.total)
            # The new half is taken with the odds of its weight to the old one's (biased progressive sampling).
            tree = self._joined(tree, new, direction, min(0.0, new.log_weight - tree.log_weight))
            depth += 1
            if tree.turning or tree.diverged:
                break
        return Moved(tree.chosen, tree.acceptance / tree.leaves, tree.diverged, depth)

    def _grow(self, start: Point, direction: int, depth: int, energy: float) -> Asks[_Tree]:
        """Build a tree of 2^depth leaves on one side, or the part of it before it turns."""
        if depth == 0:
            leaf = yield from self.leap(start, direction)
            gain = energy - leaf.total
            return _Tree(leaf, leaf, leaf, gain, leaf.p, math.exp(min(0.0, gain)), 1, diverged=not gain > -_TOO_FAR)
        first = yield from self._grow(start, direction, depth - 1, energy)
        if first.turning or first.diverged:
            return first
        second = yield from self._grow(first.right if direction == 1 else first.left, direction, depth - 1, energy)
        return self._joined(first, second, direction, second.log_weight - _log_add(first.log_weight, second.log_weight))

    def _joined(self, old: _Tree, new: _Tree, direction: int, log_odds: float) -> _Tree:
        """Return both trees as one; a point of the new one is chosen with probability exp(log_odds)."""
        stopped = new.turning or new.diverged  # then no point of it may be chosen: it would not be reversible
        takes = not stopped and -self.random.standard_exponential() < log_odds
        first, second = (old, new) if direction == 1 else (new, old)
        sum_p = old.sum_p + new.sum_p
        turning = new.turning or (
            not new.diverged
            and (
                _turns(first.left.p, second.right.p, sum_p)
                # A full turn looks straight from end to end; the checks across the two halves detect it.
                or _turns(first.left.p, second.left.p, first.sum_p + second.left.p)
                or _turns(first.right.p, second.right.p, second.sum_p + first.right.p)
            )
        )
        chosen, log_weight = new.chosen if takes else old.chosen, _log_add(old.log_weight, new.log_weight)
        acceptance, leaves = old.acceptance + new.acceptance, old.leaves + new.leaves
        return _Tree(first.left, second.right, chosen, log_weight, sum_p, acceptance, leaves, turning, new.diverged)


def _turns(left: Array, right: Array, sum_p: Array) -> bool:
    return bool(left @ sum_p <= 0 or right @ sum_p <= 0)


def _log_add(a: float, b: float) -> float:
    high = max(a, b)
    return high if high == -math.inf else high + math.log(math.exp(a - high) + math.exp(b - high))
