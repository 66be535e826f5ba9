"""Anchored members of a linear-Gaussian model are draws from its exact posterior."""

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, nn

import pyro_dropout as pd

QUIET: dict[str, Any] = {"compile": False, "progress": False, "lr": 0.1, "schedule": lambda done: 1.001 - done / 600}


def distance(draws: Tensor, mean: Tensor, covariance: Tensor) -> float:
    """Return the largest difference of the draws' moments from the exact ones, in standard errors."""
    count = len(draws)
    spread = covariance.diagonal()
    means = (draws.mean(0) - mean).abs() / (spread / count).sqrt()
    errors = ((spread[:, None] * spread[None, :] + covariance.square()) / count).sqrt()
    return max(means.max().item(), ((draws.T.cov() - covariance).abs() / errors).max().item())


def exact(x: Tensor, y: Tensor, tau: float, precision: Tensor) -> tuple[Tensor, Tensor]:
    covariance = (tau * x.T @ x + precision).inverse()
    return covariance @ (tau * x.T @ y), covariance


def line(tau: float, scale: float, points: int, inputs: int, members: int, seed: int) -> float:
    torch.manual_seed(seed)
    x = torch.randn(points, inputs, dtype=torch.float64)
    y = x.sum(1, keepdim=True) + torch.randn(points, 1, dtype=torch.float64)
    net = nn.Linear(inputs, 1, bias=False).double()
    model = pd.BayesianNet(net, pd.Prior(length_scale=scale), pd.Gaussian(tau))
    ensemble = pd.Ensemble(model, members=members, start="module")
    pd.fit(model, ensemble, x, y, steps=600, **QUIET)
    drawn = ensemble.draws_at(torch.arange(members))["weight"][:, 0]
    return distance(drawn, *exact(x, y[:, 0], tau, scale**2 * torch.eye(inputs, dtype=torch.float64)))


@pytest.mark.deep
@settings(max_examples=12)
@given(st.floats(0.1, 10.0), st.floats(0.5, 2.0), st.integers(1, 20), st.integers(1, 4), st.integers(0, 10**6))
def test_any_linear_model(tau: float, scale: float, points: int, inputs: int, seed: int) -> None:
    assert line(tau, scale, points, inputs, members=20_000, seed=seed) < 4


def linear(x: Tensor, y: Tensor | None = None) -> Tensor:
    """A Pyro model that is not a network: correlated priors, and a plate of Gaussian data."""
    root = torch.tensor([[1.0, 0.0], [0.6, 0.8]], dtype=x.dtype)
    w = pyro.sample("w", dist.MultivariateNormal(torch.ones(2, dtype=x.dtype), scale_tril=root))
    with pyro.plate("points", len(x)):
        return pyro.sample("y", dist.Normal(x @ w, 0.5), obs=y)


@pytest.mark.deep
def test_any_pyro_model_with_gaussian_priors() -> None:
    x = torch.randn(8, 2, dtype=torch.float64)
    y = x.sum(1) + 0.5 * torch.randn(8, dtype=torch.float64)
    ensemble = pd.Ensemble(linear, members=1000)
    pd.fit(linear, ensemble, x, y, steps=600, **QUIET)
    root = torch.tensor([[1.0, 0.0], [0.6, 0.8]], dtype=torch.float64)
    precision = (root @ root.T).inverse()
    covariance = (4 * x.T @ x + precision).inverse()
    mean = covariance @ (4 * x.T @ y + precision @ torch.ones(2, dtype=torch.float64))
    assert distance(ensemble.draws_at(torch.arange(1000))["w"], mean, covariance) < 4


def flips(x: Tensor, y: Tensor | None = None) -> None:
    """Several outputs in a plate outside the data's: the data points are still those of the data's plate."""
    w = pyro.sample("w", dist.Normal(torch.zeros(3, 1, dtype=x.dtype), 1000.0).to_event(2))
    with pyro.plate("outputs", 3, dim=-2), pyro.plate("points", len(x), dim=-1):
        pyro.sample("y", dist.Bernoulli(logits=w.expand(3, len(x))), obs=None if y is None else y.T)


@pytest.mark.deep
def test_the_weights_are_those_of_the_data_points_not_of_an_outer_plate() -> None:
    y = (torch.arange(20).unsqueeze(-1) < torch.tensor([6, 10, 14])).double()
    ensemble = pd.Ensemble(flips, members=2000, start="module")
    pd.fit(flips, ensemble, torch.ones(20, 1, dtype=torch.float64), y, steps=600, **QUIET)
    heads = ensemble.draws_at(torch.arange(2000))["w"][..., 0].sigmoid().numpy()
    for k, column in zip((6, 10, 14), heads.T, strict=True):
        assert stats.kstest(column, stats.beta(k, 20 - k).cdf).pvalue > 1e-3


def positive(y: Tensor) -> None:
    """A site whose prior is Gaussian in unconstrained space, with a Gaussian likelihood there."""
    z = pyro.sample("z", dist.LogNormal(torch.tensor(0.5, dtype=y.dtype), 2.0))
    with pyro.plate("points", len(y)):
        pyro.sample("y", dist.Normal(z.log(), 1.0), obs=y)


@pytest.mark.deep
def test_a_lognormal_prior_is_exact_in_unconstrained_space() -> None:
    y = torch.tensor([1.0, 2.0, 0.0], dtype=torch.float64)
    ensemble = pd.Ensemble(positive, members=1000)
    pd.fit(positive, ensemble, y, steps=600, **QUIET)
    log_z = ensemble.draws_at(torch.arange(1000))["z"].log().reshape(-1, 1)
    covariance = torch.tensor([[1 / (3 + 1 / 4)]], dtype=torch.float64)
    mean = covariance[0] * (3 + 0.5 / 4)
    # The median of the prior, which the anchors are centred at, is estimated.
    assert distance(log_z, mean, covariance) < 5
