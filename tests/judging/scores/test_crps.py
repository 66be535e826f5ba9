"""The ranked probability score against its integral, against all pairs, and against chance."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import integrate, stats

import pyro_dropout as pd
from tests.oracles.made_predictions import made


def by_integral(loc: np.ndarray, scale: np.ndarray, y: float) -> float:
    """∫ (F(z) - 1[y ≤ z])² dz of a mixture, cut at y and wherever F bends."""
    ends = sorted({y, *(loc - 12 * scale), *(loc + 12 * scale), *loc})

    def square(z: float) -> float:
        return float((stats.norm.cdf(z, loc, scale).mean() - (y <= z)) ** 2)

    return math.fsum(
        integrate.quad(square, a, b, epsabs=1e-12, epsrel=1e-10, limit=200)[0] for a, b in itertools.pairwise(ends)
    )


@pytest.mark.parametrize("draws", [3, 60])
@pytest.mark.parametrize("tau", [0.5, 900.0])
@pytest.mark.thinned(2)
def test_the_mixture_s_score_is_the_integral(dtype: torch.dtype, draws: int, tau: float) -> None:
    """Few draws go by pairs and many by the grid, in wide noise at least; a score is exact by either."""
    f, y = torch.randn(draws, 3, 1, dtype=dtype), torch.tensor([[0.1], [-2.5], [8.0]], dtype=dtype)
    found = pd.crps(made(f, pd.Gaussian(tau)), y)
    assert found.dtype == dtype
    assert found.shape == (3, 1)
    for n in range(3):
        exact = by_integral(f[:, n, 0].double().numpy(), np.full(draws, tau**-0.5), y[n].item())
        assert found[n].item() == pytest.approx(exact, rel=1e-6 if dtype == torch.float32 else 1e-9)


def test_the_estimate_is_the_formula_of_its_draws(dtype: torch.dtype) -> None:
    f, y = torch.randn(8, 4, 2, dtype=dtype).exp() + 2, torch.full((4, 2), 3.0, dtype=dtype)
    answer, state = made(f.log(), pd.Poisson()), torch.get_rng_state()
    found = pd.crps(answer, y, "sample", seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(found, pd.crps(answer, y, "sample", seed=3))
    with torch.random.fork_rng([]):
        torch.manual_seed(3)
        drawn = torch.distributions.Poisson(answer.samples.exp()).sample().double()
    pairs = (drawn.unsqueeze(1) - drawn).abs().sum((0, 1)) / (8 * 7)
    exact = (drawn - y).abs().mean(0) - pairs / 2
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-6)
