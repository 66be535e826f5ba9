"""Leave-one-out against refitting: on a line the density of each point given all others is known exactly."""

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from scipy import stats

import pyro_dropout as pd
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


@pytest.mark.deep
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
