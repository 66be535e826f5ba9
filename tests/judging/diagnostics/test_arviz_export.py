"""The door to ArviZ: the whole tour on the version that is installed, and its Pareto smoothing called rightly."""

import numpy as np
import pytest
from scipy import stats

from pyro_dropout.judging.diagnostics import arviz_export
from tests.oracles import arviz_tour

pytestmark = pytest.mark.filterwarnings("ignore")  # those of ArviZ and of what it draws with are not ours


def test_results_of_leaving_one_out_are_compared_by_arviz() -> None:
    table = arviz_tour.compared(arviz_export)
    assert set(table.index) == {"good", "theirs", "worse"}


def test_chains_whose_draws_are_worth_little_have_longer_tails() -> None:
    """az.loo's own number, from its own data; a chain by itself counts as independent draws."""
    az = arviz_export.arviz()
    rng = np.random.default_rng(0)
    draws = {"w": rng.normal(size=(3, 40, 2)).repeat(5, 1), "b": rng.normal(size=(3, 200))}
    worth = arviz_export.efficiency_of(draws)
    theirs = az.ess(dict(draws), method="mean")
    assert worth == pytest.approx(np.hstack([theirs[name].values.ravel() for name in draws]).mean() / 600)
    assert arviz_export.efficiency_of({"w": draws["w"][:1]}) == 1.0
    assert arviz_export.efficiency_of({"w": np.ones((2, 50))}) == 1.0  # of a constant nothing is known


def test_smoothing_is_that_of_arviz() -> None:
    """Ratios of N(0, 1) draws for N(0, 1.5²): known k = 1 - 1/1.5² = 0.556; ArviZ's own call is the oracle."""
    az = arviz_export.arviz()
    w = np.random.default_rng(0).normal(size=(3, 2000))
    ratios = stats.norm.logpdf(w, 0, 1.5) - stats.norm.logpdf(w)
    weights, khat = arviz_export.pareto_smooth(ratios)
    if arviz_export.holds_trees(az):
        from arviz_stats.base import array_stats

        theirs = array_stats.psislw(-ratios)
    else:
        theirs = az.psislw(ratios.copy())
    np.testing.assert_allclose(weights, theirs[0])
    np.testing.assert_allclose(khat, theirs[1])
    np.testing.assert_allclose(np.exp(weights).sum(-1), 1)
    assert ((khat > 0.3) & (khat < 0.8)).all()
    np.testing.assert_allclose(arviz_export.pareto_smooth(ratios + 5000)[1], khat, rtol=1e-6)
