"""Are ranks uniform? The distance of their distribution function from a straight line, and its null distribution.

With R ranks among S draws, the number of ranks below j is binomial at every j. The band of Säilynoja, Bürkner and
Vehtari (2021) takes from each binomial the middle 1 - γ, with γ such that ranks that are uniform leave the band at some
j with the requested probability. Here γ is found by simulating uniform ranks.
"""

import functools
import math

import numpy as np
from numpy.typing import NDArray

_SIMULATIONS = 20_000
_BLOCK = 2**22  # counts held in memory at once

Counts = NDArray[np.int64]


def cumulative_counts(ranks: Counts, draws: int) -> Counts:
    """Return how many ranks are at most j, for j = 0 ... draws - 1; all of them are at most ``draws``."""
    found: Counts = np.cumsum(np.bincount(ranks, minlength=draws + 1))[:-1]
    return found


@functools.lru_cache(maxsize=8)
def _levels(replications: int, draws: int) -> NDArray[np.float64]:
    """Return for every j and every count the two-sided tail probability, (draws, replications + 1)."""
    chance = (np.arange(1, draws + 1) / (draws + 1))[:, None]
    count = np.arange(replications + 1)
    factorial = np.array([math.lgamma(n + 1) for n in count])
    ways = factorial[-1] - factorial - factorial[::-1]
    pmf = np.exp(ways + count * np.log(chance) + (replications - count) * np.log1p(-chance))
    lower, upper = np.cumsum(pmf, -1), np.cumsum(pmf[:, ::-1], -1)[:, ::-1]
    levels: NDArray[np.float64] = 2 * np.minimum(lower, upper)
    return levels


def smallest_level(counts: Counts, replications: int, draws: int) -> NDArray[np.float64]:
    """Return the smallest tail probability over all j of cumulative counts, (n, draws): (n,)."""
    found: NDArray[np.float64] = _levels(replications, draws)[np.arange(draws), counts].min(-1)
    return found


@functools.lru_cache(maxsize=8)
def null_levels(replications: int, draws: int) -> NDArray[np.float64]:
    """Return the smallest tail probabilities of many sets of uniform ranks, sorted, from a fixed seed."""
    rng = np.random.default_rng(2021)
    uniform = np.full(draws + 1, 1 / (draws + 1))
    found = []
    most = max(1, _BLOCK // (draws + 1))
    for start in range(0, _SIMULATIONS, most):
        sets = rng.multinomial(replications, uniform, size=min(_SIMULATIONS - start, most))
        counts = np.cumsum(sets, axis=-1)[:, :-1]
        found.append(smallest_level(counts, replications, draws))
    return np.sort(np.concatenate(found))


def uniformity_pvalue(ranks: Counts, draws: int) -> float:
    """Return how often uniform ranks deviate from the line as far as these do."""
    null = null_levels(len(ranks), draws)
    level = smallest_level(cumulative_counts(ranks, draws)[None], len(ranks), draws)[0]
    # The observed ranks count as one more simulation under the null hypothesis, so the p-value is never zero.
    return float((np.searchsorted(null, level * (1 + 1e-9), side="right") + 1) / (len(null) + 1))


def band(replications: int, draws: int, prob: float) -> tuple[Counts, Counts]:
    """Return the smallest and largest cumulative counts, each (draws,), of the band that holds with ``prob``."""
    null = null_levels(replications, draws)
    gamma = null[min(int((1 - prob) * (len(null) + 1)), len(null) - 1)]
    inside = _levels(replications, draws) >= gamma * (1 - 1e-9)
    return inside.argmax(-1), replications - inside[:, ::-1].argmax(-1)
