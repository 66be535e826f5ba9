"""The exact posterior of linear models, against dense Gaussian algebra in data space, which it does not use."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, nn

import pyro_dropout as pd
from tests.oracles.both_types import digits, dtypes
from tests.oracles.predictions import F64, close_by_chance

TAU, LENGTH, BIAS_LENGTH = 3.0, 0.7, 1.4


def linear(inputs: int, outputs: int, bias: bool = True, dtype: torch.dtype = F64) -> pd.BayesianNet:
    prior = pd.Prior(length_scale=LENGTH, bias_length_scale=BIAS_LENGTH)
    return pd.BayesianNet(nn.Linear(inputs, outputs, bias=bias).to(dtype), prior, pd.Gaussian(tau=TAU))


def by_conditioning(x: Tensor, y: Tensor, bias: bool) -> tuple[Any, Any, float]:
    """Mean (D, d) and covariance (d, d) of each output's weights, and log p(y): w and y are jointly Gaussian."""
    design = x.to(F64).numpy()
    widths = np.full(design.shape[1], LENGTH**-2.0)
    if bias:
        design = np.hstack([design, np.ones((len(design), 1))])
        widths = np.append(widths, BIAS_LENGTH**-2.0)
    prior = np.diag(widths)
    of_y = design @ prior @ design.T + np.eye(len(design)) / TAU
    gain = prior @ design.T @ np.linalg.inv(of_y)
    targets = y.to(F64).numpy()
    evidence = sum(stats.multivariate_normal(cov=of_y).logpdf(column) for column in targets.T)
    return (gain @ targets).T, prior - gain @ design @ prior, float(evidence)


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 7), st.booleans(), dtypes)
def test_it_is_the_posterior(inputs: int, outputs: int, points: int, bias: bool, dtype: torch.dtype) -> None:
    x, y = torch.randn(points, inputs, dtype=dtype), torch.randn(points, outputs, dtype=dtype)
    posterior = pd.references.conjugate(linear(inputs, outputs, bias, dtype), x, y)
    slack = digits(dtype, 1e-10)
    mean, covariance, evidence = by_conditioning(x, y, bias)
    found = posterior.mean()
    np.testing.assert_allclose(found["weight"], mean[:, :inputs], atol=slack)
    if bias:
        np.testing.assert_allclose(found["bias"], mean[:, inputs], atol=slack)
    # Weights lie output by output; biases follow all of them.
    weights = posterior.covariance[: outputs * inputs, : outputs * inputs].numpy()
    np.testing.assert_allclose(weights, np.kron(np.eye(outputs), covariance[:inputs, :inputs]), atol=slack)
    if bias:
        across = posterior.covariance[: outputs * inputs, outputs * inputs :].numpy()
        np.testing.assert_allclose(across, np.kron(np.eye(outputs), covariance[:inputs, inputs:]), atol=slack)
    assert posterior.log_evidence == pytest.approx(evidence, abs=digits(dtype, 1e-9))


def test_hidden_layers_are_features() -> None:
    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1, bias=False)).double()
    prior = pd.Prior(LENGTH, width_scaled=False, hide=lambda name, module: name.startswith("0."))
    model = pd.BayesianNet(net, prior, pd.Gaussian(tau=TAU))
    x, y = torch.randn(9, 2, dtype=F64), torch.randn(9, 1, dtype=F64)
    posterior = pd.references.conjugate(model, x, y)
    features = torch.tanh(net[0](x)).detach()
    mean, covariance, evidence = by_conditioning(features, y, bias=False)
    np.testing.assert_allclose(posterior.mean()["2.weight"], mean, atol=1e-10)
    np.testing.assert_allclose(posterior.covariance, covariance, atol=1e-10)
    assert posterior.log_evidence == pytest.approx(evidence, abs=1e-9)
    assert list(posterior.mean()) == ["2.weight"]


def test_predictions_are_the_exact_ones(dtype: torch.dtype) -> None:
    model = linear(2, 2, dtype=dtype)
    x, y = torch.randn(6, 2, dtype=dtype), torch.randn(6, 2, dtype=dtype)
    count = 20_000
    answer = pd.predict(model, pd.references.conjugate(model, x, y), x, samples=count)
    mean, covariance, _ = by_conditioning(x, y, bias=True)
    design = torch.cat([x, torch.ones_like(x[:, :1])], 1).to(F64)
    exact = design @ torch.from_numpy(mean).mT
    variance = ((design @ torch.from_numpy(covariance)) * design).sum(-1, keepdim=True).expand(6, 2)
    close_by_chance(answer.mean, exact, (variance / count).sqrt())
    close_by_chance(answer.epistemic, variance, variance * (2 / count) ** 0.5)
    standard = pd.predict(model, pd.references.conjugate(model, x, y), x, method="standard")
    assert torch.allclose(standard.mean.to(F64), exact, atol=1e-5)


@pytest.mark.deep
def test_standardised_models_speak_in_the_units_of_the_data() -> None:
    x, y = 100 + 7 * torch.randn(8, 1, dtype=F64), 300 + 20 * torch.randn(8, 1, dtype=F64)
    inner = linear(1, 1)
    model = pd.Standardised(inner, x, y)
    standard_x, standard_y = (x - x.mean()) / x.std(), (y - y.mean()) / y.std()
    posterior = pd.references.conjugate(model, x, y)
    mean, _, evidence = by_conditioning(standard_x, standard_y, bias=True)
    np.testing.assert_allclose(posterior.mean()["weight"], mean[:, :1], atol=1e-10)
    # A density of raw targets is smaller by their scale.
    assert posterior.log_evidence == pytest.approx(evidence - 8 * float(y.std().log()), abs=1e-8)
    drawn = pd.nuts(model, x, y, chains=4, samples=1000, warmup=300, seed=0, compile=False, progress=False)
    assert abs(pd.predict(model, drawn, x, samples=6).mean - 300).max() < 100
