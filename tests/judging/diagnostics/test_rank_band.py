"""The band of uniform ranks holds as often as it says, for other random numbers."""

import numpy as np
import pytest

from pyro_dropout.judging.diagnostics.sbc import band, cumulative_counts


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
