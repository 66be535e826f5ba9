"""Leave-one-out against refitting: on a line the density of each point given all others is known exactly."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from scipy import stats

import pyro_dropout as pd
from pyro_dropout.judging.diagnostics import arviz_export
from tests.oracles.lines import Line

SAMPLES = 20_000
TOLD = pytest.mark.filterwarnings("ignore:k̂ is above 0.7")  # of guides that are meant to be bad


def _fitted(line: Line) -> Any:
    """log p(y_i | y), (12,)."""
    variance = np.einsum("nq,qr,nr->n", line.x64, line.covariance, line.x64) + 0.25
    return stats.norm.logpdf(line.y64, line.x64 @ line.mean, variance**0.5)


def test_a_sum_that_cannot_be_trusted_is_told() -> None:
    line = Line(torch.float64, orthogonal=True)
    with pytest.warns(UserWarning, match=r"k̂ is above 0\.7 at \d+ of 12 points.*cannot be trusted"):
        pd.loo(line.model, line.mean_field(widen=0.1), line.x, line.y, 500, seed=0)


def _mean_of(y: torch.Tensor, scale: float = 1.0, shown: torch.Tensor | None = None) -> None:
    mu = pyro.sample("mu", dist.Normal(torch.tensor(0.0, dtype=y.dtype), 2.0))
    with poutine.scale(scale=scale), poutine.mask(mask=True if shown is None else shown), pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(mu, 1.0), obs=y)


def _posterior_of_mean(precision: float, total: float) -> pd.AutoMeanField:
    """The exact posterior, with precision 1/4 + Σ c_i and mean Σ c_i y_i over it."""
    start = torch.tensor(total / precision, dtype=torch.float64)
    return pd.AutoMeanField(_mean_of, init=lambda name, shape: start, init_scale=precision**-0.5)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("approximate", [True, False])
def test_a_scaled_point_is_left_out_with_all_of_its_weight(approximate: bool) -> None:
    """Points that count twice: p(y_i | the others, each twice) is normal; the seed is set."""
    y = torch.tensor([-0.5, 0.1, 0.4, 1.2, 0.0, 0.9], dtype=torch.float64)
    guide = _posterior_of_mean(0.25 + 2 * len(y), 2 * float(y.sum()))
    found = pd.loo(_mean_of, guide, y, scale=2.0, samples=1500, approximate=approximate, seed=0)
    without = 0.25 + 2 * (len(y) - 1)
    mean = 2 * (y.sum() - y).numpy() / without
    exact = stats.norm.logpdf(y.numpy(), mean, (1 + 1 / without) ** 0.5)
    assert np.abs(found.pointwise.numpy() - exact).max() < 0.03
    whole = 0.25 + 2 * len(y)
    fitted = stats.norm.logpdf(y.numpy(), 2 * float(y.sum()) / whole, (1 + 1 / whole) ** 0.5)
    assert found.p_loo == pytest.approx((fitted - exact).sum(), abs=0.02)


def _masked_inside(y: torch.Tensor, shown: torch.Tensor) -> None:
    """Points of two numbers, in nested plates, masked by their distribution: of the last point, one number is."""
    mu = pyro.sample("mu", dist.Normal(torch.tensor(0.0, dtype=y.dtype), 2.0))
    with pyro.plate("few", 2, dim=-2), pyro.plate("data", 4, dim=-1):
        pyro.sample("y", dist.Normal(mu.expand(2), 1.0).mask(shown).to_event(1), obs=y)


def test_points_that_their_distribution_masks_are_no_terms() -> None:
    y = torch.linspace(-1, 2, 16).double().reshape(2, 4, 2)
    shown = torch.ones(2, 4, 2, dtype=torch.bool)
    shown[0, 1:3] = shown[1, 3, 0] = False
    start = y[shown].sum() / 11.25  # the exact posterior of eleven numbers
    guide = pd.AutoMeanField(_masked_inside, init=lambda name, shape: start, init_scale=11.25**-0.5)
    found = pd.loo(_masked_inside, guide, y, shown, samples=200, seed=0)
    assert len(found.pointwise) == 6
    assert bool((found.pointwise != 0).all())


def test_masked_points_are_no_terms() -> None:
    """The result is that of the data without them."""
    y, shown = torch.tensor([-0.5, 0.1, 0.4, 1.2]).double(), torch.tensor([True, False, True, True])
    guide = _posterior_of_mean(3.25, float(y[shown].sum()))
    guide(y)  # it draws numbers while it reads the model
    found = pd.loo(_mean_of, guide, y, shown=shown, samples=500, seed=0)
    torch.testing.assert_close(found.pointwise, pd.loo(_mean_of, guide, y[shown], samples=500, seed=0).pointwise)
    with pytest.raises(pd.errors.PyroDropoutError, match="all points of site 'y' are masked"):
        pd.loo(_mean_of, guide, y, shown=shown & False, samples=500, seed=0)


@TOLD
def test_the_correction_makes_a_wide_guide_exact(dtype: torch.dtype) -> None:
    """Uncorrected, the terms are far off; corrected, all 12 come within 0.05 nats of the exact ones.

    Over 200 seeds the largest error was 0.039: correct code fails with a probability below 1 %, and the seed is set.
    """
    line = Line(dtype, orthogonal=True)
    guide, exact = line.mean_field(widen=1.5), line.leave_one_out()
    found = pd.loo(line.model, guide, line.x, line.y, SAMPLES, seed=0)
    assert found.corrected
    assert np.abs(found.pointwise.numpy() - exact).max() < 0.05
    assert found.elpd == pytest.approx(exact.sum(), abs=0.15)
    assert found.se == pytest.approx((12 * exact.var()) ** 0.5, abs=0.1)
    assert found.khat.shape == (12,)
    raw = pd.loo(line.model, guide, line.x, line.y, SAMPLES, approximate=False, seed=0)
    assert not raw.corrected
    assert raw.elpd < exact.sum() - 0.5


def test_the_effective_number_of_parameters() -> None:
    """Σ log p(y_i | y) - elpd, both exact on a line."""
    line = Line(orthogonal=True)
    exact = (_fitted(line) - line.leave_one_out()).sum()
    found = pd.loo(line.model, line.mean_field(widen=1.2), line.x, line.y, SAMPLES, seed=0)
    assert found.p_loo == pytest.approx(exact, abs=0.15)


@TOLD
def test_the_effective_number_of_parameters_is_not_negative() -> None:
    """It cannot be, by the inequality of Cauchy and Schwarz, however bad the guide is."""
    line = Line()
    guide = line.mean_field(widen=10)
    assert min(pd.loo(line.model, guide, line.x, line.y, 50, seed=seed).p_loo for seed in range(20)) >= 0


@pytest.mark.filterwarnings("ignore")  # those of ArviZ are not ours
def test_without_the_correction_it_is_arvizs() -> None:
    line, az = Line(), arviz_export.arviz()
    guide = line.mean_field()
    data = pd.to_arviz(line.model, guide, line.x, line.y, 500, seed=3)
    theirs = az.loo(data, pointwise=True)
    mine = pd.loo(line.model, guide, line.x, line.y, 500, approximate=False, seed=3)
    assert mine.elpd == pytest.approx(float(theirs.iloc[0] if hasattr(theirs, "iloc") else theirs.elpd), abs=1e-6)
    np.testing.assert_allclose(mine.khat.numpy(), np.asarray(theirs.pareto_k), rtol=1e-6)
    assert mine.se == pytest.approx(float(theirs.se), rel=1e-6)
    assert mine.p_loo == pytest.approx(float(theirs.p_loo if hasattr(theirs, "p_loo") else theirs.p), abs=1e-6)


@TOLD
def test_draws_of_the_posterior_need_no_correction() -> None:
    line = Line()
    drawn = line.exact().sample_weights(SAMPLES)
    posterior = SimpleNamespace(weights={name: value.unflatten(0, (4, -1)) for name, value in drawn.items()})
    found = pd.loo(line.model, posterior, line.x, line.y, SAMPLES)
    assert not found.corrected
    # One point has k̂ near 0.7, where errors have long tails: the largest over 60 seeds was 0.17 nats.
    assert np.abs(found.pointwise.numpy() - line.leave_one_out()).max() < 0.25
