"""Anchored members: draws of exact posteriors, and their anchors."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, nn

import pyro_dropout as pd
from pyro_dropout.generative.model_call import ModelCall
from pyro_dropout.training.ensemble.anchoring import perturbation

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


def line(
    tau: float, scale: float, points: int, inputs: int, members: int, seed: int, heat: float = 1.0, **how: Any
) -> float:
    """Return how far members are from the posterior of a linear model at a temperature, (τXᵀX/T + l²)⁻¹."""
    torch.manual_seed(seed)
    x = torch.randn(points, inputs, dtype=torch.float64)
    y = x.sum(1, keepdim=True) + torch.randn(points, 1, dtype=torch.float64)
    net = nn.Linear(inputs, 1, bias=False).double()
    model = pd.BayesianNet(net, pd.Prior(length_scale=scale), pd.Gaussian(tau))
    ensemble = pd.Ensemble(model, members=members, start="module")
    pd.fit(model, ensemble, x, y, steps=600, **QUIET | how)
    drawn = ensemble.draws_at(torch.arange(members))["weight"][:, 0]
    return distance(drawn, *exact(x, y[:, 0], tau / heat, scale**2 * torch.eye(inputs, dtype=torch.float64)))


@pytest.mark.deep
@settings(max_examples=12)
@given(st.floats(0.1, 10.0), st.floats(0.5, 2.0), st.integers(1, 20), st.integers(1, 4), st.integers(0, 10**6))
def test_any_linear_model(tau: float, scale: float, points: int, inputs: int, seed: int) -> None:
    assert line(tau, scale, points, inputs, members=20_000, seed=seed) < 4


@pytest.mark.parametrize("heat", [pytest.param(1.0, marks=pytest.mark.deep), 0.2])
def test_members_are_draws_of_the_posterior_at_a_temperature(heat: float) -> None:
    loss = pd.ELBO(per_example=False, temperature=heat)
    assert line(0.5, 1.0, 12, 2, members=600, seed=0, heat=heat, loss=loss, compile="traced") < 4


F64 = torch.float64
QUICK: dict[str, Any] = {"compile": False, "progress": False, "lr": 0.2, "schedule": lambda done: 1.001 - done / 300}


def constant(outputs: int, likelihood: Any, y: Tensor, members: int, seed: int) -> Tensor:
    """Return the weights of members whose network is one number for each output, with a prior that says nothing."""
    model = pd.BayesianNet(nn.Linear(1, outputs, bias=False).double(), pd.Prior(length_scale=1e-3), likelihood)
    ensemble = pd.Ensemble(model, members=members, start="module", seed=seed)
    pd.fit(model, ensemble, torch.ones(len(y), 1, dtype=F64), y, steps=300, **QUICK)
    return ensemble.draws_at(torch.arange(members))["weight"][..., 0]


@pytest.mark.deep
def test_bootstrapped_heads_have_the_posterior_of_their_share() -> None:
    """Sums of weights of the Bayesian bootstrap are beta-distributed."""
    y = (torch.arange(20).unsqueeze(-1) < torch.tensor([6, 10, 14])).to(F64)
    heads = constant(3, pd.Bernoulli(), y, members=2000, seed=0).sigmoid().numpy()
    for k, column in zip((6, 10, 14), heads.T, strict=True):
        assert stats.kstest(column, stats.beta(k, 20 - k).cdf).pvalue > 1e-3


def test_bootstrapped_counts_have_the_moments_of_weighted_means() -> None:
    """Weights of the Bayesian bootstrap are Dirichlet: the weighted mean has the variance s²/(n + 1)."""
    y = torch.tensor([0.0, 1, 1, 2, 2, 3, 3, 4, 5, 9], dtype=F64)
    rate = constant(1, pd.Poisson(), y.unsqueeze(-1), members=600, seed=0).exp()
    exact = (y.var(unbiased=False) / 11).sqrt().item()
    assert rate.std().item() == pytest.approx(exact, rel=0.13)  # four standard errors
    assert rate.mean().item() == pytest.approx(3.0, abs=4 * exact / 600**0.5)


@pytest.mark.deep
def test_members_differ_in_a_width_of_the_network_as_the_posterior_does() -> None:
    """The exact posterior of a precision is gamma: its logarithm has the standard deviation √ψ'(N/2)."""
    normal = torch.distributions.Normal(0.0, 1.0).icdf((torch.arange(80, dtype=F64) + 0.5) / 80)
    log_tau = constant(2, pd.HeteroscedasticGaussian(), 0.5 * normal.unsqueeze(-1), members=400, seed=0)[:, 1]
    # The spread of 400 members is known to 3.5 %; the bootstrap's differs from the posterior's by a few percent.
    assert log_tau.std().item() == pytest.approx(torch.polygamma(1, torch.tensor(40.0)).sqrt().item(), rel=0.15)
    assert log_tau.mean().item() == pytest.approx(math.log(4.0), abs=0.06)


def test_points_of_a_network_start_at_their_anchors() -> None:
    model = pd.BayesianNet(nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)), pd.Prior(0.5))
    ensemble = pd.Ensemble(model, members=5, start="anchor")
    x = torch.randn(6, 2)
    drawn = perturbation(ensemble.template, ensemble.seeds.tolist(), ModelCall(model, (x, x[:, :1], 6)), 6)["anchors"]
    for name, scale in pd.Prior(0.5).scales(model.net).items():
        assert torch.equal(ensemble.stacked()[f"states.{name.replace('.', '/')}.loc"], drawn[name])
        assert 0.6 < (drawn[name] / scale).square().mean().sqrt() < 1.5, "draws of the prior"
    apart = pd.Ensemble(model, members=5, seed=0).stacked()["states.0/weight.loc"]
    assert apart.abs().max() <= 2**-0.5  # torch's own initialisation, not a draw from N(0, 4)
