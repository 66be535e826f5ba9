"""The band of uniform ranks: its binomials are scipy's, and it holds as often as it says, for other random numbers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from pyro_dropout.judging.diagnostics.sbc import band, cumulative_counts, uniformity_pvalue


@pytest.mark.parametrize(("replications", "draws"), [(100, 99), (50, 9), (1000, 19)])
def test_the_band_holds_as_often_as_it_says(replications: int, draws: int) -> None:
    """4,000 other sets of uniform ranks. The share outside is discrete and at most 1 - prob but for chance.

    It is asked to lie below 1 - prob plus five standard errors of both simulations: fails with probability 1e-6.
    """
    rng = np.random.default_rng(5)
    ranks = rng.integers(0, draws + 1, size=(4000, replications))
    counts = np.stack([cumulative_counts(row, draws) for row in ranks])
    for prob in (0.9, 0.99):
        low, high = band(replications, draws, prob)
        outside = 1 - ((counts >= low) & (counts <= high)).all(-1).mean()
        error = ((1 - prob) * prob * (1 / 4000 + 1 / 20_000)) ** 0.5
        assert outside < 1 - prob + 5 * error
        assert outside > (1 - prob) / 2 - 5 * error


def test_pvalues_of_uniform_ranks_are_uniform_and_others_are_small() -> None:
    """Kolmogorov's distance of 1,000 p-values; the test is conservative in the discrete case: fails below 1e-5."""
    rng = np.random.default_rng(6)
    found = [uniformity_pvalue(rng.integers(0, 100, size=200), 99) for _ in range(1000)]
    assert stats.kstest(found, "uniform").statistic < 0.075
    narrow = np.clip(np.round(99 * stats.beta(0.5, 0.5).rvs(200, random_state=1)), 0, 99).astype(int)
    assert uniformity_pvalue(narrow, 99) < 0.001


@given(st.sampled_from([(2, 2), (9, 50), (60, 9), (100, 19)]), st.data())
def test_inside_the_band_is_a_large_pvalue(sizes: tuple[int, int], data: st.DataObject) -> None:
    replications, draws = sizes  # the null distribution of each is simulated once
    ranks = np.array(data.draw(st.lists(st.integers(0, draws), min_size=replications, max_size=replications)))
    low, high = band(replications, draws, 0.9)
    counts = cumulative_counts(ranks, draws)
    inside = bool(((counts >= low) & (counts <= high)).all())
    assert inside == (uniformity_pvalue(ranks, draws) > 0.1)
