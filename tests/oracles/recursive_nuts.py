"""The no-U-turn sampler by recursion, one chain at a time: what the package's sampler of all chains must agree with.

It shares no code with it but the order in which random numbers are used. A chain is a generator that yields positions
and is sent their energies. Step size and scales are adapted by Pyro's own dual averaging and Welford covariance.
"""

import math
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from pyro.infer.mcmc.adaptation import WarmupAdapter
from pyro.ops.dual_averaging import DualAveraging
from pyro.ops.welford import WelfordCovariance

from pyro_dropout.references.nuts.adaptation import Plan

Array = NDArray[np.float64]  # one vector of all coordinates
Result = TypeVar("Result")
# Yields positions, is sent (energy, gradient) of each, and returns a result.
Asks = Generator[Array, tuple[float, Array], Result]

_TOO_FAR = 1000.0  # a larger increase in energy counts as a divergence


class Numbers:
    """The random numbers of a chain, in the order in which the package's sampler uses them."""

    def __init__(self, seed: int, chain: int) -> None:
        self._uniform = np.random.default_rng([seed, chain, 0])
        self._normal = np.random.default_rng([seed, chain, 1])
        self._rows: list[list[float]] = []

    def advance(self) -> None:
        """Draw the numbers of the next leaf."""
        self._rows = self._rows or (1 - self._uniform.random((64, 3)))[::-1].tolist()
        self._leaf, self._half, self.side = self._rows.pop()

    def momentum(self, size: int) -> Array:
        """Draw a momentum."""
        return self._normal.standard_normal(size)

    @property
    def gumbel(self) -> float:
        """Noise of the leaf, by which one of a half is chosen."""
        return -math.log(-math.log(self._leaf))

    @property
    def exponential(self) -> float:
        """Minus the logarithm of a uniform number, by which a half is taken."""
        return -math.log(self._half)


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
    key: float  # the largest log-weight plus Gumbel noise
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
    random: "Numbers"
    max_depth: int

    def leap(self, start: Point, direction: int) -> Asks[Point]:
        """Take one leapfrog step, forward or backward in time."""
        step = direction * self.step
        half = start.p - 0.5 * step * self.scale * start.slope
        z = start.z + step * self.scale * half
        energy, slope = yield z
        self.random.advance()
        return Point(z, half - 0.5 * step * self.scale * slope, energy, slope)

    def refreshed(self, point: Point) -> Point:
        """Return the point with a new momentum."""
        return point._replace(p=self.random.momentum(len(point.z)))

    def move(self, start: Point) -> Asks[Moved]:
        """Take one transition, which leaves the posterior invariant."""
        start = self.refreshed(start)
        tree = _Tree(start, start, start, math.nan, 0.0, start.p, 0.0, 0)
        depth = 0
        while depth < self.max_depth:
            direction = 1 if self.random.side < 0.5 else -1
            new = yield from self._grow(tree.right if direction == 1 else tree.left, direction, depth, start.total)
            # The new half is taken with the odds of its weight to the old one's (biased progressive sampling).
            tree = self._joined(tree, new, direction, -self.random.exponential < new.log_weight - tree.log_weight)
            depth += 1
            if tree.turning or tree.diverged:
                break
        return Moved(tree.chosen, tree.acceptance / tree.leaves, tree.diverged, depth)

    def _grow(self, start: Point, direction: int, depth: int, energy: float) -> Asks[_Tree]:
        """Build a tree of 2^depth leaves on one side, or the part of it before it turns."""
        if depth == 0:
            leaf = yield from self.leap(start, direction)
            gain = energy - leaf.total
            key, accepted = gain + self.random.gumbel, math.exp(min(0.0, gain))
            return _Tree(leaf, leaf, leaf, key, gain, leaf.p, accepted, 1, diverged=not gain > -_TOO_FAR)
        first = yield from self._grow(start, direction, depth - 1, energy)
        if first.turning or first.diverged:
            return first
        second = yield from self._grow(first.right if direction == 1 else first.left, direction, depth - 1, energy)
        return self._joined(first, second, direction, second.key > first.key)

    def _joined(self, old: _Tree, new: _Tree, direction: int, taken: bool) -> _Tree:
        """Return both trees as one, and the point of the new one if it is taken."""
        stopped = new.turning or new.diverged  # then no point of it may be chosen: it would not be reversible
        takes = not stopped and taken
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
        key = max(old.key, new.key)
        more = (sum_p, acceptance, leaves, turning, new.diverged)
        return _Tree(first.left, second.right, chosen, key, log_weight, *more)


def _turns(left: Array, right: Array, sum_p: Array) -> bool:
    return bool(left @ sum_p <= 0 or right @ sum_p <= 0)


def _log_add(a: float, b: float) -> float:
    high = max(a, b)
    return high if high == -math.inf else high + math.log(math.exp(a - high) + math.exp(b - high))


Energies = Callable[[Array], tuple[Array, Array]]  # positions (chains, d) -> energies (chains,), gradients (chains, d)

_LIKELY = math.log(0.8)  # the initial step size is the largest with this acceptance; Stan's value


@dataclass
class ChainResult:
    """The result of one chain.

    Attributes:
        draws: positions after warmup, (draws, d).
        diverged: number of divergent trajectories.
        deepest: number of trajectories that reached the maximum depth.
        step: the leapfrog step size.
        scale: the scale of each coordinate.
        steps: number of energies.
    """

    draws: list[Array] = field(default_factory=list)
    diverged: int = 0
    deepest: int = 0
    step: float = math.nan
    scale: Array = field(default_factory=lambda: np.empty(0))
    steps: int = 0


def run_chains(
    energies: Energies, starts: Array, plan: Plan, seed: int, tick: Callable[[], None] = lambda: None
) -> list[ChainResult]:
    """Run one chain from each row of ``starts``, (chains, d), with one call of ``energies`` per step of all chains.

    ``tick`` is called after each draw of each chain.
    """
    chains = [ChainResult() for _ in starts]
    randoms = [Numbers(seed, number) for number in range(len(starts))]
    runs = [_run(chain, z, plan, random, tick) for chain, z, random in zip(chains, starts, randoms, strict=True)]
    positions = np.stack([next(run) for run in runs])
    going = set(range(len(runs)))
    with np.errstate(over="ignore", invalid="ignore"):  # a divergent trajectory may end anywhere
        while going:
            values, slopes = energies(positions)
            for number in sorted(going):
                chains[number].steps += 1
                try:
                    # A copy, because the next call may write its gradients into the same memory.
                    positions[number] = runs[number].send((float(values[number]), slopes[number].copy()))
                except StopIteration:
                    going.remove(number)
    return chains


def _run(chain: ChainResult, start: Array, plan: Plan, random: Numbers, tick: Callable[[], None]) -> Asks[None]:
    """Run one chain from its start to its last draw."""
    energy, slope = yield start.copy()
    if not math.isfinite(energy) or not np.isfinite(slope).all():
        raise ValueError(f"log p is {-energy} at the start of a chain")
    point = Point(start.copy(), np.zeros_like(start), energy, slope)
    walker = yield from _with_first_step(Walker(1.0, np.ones_like(start), random, plan.max_depth), point)
    tuner = _Tuner(plan, walker.step)
    for t in range(plan.warmup):
        moved = yield from walker.move(point)
        point = moved.point
        step, scale = tuner.learn(t, moved.acceptance, point.z)
        walker = replace(walker, step=step)
        if scale is not None:
            walker = yield from _with_first_step(replace(walker, scale=scale), point)
            tuner.restart(walker.step)
        tick()
    walker = replace(walker, step=tuner.settled)
    for _ in range(plan.samples):
        moved = yield from walker.move(point)
        point = moved.point
        chain.draws.append(point.z)
        chain.diverged += moved.diverged
        chain.deepest += moved.depth == plan.max_depth
        tick()
    chain.step, chain.scale = walker.step, walker.scale


def _with_first_step(walker: Walker, point: Point) -> Asks[Walker]:
    """Double or halve the step size until its acceptance crosses the target."""
    growing: bool | None = None
    step = walker.step
    while 1e-10 < step < 1e10:
        walker = replace(walker, step=step)
        start = walker.refreshed(point)
        end = yield from walker.leap(start, 1)
        short = start.total - end.total > _LIKELY
        growing = short if growing is None else growing
        if short != growing:
            break
        step = step * 2 if growing else step / 2
    return walker


class _Tuner:
    """Adapts the step size to acceptances, and the scales to positions, in Stan's windows."""

    def __init__(self, plan: Plan, step: float) -> None:
        self._target = plan.target_accept
        self._average = DualAveraging()
        self._seen = WelfordCovariance(diagonal=True)
        schedule = WarmupAdapter()
        schedule._warmup_steps = plan.warmup
        windows = schedule._build_adaptation_schedule()[1:-1] if plan.warmup >= 20 else []
        self._first = windows[0].start if windows else plan.warmup
        self._ends = {window.end for window in windows}
        self.restart(step)

    def restart(self, step: float) -> None:
        """Restart the adaptation of the step size from an initial value."""
        self._average.prox_center = math.log(10 * step)  # larger steps cost less, so they are tried first
        self._average.reset()
        self._log_step = self._log_settled = math.log(step)

    def learn(self, t: int, acceptance: float, z: Array) -> tuple[float, Array | None]:
        """Return the next step size, and new scales at the end of a window."""
        self._average.step(self._target - acceptance)
        self._log_step, self._log_settled = self._average.get_state()
        if self._first <= t <= max(self._ends, default=-1):
            self._seen.update(torch.from_numpy(z))
        if t not in self._ends:
            return math.exp(self._log_step), None
        variance = self._seen.get_covariance(regularize=True)
        self._seen.reset()
        return math.exp(self._log_step), variance.sqrt().numpy()

    @property
    def settled(self) -> float:
        """The final step size: an average, because the last one is noisy."""
        return math.exp(self._log_settled)
