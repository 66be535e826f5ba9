"""Percentiles of uncertainties against scipy's fits and the paper's worked example."""

from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

import pyro_dropout as pd
from tests.oracles.both_types import digits, dtypes

KINDS: tuple[Literal["lognormal", "gamma", "empirical"], ...] = ("lognormal", "gamma", "empirical")


@pytest.mark.parametrize("kind", KINDS)
def test_the_paper_s_example(kind: Any, dtype: torch.dtype) -> None:
    """A standard deviation of 5: in the top percentile among 0.2 to 2, in the lowest among 10 to 15."""
    five = torch.tensor([[5.0]], dtype=dtype)
    calm = pd.judging.UncertaintyPercentile(torch.linspace(0.2, 2.0, 500, dtype=dtype), kind).percentile(five)
    noisy = pd.judging.UncertaintyPercentile(torch.linspace(10.0, 15.0, 500, dtype=dtype), kind).percentile(five)
    assert calm.shape == (1, 1)
    assert calm.dtype == dtype
    assert calm.item() > 99
    assert noisy.item() < 1


@pytest.mark.parametrize(("shape", "scale"), [(0.4, 3.0), (2.0, 0.5), (300.0, 0.01), (1e6, 1e-6)])
def test_fits_are_those_of_scipy(shape: float, scale: float) -> None:
    seen = np.random.default_rng(3).gamma(shape, scale, 400)
    asked = np.concatenate([[0.0], np.quantile(seen, np.linspace(0.01, 0.99, 15)), [seen.max() * 1.01]])
    train, std = torch.tensor(seen), torch.tensor(asked)
    found = pd.judging.UncertaintyPercentile(train, "gamma").percentile(std)
    exact = 100 * stats.gamma(*stats.gamma.fit(seen, floc=0)).cdf(asked)
    np.testing.assert_allclose(found.numpy(), exact, atol=1e-3 if shape > 1e5 else 1e-6)
    found = pd.judging.UncertaintyPercentile(train).percentile(std)
    exact = 100 * stats.lognorm(*stats.lognorm.fit(seen, floc=0)).cdf(asked)
    np.testing.assert_allclose(found.numpy(), exact, atol=1e-6)
    found = pd.judging.UncertaintyPercentile(train, "empirical").percentile(std)
    exact = [stats.percentileofscore(seen, value, kind="weak") for value in asked]
    np.testing.assert_allclose(found.numpy(), exact, atol=1e-9)


@given(
    seen=st.lists(st.floats(1e-3, 1e3), min_size=2, max_size=30).filter(lambda s: max(s) > 1.01 * min(s)),
    asked=st.lists(st.floats(0, 1e4), min_size=2, max_size=10),
    factor=st.floats(1e-3, 1e3),
    dtype=dtypes,
)
@pytest.mark.parametrize("kind", KINDS)
def test_percentiles_rise_and_know_no_unit(
    kind: Any, seen: list[float], asked: list[float], factor: float, dtype: torch.dtype
) -> None:
    least = digits(dtype, 0.0, 1e-30)  # below it another unit may leave float32 few digits
    asked = sorted(value if value >= least else 0.0 for value in asked)
    train, std = torch.tensor(seen, dtype=dtype), torch.tensor(asked, dtype=dtype)
    found = pd.judging.UncertaintyPercentile(train, kind).percentile(std)
    assert ((found >= 0) & (found <= 100)).all()
    assert (found.diff() >= -digits(dtype, 1e-9, 1e-5)).all()  # in float32 one rounding of 100
    if kind != "empirical":  # whose steps rounding may cross
        again = pd.judging.UncertaintyPercentile(train * factor, kind).percentile(std * factor)
        # A rounding moves a fit by as much of its width in logarithms, and a percentile by 100 times that.
        slack = digits(dtype, 1e-6, 200 * torch.finfo(dtype).eps / train.double().log().std(correction=0).item())
        torch.testing.assert_close(again, found, rtol=slack, atol=slack)


def test_rescaled_uncertainties_may_leave_the_unit_interval(dtype: torch.dtype) -> None:
    std = torch.tensor([[1.0, 2.0], [3.0, 0.5]], dtype=dtype)
    found = pd.judging.rescale(std, torch.tensor([2.0, 1.0, 1.5], dtype=dtype))
    assert found.dtype == dtype
    assert torch.equal(found, torch.tensor([[0.0, 1.0], [2.0, -0.5]], dtype=dtype))
