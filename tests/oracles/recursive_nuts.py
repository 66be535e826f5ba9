"""The no-U-turn sampler by recursion, one chain at a time: what the package's sampler of all chains must agree with.

It shares no code with it but the order in which random numbers are used. Step size and scales are adapted by Pyro's own
dual averaging and Welford covariance.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from pyro.infer.mcmc.adaptation import WarmupAdapter
from pyro.ops.dual_averaging import DualAveraging
from pyro.ops.welford import WelfordCovariance

from pyro_dropout.references.nuts.adaptation import Plan

Array = NDArray[np.float64]  # one vector of all coordinates
Energies = Callable[[Array], tuple[Array, Array]]  # positions (chains, d) -> energies (chains,), gradients (chains, d)

_TOO_FAR = 1000.0  # a larger increase in energy counts as a divergence
_LIKELY = math.log(0.8)  # the initial step size is the largest with this acceptance; Stan's value


class Numbers:
    """The random numbers of a chain, in the order in which the package's sampler uses them."""

    def __init__(self, seed: int, chain: int) -> None:
        self._uniform = np.random.default_rng([seed, chain, 0])
        self.normal = np.random.default_rng([seed, chain, 1])
        self._rows: list[list[float]] = []

    def advance(self) -> None:
        """Draw the numbers of the next leaf."""
        self._rows = self._rows or (1 - self._uniform.random((64, 3)))[::-1].tolist()
        leaf, half, self.side = self._rows.pop()
        self.gumbel = -math.log(-math.log(leaf))  # noise of the leaf, by which one of a half is chosen
        self.exponential = -math.log(half)  # by which a half is taken


class Point(NamedTuple):
    """A point on a trajectory: position, momentum, energy U(z) and its gradient."""

    z: Array
    p: Array
    energy: float
    slope: Array

    @property
    def total(self) -> float:
        """Potential plus kinetic energy; NaN counts as infinite."""
        found = self.energy + 0.5 * float(self.p @ self.p)
        return found if math.isfinite(found) else math.inf


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


@dataclass
class Walker:
    """The transition kernel of a chain: its energy, step size, scales, random numbers and most doublings."""

    energy: Callable[[Array], tuple[float, Array]]
    scale: Array
    random: Numbers
    max_depth: int
    step: float = 1.0

    def leap(self, start: Point, direction: int) -> Point:
        """Take one leapfrog step, forward or backward in time."""
        step = direction * self.step
        half = start.p - 0.5 * step * self.scale * start.slope
        z = start.z + step * self.scale * half
        energy, slope = self.energy(z)
        self.random.advance()
        return Point(z, half - 0.5 * step * self.scale * slope, energy, slope)

    def refreshed(self, point: Point) -> Point:
        """Return the point with a new momentum."""
        return point._replace(p=self.random.normal.standard_normal(len(point.z)))

    def move(self, start: Point) -> tuple[_Tree, int]:
        """Take one transition, which leaves the posterior as it is; return its trajectory, and how often it doubled."""
        start = self.refreshed(start)
        tree = _Tree(start, start, start, math.nan, 0.0, start.p, 0.0, 0)
        depth = 0
        while depth < self.max_depth and not (tree.turning or tree.diverged):
            direction = 1 if self.random.side < 0.5 else -1
            new = self._grow(tree.right if direction == 1 else tree.left, direction, depth, start.total)
            # The new half is taken with the odds of its weight to the old one's (biased progressive sampling).
            tree = _joined(tree, new, direction, -self.random.exponential < new.log_weight - tree.log_weight)
            depth += 1
        return tree, depth

    def _grow(self, start: Point, direction: int, depth: int, energy: float) -> _Tree:
        """Build a tree of 2^depth leaves on one side, or the part of it before it turns."""
        if depth == 0:
            leaf = self.leap(start, direction)
            gain = energy - leaf.total
            key, accepted = gain + self.random.gumbel, math.exp(min(0.0, gain))
            return _Tree(leaf, leaf, leaf, key, gain, leaf.p, accepted, 1, diverged=not gain > -_TOO_FAR)
        first = self._grow(start, direction, depth - 1, energy)
        if first.turning or first.diverged:
            return first
        second = self._grow(first.right if direction == 1 else first.left, direction, depth - 1, energy)
        return _joined(first, second, direction, second.key > first.key)

    def find_step(self, point: Point) -> None:
        """Double or halve the step size until its acceptance crosses the target."""
        growing: bool | None = None
        step = self.step
        while 1e-10 < step < 1e10:
            self.step = step
            start = self.refreshed(point)
            short = start.total - self.leap(start, 1).total > _LIKELY
            growing = short if growing is None else growing
            if short != growing:
                break
            step = step * 2 if growing else step / 2


def _joined(old: _Tree, new: _Tree, direction: int, taken: bool) -> _Tree:
    """Return both trees as one, and the point of the new one if it is taken."""
    takes = taken and not (new.turning or new.diverged)  # else its choice would not be reversible
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
    log_weight = float(np.logaddexp(old.log_weight, new.log_weight))
    counts = old.acceptance + new.acceptance, old.leaves + new.leaves
    chosen, key = (new if takes else old).chosen, max(old.key, new.key)
    return _Tree(first.left, second.right, chosen, key, log_weight, sum_p, *counts, turning, new.diverged)


def _turns(left: Array, right: Array, sum_p: Array) -> bool:
    return bool(left @ sum_p <= 0 or right @ sum_p <= 0)


@dataclass
class ChainResult:
    """The result of one chain: draws after warmup, how many trajectories diverged or were deepest, step and scales."""

    draws: list[Array] = field(default_factory=list)
    diverged: int = 0
    deepest: int = 0
    step: float = math.nan
    scale: Array = field(default_factory=lambda: np.empty(0))


def run_chains(energies: Energies, starts: Array, plan: Plan, seed: int) -> list[ChainResult]:
    """Run one chain from each row of ``starts``, (chains, d)."""

    def energy(z: Array) -> tuple[float, Array]:
        values, slopes = energies(z[None])
        return float(values[0]), slopes[0]

    with np.errstate(over="ignore", invalid="ignore"):  # a divergent trajectory may end anywhere
        return [_run(energy, start, plan, Numbers(seed, number)) for number, start in enumerate(starts)]


def _run(energy: Callable[[Array], tuple[float, Array]], start: Array, plan: Plan, random: Numbers) -> ChainResult:
    """Run one chain from its start to its last draw."""
    chain, walker = ChainResult(), Walker(energy, np.ones_like(start), random, plan.max_depth)
    point = Point(start, np.zeros_like(start), *energy(start))
    walker.find_step(point)
    tuner = _Tuner(plan, walker.step)
    for t in range(plan.warmup):
        tree, _ = walker.move(point)
        point = tree.chosen
        walker.step, scale = tuner.learn(t, tree.acceptance / tree.leaves, point.z)
        if scale is not None:
            walker.scale = scale
            walker.find_step(point)
            tuner.restart(walker.step)
    walker.step = tuner.settled
    for _ in range(plan.samples):
        tree, depth = walker.move(point)
        point = tree.chosen
        chain.draws.append(point.z)
        chain.diverged += tree.diverged
        chain.deepest += depth == plan.max_depth
    chain.step, chain.scale = walker.step, walker.scale
    return chain


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
        self.settled = step

    def learn(self, t: int, acceptance: float, z: Array) -> tuple[float, Array | None]:
        """Return the next step size, and new scales at the end of a window."""
        self._average.step(self._target - acceptance)
        step, self.settled = (math.exp(each) for each in self._average.get_state())  # settled: an average, less noisy
        if self._first <= t <= max(self._ends, default=-1):
            self._seen.update(torch.from_numpy(z))
        if t not in self._ends:
            return step, None
        variance = self._seen.get_covariance(regularize=True)
        self._seen.reset()
        return step, variance.sqrt().numpy()
