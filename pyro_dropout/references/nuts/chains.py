"""Several chains of the no-U-turn sampler side by side, each with its own step size and scales from warmup.

The schedule is Stan's: an initial phase, windows of doubling length after each of which the scales are set from the
draws of the window, and a final phase that refines only the step size. Step size and scales are adapted by Pyro's own
dual averaging and Welford covariance.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from pyro.infer.mcmc.adaptation import WarmupAdapter
from pyro.ops.dual_averaging import DualAveraging
from pyro.ops.welford import WelfordCovariance

from pyro_dropout.mathematics.errors import PyroDropoutError
from pyro_dropout.references.nuts.no_u_turn import Array, Asks, Point, Walker

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
    """

    draws: list[Array] = field(default_factory=list)
    diverged: int = 0
    deepest: int = 0
    step: float = math.nan
    scale: Array = field(default_factory=lambda: np.empty(0))


@dataclass(frozen=True)
class Plan:
    """Settings of each chain.

    Attributes:
        samples: number of draws kept.
        warmup: number of draws before them, in which the chain adapts its step size and scales.
        target_accept: the target acceptance rate of the step size.
        max_depth: maximum number of doublings of a trajectory.
    """

    samples: int
    warmup: int
    target_accept: float
    max_depth: int


def run_chains(
    energies: Energies, starts: Array, plan: Plan, seed: int, tick: Callable[[], None] = lambda: None
) -> list[ChainResult]:
    """Run one chain from each row of ``starts``, (chains, d), with one call of ``energies`` per step of all chains.

    ``tick`` is called after each draw of each chain.
    """
    chains = [ChainResult() for _ in starts]
    randoms = [np.random.default_rng([seed, number]) for number in range(len(starts))]
    runs = [_run(chain, z, plan, random, tick) for chain, z, random in zip(chains, starts, randoms, strict=True)]
    positions = np.stack([next(run) for run in runs])
    going = set(range(len(runs)))
    with np.errstate(over="ignore", invalid="ignore"):  # a divergent trajectory may end anywhere
        while going:
            values, slopes = energies(positions)
            for number in sorted(going):
                try:
                    # A copy, because the next call may write its gradients into the same memory.
                    positions[number] = runs[number].send((float(values[number]), slopes[number].copy()))
                except StopIteration:
                    going.remove(number)
    return chains


def _run(
    chain: ChainResult, start: Array, plan: Plan, random: np.random.Generator, tick: Callable[[], None]
) -> Asks[None]:
    """Run one chain from its start to its last draw."""
    energy, slope = yield start.copy()
    if not math.isfinite(energy) or not np.isfinite(slope).all():
        raise PyroDropoutError(
            f"log p(y, w) is {-energy} at the start of a chain, a draw from the prior; check that x and y are what the"
            " model expects, and that the prior is not far too wide."
        )
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
