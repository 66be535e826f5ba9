"""What chains adapt as they warm up: the step size to acceptances, and the scales to positions, all chains at once.

The schedule is Stan's: an initial phase, windows of doubling length after each of which the scales are set from the
draws of the window, and a final phase that refines only the step size. After each change of scales, the step size is
searched anew: doubled or halved until its acceptance crosses 0.8. Chains are rows, and each is at its own draw.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from pyro.infer.mcmc.adaptation import WarmupAdapter

from pyro_dropout.references.nuts.no_u_turn import SIDE, Array, Tree, integers, kit, refreshed, row_of

_LIKELY = math.log(0.8)  # a step size that is searched is the largest with this acceptance; Stan's value
_SMALLEST, _LARGEST = 1e-10, 1e10  # step sizes
_DELAY, _DECAY, _PULL = 10.0, 0.75, 0.05  # t0, kappa and gamma of Hoffman and Gelman (2014)


@dataclass(frozen=True)
class Plan:
    """Settings of each chain."""

    samples: int  # draws kept
    warmup: int  # draws before them, in which the chain adapts its step size and scales
    target_accept: float  # the target acceptance rate of the step size
    max_depth: int  # maximum number of doublings of a trajectory

    @property
    def windows(self) -> tuple[int, list[int]]:
        """The first draw from which scales are learned, and the draws after which they are set."""
        if self.warmup < 20:
            return self.warmup, []
        schedule = WarmupAdapter()
        schedule._warmup_steps = self.warmup
        windows = schedule._build_adaptation_schedule()[1:-1]
        return (windows[0].start, [window.end for window in windows]) if windows else (self.warmup, [])


class Tuning(NamedTuple):
    """What chains have adapted and counted, (C, 1) each, and (C, d) where said."""

    scale: Array  # of each coordinate, (C, d)
    mean: Array  # of the positions in the window so far, (C, d)
    square: Array  # their summed squared deviations, (C, d)
    seen: Array  # number of positions in the window
    step: Array  # the leapfrog step size
    searching: Array  # 1 while the step size is searched, and 0 otherwise
    growing: Array  # 1 or -1 if the search doubles or halves the step size; 0 at its start
    centre: Array  # of dual averaging
    error: Array  # its mean error
    average: Array  # its mean log step size
    count: Array  # its number of errors
    draw: Array  # number of draws, those of warmup included
    moves: Array  # number of momenta drawn
    diverged: Array  # number of divergent trajectories after warmup
    deepest: Array  # number of trajectories after warmup that reached the maximum depth


def untuned(z: Array) -> Tuning:
    """Return what chains at positions (C, d) start from: a search for the step size, at 1."""
    none = kit(z).zeros_like(z)
    zero = none[:, :1]
    moves = integers([0] * len(z), z)[:, None]
    return Tuning._make([none + 1, none, none, zero, zero + 1, zero + 1, *[zero] * 6, moves, zero, zero])


def begun(tree: Tree, tuning: Tuning, momenta: Array) -> tuple[Tree, Tuning]:
    """Return chains with their first momenta, from ``momenta`` (C, M, d)."""
    everyone = tuning.draw >= 0
    tree = refreshed(tree, everyone, momenta[:, 0], tuning.draw + 1, everyone)
    return tree, tuning._replace(moves=tuning.moves + 1)


def turned(tree: Tree, tuning: Tuning, plan: Plan, noise: Array, momenta: Array) -> tuple[Tree, Tuning]:
    """Return chains after the end of some trajectories: what these adapt, and their next momenta.

    ``noise``, (C, 3), is that of the leaf that ended them; unused ``momenta`` are in a ring, (C, M, d).
    """
    xp, searched = kit(momenta), tuning.searching > 0
    moved = (tree.ended > 0) & ~searched & (tuning.draw < plan.warmup + plan.samples)
    tuning = _learned(_counted(tuning, tree, moved, plan), tree, moved & (tuning.draw < plan.warmup), plan)
    tuning = _searched(tuning, tree.gain, searched)
    tuning = tuning._replace(draw=tuning.draw + moved)
    settles = (tuning.searching == 0) & (tuning.draw >= plan.warmup)  # an average, because the last one is noisy
    tuning = tuning._replace(step=xp.where(settles, xp.exp(tuning.average), tuning.step))
    again = searched | moved
    momentum = row_of(momenta, tuning.moves % momenta.shape[1])
    searching = tuning.searching > 0
    sign = xp.where(searching | (noise[:, SIDE, None] < 0.5), 1.0, -1.0)
    tree = refreshed(tree, again, momentum, sign, searching)
    return tree, tuning._replace(moves=tuning.moves + again)


def _counted(tuning: Tuning, tree: Tree, moved: Array, plan: Plan) -> Tuning:
    kept = moved & (tuning.draw >= plan.warmup)
    return tuning._replace(
        diverged=tuning.diverged + (kept & (tree.diverged > 0)),
        deepest=tuning.deepest + (kept & (tree.depth >= plan.max_depth)),
    )


def _learned(tuning: Tuning, tree: Tree, which: Array, plan: Plan) -> Tuning:
    """Return the tuning with one more acceptance and position of some chains."""
    xp = kit(which)

    def new(value: Array, old: Array) -> Array:
        return xp.where(which, value, old)

    # Dual averaging (Nesterov 2009; Hoffman and Gelman 2014): log ε_t = μ - √t/γ · mean error, and its weighted mean.
    count = tuning.count + 1
    share = 1 / (count + _DELAY)
    error = (1 - share) * tuning.error + share * (plan.target_accept - tree.acceptance / (tree.points - 1))
    log_step = tuning.centre - xp.sqrt(count) / _PULL * error
    weight = count**-_DECAY
    average = (1 - weight) * tuning.average + weight * log_step
    tuning = tuning._replace(
        count=new(count, tuning.count),
        error=new(error, tuning.error),
        average=new(average, tuning.average),
        step=new(xp.exp(log_step), tuning.step),
    )
    first, ends = plan.windows
    if not ends:
        return tuning
    # Welford's mean and squared deviations, with Stan's shrinkage towards a small unit.
    inside = which & (tuning.draw >= first) & (tuning.draw <= max(ends))
    seen = tuning.seen + 1
    ahead = tree.chosen_z - tuning.mean
    mean = tuning.mean + ahead / seen
    square = tuning.square + ahead * (tree.chosen_z - mean)
    variance = seen / (seen + 5) * (square / xp.where(seen > 2, seen - 1, 1.0)) + 1e-3 * (5 / (seen + 5))
    at_end = which & ~which
    for end in ends:
        at_end = at_end | (tuning.draw == end)
    at_end = at_end & which
    in_range = (tuning.step > _SMALLEST) & (tuning.step < _LARGEST)
    tuning = tuning._replace(
        scale=xp.where(at_end, xp.sqrt(variance), tuning.scale),
        mean=xp.where(at_end, 0.0, xp.where(inside, mean, tuning.mean)),
        square=xp.where(at_end, 0.0, xp.where(inside, square, tuning.square)),
        seen=xp.where(at_end, 0.0, xp.where(inside, seen, tuning.seen)),
        searching=xp.where(at_end & in_range, 1.0, tuning.searching),
        growing=xp.where(at_end, 0.0, tuning.growing),
    )
    return _restarted(tuning, at_end & ~in_range)


def _searched(tuning: Tuning, gain: Array, which: Array) -> Tuning:
    """Return the tuning after one step of some chains that search their step size."""
    xp = kit(gain)
    short = xp.where(gain > _LIKELY, 1.0, -1.0)
    growing = xp.where(tuning.growing == 0, short, tuning.growing)
    step = tuning.step * xp.where(growing > 0, 2.0, 0.5)
    on = (short == growing) & (step > _SMALLEST) & (step < _LARGEST)
    tuning = tuning._replace(
        step=xp.where(which & on, step, tuning.step),
        searching=xp.where(which & ~on, 0.0, tuning.searching),
        growing=xp.where(which, growing, tuning.growing),
    )
    return _restarted(tuning, which & ~on)


def _restarted(tuning: Tuning, which: Array) -> Tuning:
    """Return the tuning with the adaptation of some step sizes begun anew from where they are."""
    xp = kit(which)
    log_step = xp.log(tuning.step)
    return tuning._replace(
        # Larger steps cost less, so they are tried first.
        centre=xp.where(which, math.log(10) + log_step, tuning.centre),
        error=xp.where(which, 0.0, tuning.error),
        average=xp.where(which, log_step, tuning.average),
        count=xp.where(which, 0.0, tuning.count),
    )
