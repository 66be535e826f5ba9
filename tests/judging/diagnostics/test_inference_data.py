"""What ArviZ is handed, and k̂ where it is known: guides that are the posterior, too narrow, or without a density."""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from scipy import stats

import pyro_dropout as pd
from pyro_dropout.judging.diagnostics import arviz_export
from tests.oracles.lines import ExactLine, Line
from tests.oracles.predictions import problem

quietly = pytest.mark.filterwarnings("ignore")  # those of ArviZ are not ours


# --- to_arviz ---------------------------------------------------------------------------------------------------------


@quietly
@pytest.mark.thinned(2)
def test_arviz_can_do_all_of_it_with_a_guide(tmp_path: Path, dtype: torch.dtype) -> None:
    line = Line(dtype)
    data = pd.to_arviz(line.model, line.mean_field(), line.x, line.y, samples=400, seed=0)
    az = arviz_export.arviz()
    plt.close("all")  # those of other tests
    summary = az.summary(data, kind="stats")
    assert list(summary.index) == ["weight[0, 0]", "weight[0, 1]", "weight[0, 2]"]
    assert np.isfinite(summary["mean"].astype(float)).all()
    elpd = az.loo(data, pointwise=True)
    assert len(np.asarray(elpd.pareto_k)) == 12
    az.plot_khat(elpd)
    (az.plot_ppc_dist if arviz_export.holds_trees(az) else az.plot_ppc)(data)
    az.plot_loo_pit(data, **({} if arviz_export.holds_trees(az) else {"y": "y"}))
    assert len(plt.get_fignums()) == 3
    plt.close("all")
    data.to_netcdf(str(tmp_path / "draws.nc"))
    back = az.from_netcdf(str(tmp_path / "draws.nc"))
    for group in ("posterior", "posterior_predictive", "log_likelihood", "sample_stats", "observed_data"):
        for name in data[group].data_vars:
            assert data[group][name].dims == back[group][name].dims
            assert np.array_equal(data[group][name].values, back[group][name].values), f"{group}/{name} changed"
    assert dict(back["sample_stats"].attrs)["inference_library"] == "pyro_dropout"
    back.close()
    assert data["posterior"]["weight"].dtype == (np.float32 if dtype == torch.float32 else np.float64)


def test_groups_hold_what_they_say() -> None:
    line = Line()
    data = pd.to_arviz(line.model, line.mean_field(), line.x, line.y, samples=50, seed=0)
    w = data["posterior"]["weight"].values
    assert data["posterior"]["weight"].dims == ("chain", "draw", "weight_dim_0", "weight_dim_1")
    assert data["observed_data"]["y"].dims == ("point",)
    assert data["posterior_predictive"]["y"].dims == ("chain", "draw", "point")
    f = np.einsum("csoq,nq->csn", w, line.x64)
    scores = stats.norm.logpdf(line.y64, f, 0.5)
    np.testing.assert_allclose(data["log_likelihood"]["y"].values, scores)
    prior = stats.norm.logpdf(w).sum((-2, -1))
    np.testing.assert_allclose(data["sample_stats"]["lp"].values, scores.sum(-1) + prior)
    q = stats.norm.logpdf(w[:, :, 0], line.mean, np.diag(line.covariance) ** 0.5).sum(-1)
    np.testing.assert_allclose(data["sample_stats"]["log_q"].values, q)
    noise = (data["posterior_predictive"]["y"].values - f) / 0.5
    assert stats.kstest(noise.ravel(), "norm").pvalue > 1e-6  # fails with probability 1e-6


def test_a_draw_without_density_says_so_and_holds_no_nan() -> None:
    model, guide, x = problem()
    data = pd.to_arviz(model, guide, x, torch.zeros(5, 1), samples=30)
    assert list(data["sample_stats"].data_vars) == ["lp"]
    note = data["sample_stats"].attrs["log_q"]
    assert note.startswith("left out: the guide has no density at site '0.weight'")
    for group in ("posterior", "posterior_predictive", "log_likelihood", "sample_stats"):
        assert all(np.isfinite(data[group][name].values).all() for name in data[group].data_vars)


# --- what is asked of ArviZ -------------------------------------------------------------------------------------------


@quietly
def test_results_of_leaving_one_out_are_compared_by_arviz() -> None:
    az, line, how = arviz_export.arviz(), Line(orthogonal=True), {"approximate": False, "seed": 0}
    guide, elsewhere = line.mean_field(), ExactLine(line.mean + 1, line.covariance, line.x)
    good, worse = (pd.loo(line.model, each, line.x, line.y, 800, **how) for each in (guide, elsewhere))
    theirs = az.loo(pd.to_arviz(line.model, guide, line.x, line.y, samples=800, seed=0), pointwise=True)
    az.plot_khat(good)
    plt.close("all")
    table = az.compare({"worse": worse, "good": good, "theirs": theirs})
    assert list(table.index)[-1] == "worse"
    assert abs(float(table["elpd_diff"].abs().max()) - (good.elpd - worse.elpd)) < 1e-2
    assert float(table.loc["worse", "weight"]) < 0.01


@quietly
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


@quietly
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


# --- khat -------------------------------------------------------------------------------------------------------------


def test_khat_is_arvizs_on_a_known_pair_of_gaussians() -> None:
    """p and q are two Gaussians whose densities are scipy's; only the draws are the guide's."""
    line = Line(orthogonal=True)
    guide = line.mean_field(widen=0.8)
    data = pd.to_arviz(line.model, guide, line.x, line.y, samples=2000, seed=1)
    w = data["posterior"]["weight"].values[0, :, 0]
    std = np.diag(line.covariance) ** 0.5
    ratios = (stats.norm.logpdf(w, line.mean, std) - stats.norm.logpdf(w, line.mean, 0.8 * std)).sum(-1)
    expected = float(arviz_export.pareto_smooth(ratios)[1])
    assert pd.khat(line.model, guide, line.x, line.y, 2000, seed=1) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("family", ["low_rank", "mean_field"])
def test_khat_is_small_where_the_guide_is_the_posterior(family: str, dtype: torch.dtype) -> None:
    """Ratios are then constant but for rounding: nothing here is left to chance."""
    line = Line(dtype, orthogonal=family == "mean_field")
    guide = line.low_rank() if family == "low_rank" else line.mean_field()
    found = pd.khat(line.model, guide, line.x, line.y)
    print(f"k̂ of {family} in {dtype}: {found:.2f}")
    assert found < 0.7
    data = pd.to_arviz(line.model, guide, line.x, line.y)
    ratios = (data["sample_stats"]["lp"] - data["sample_stats"]["log_q"]).values
    assert np.abs(ratios - line.evidence()).max() < (1e-3 if dtype == torch.float32 else 1e-8)
