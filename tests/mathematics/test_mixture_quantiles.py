"""Quantiles of mixtures of normals, against scipy's root finder and the definition."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, stats

import pyro_dropout as pd
from pyro_dropout.mathematics.mixtures import mixture_quantile

F64 = torch.float64
levels = st.floats(1e-3, 1 - 1e-3)


@settings(max_examples=60)
@given(seed=st.integers(0, 2**31), apart=st.floats(0, 60), uneven=st.floats(0, 3), level=levels, weighted=st.booleans())
def test_newton_finds_what_a_root_finder_finds(
    seed: int, apart: float, uneven: float, level: float, weighted: bool
) -> None:
    """Also where modes lie far apart, with nothing between them for Newton to go by."""
    generator = torch.Generator().manual_seed(seed)
    loc, width, odds = torch.randn(3, 6, 4, dtype=F64, generator=generator)
    loc[:3] += apart
    scale = torch.exp(uneven * width)
    probs = odds.softmax(0) if weighted else torch.full_like(odds, 1 / 6)
    found = mixture_quantile(loc, scale, level, probs if weighted else None)
    for k in range(4):
        m, s, p = (each[:, k].numpy() for each in (loc, scale, probs))

        def excess(z: float, m=m, s=s, p=p) -> float:
            return (p * stats.norm.cdf(z, m, s)).sum() - level

        exact = optimize.brentq(excess, (m - 10 * s).min(), (m + 10 * s).max(), xtol=1e-13)
        near = abs(found[k].item() - exact) <= 2e-6 * s.min() + 1e-9 * abs(exact)
        assert near or abs(excess(found[k].item())) <= 1e-12


@pytest.mark.parametrize(("level", "expected"), [(0.05, -2.0), (0.2, -2.0), (0.3, 0.0), (0.5, 0.0), (0.6, 1.0)])
def test_point_masses_have_the_smallest_quantile_that_is_large_enough(level: float, expected: float) -> None:
    """At 0.5 the distribution function is flat from 0 to 1, and the quantile is its left end."""
    loc, probs = torch.tensor([[-2.0], [0.0], [1.0]], dtype=F64), torch.tensor([[0.25], [0.25], [0.5]], dtype=F64)
    assert mixture_quantile(loc, torch.zeros_like(loc), level, probs).item() == pytest.approx(expected, abs=1e-14)


def test_quantiles_of_single_weights_of_a_mixture(dtype: torch.dtype) -> None:
    """Half of each weight is N(±1, σ² + v²), with v from the low-rank factor; the other half is at the other sign."""
    locs = torch.stack([torch.ones(2, 3, dtype=dtype), -torch.ones(2, 3, dtype=dtype)])
    factor = torch.full((1, 3, 2, 1), 0.4, dtype=dtype)
    q = pd.paper.RowMixture(locs, 0.3, torch.tensor([0.5, 0.5], dtype=dtype), cov_factor=factor)
    found = q.icdf(torch.tensor(0.9))
    assert found.shape == (2, 3)
    assert found.dtype == dtype
    # Of the upper half, four fifths lie below; the lower half has 3e-5 of its mass there.
    below = 0.5 * (stats.norm.cdf(found.double(), 1.0, 0.5) + stats.norm.cdf(found.double(), -1.0, 0.5))
    assert below == pytest.approx(0.9, abs=1e-6)


@pytest.mark.thinned(2)
def test_the_median_of_dropout_is_a_value_that_it_takes(dtype: torch.dtype) -> None:
    loc = torch.tensor([[2.0, -3.0]], dtype=dtype)
    kept = pd.paper.BernoulliMixture(loc, keep=0.75).icdf(torch.tensor(0.5))
    torch.testing.assert_close(kept, loc, rtol=1e-6, atol=0)
    dropped = pd.paper.BernoulliMixture(loc, keep=0.25).icdf(torch.tensor(0.5))
    torch.testing.assert_close(dropped, torch.zeros_like(loc), rtol=0, atol=1e-14)
