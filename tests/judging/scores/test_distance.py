"""Distances between predictions, against Gaussians in closed form and scipy's Wasserstein distance."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

import pyro_dropout as pd
from pyro_dropout.judging.scores.distance import between_mixtures
from tests.oracles.predictions import F64


def prediction_of(f: Tensor, likelihood: Any = None) -> pd.prediction.Prediction:
    """A prediction whose outputs at one point are the given (T, D), as biases of a network without weights."""
    net = nn.Linear(1, f.shape[-1]).to(f.dtype)
    prior = pd.Prior(hide=lambda name, module: name == "weight")
    model = pd.BayesianNet(net, prior, likelihood or pd.Gaussian(tau=4.0))
    posterior = pd.prediction.SampledPosterior({"bias": f.unsqueeze(0)})
    return pd.predict(model, posterior, torch.zeros(1, 1, dtype=f.dtype), samples=len(f), seed=0)


def quantiles(mean: float, std: float, count: int = 4000, dtype: torch.dtype = F64) -> Tensor:
    """A sample of a normal without noise: its quantiles, (T, 1)."""
    levels = (np.arange(count) + 0.5) / count
    return torch.from_numpy(stats.norm.ppf(levels, mean, std)).to(dtype).unsqueeze(-1)


def test_mixtures_are_compared_by_the_area_between_their_functions() -> None:
    a, b = (torch.randn(5, 3, dtype=F64) for _ in range(2))
    s, t = (torch.rand(5, 3, dtype=F64) + 0.3 for _ in range(2))
    grid = np.linspace(-15, 15, 200_001)
    for k in range(3):
        F = np.mean([stats.norm.cdf(grid, m, w) for m, w in zip(a[:, k], s[:, k], strict=True)], 0)
        G = np.mean([stats.norm.cdf(grid, m, w) for m, w in zip(b[:, k], t[:, k], strict=True)], 0)
        exact = np.trapezoid(np.abs(F - G), grid)
        assert float(between_mixtures((a, s), (b, t))[k]) == pytest.approx(exact, rel=2e-3)


@pytest.mark.parametrize("shift", [0.0, 0.3])
@pytest.mark.parametrize("ratio", [1.0, 1.5])
def test_two_gaussians(dtype: torch.dtype, shift: float, ratio: float) -> None:
    reference = prediction_of(quantiles(0.0, 1.0, dtype=dtype))
    prediction = prediction_of(quantiles(shift, ratio, 3000, dtype))
    m = shift
    # With noise of variance 1/4 both are normal. E|X| of N(m, s²): their quantile functions differ by m + s z.
    std, std0 = math.hypot(ratio, 0.5), math.hypot(1.0, 0.5)
    s = std - std0
    folded = (
        abs(m)
        if s == 0
        else s * math.sqrt(2 / math.pi) * math.exp(-(m**2) / (2 * s**2)) + m * math.erf(m / (s * math.sqrt(2)))
    )
    of_y = pd.judging.predictive_distance(prediction, reference)
    assert of_y.mean == pytest.approx(shift / std0, abs=2e-3)
    assert of_y.std == pytest.approx(math.log(std / std0), abs=2e-3)
    assert of_y.wasserstein == pytest.approx(folded, abs=2e-3)


def test_classes_are_compared_by_their_probabilities() -> None:
    one, other = (prediction_of(torch.randn(30, 3), pd.Categorical()) for _ in range(2))
    found = pd.judging.predictive_distance(one, other)
    assert found.wasserstein == pytest.approx(float((one.probs - other.probs).abs().mean()), abs=1e-6)
