"""A low-rank Gaussian of the whole network, against scipy's."""

from typing import Any

import pytest
import torch
from pyro import poutine
from scipy import stats
from torch import Tensor
from torch.distributions import MultivariateNormal, kl_divergence

from pyro_dropout import ELBO, AutoLowRank, BayesianNet
from tests.contracts.models import mlp

F64 = torch.float64


def problem() -> tuple[BayesianNet, Any, Tensor, Tensor]:
    """A guide away from where it starts, with the mean and the covariance of all its numbers."""
    model = BayesianNet(mlp().to(F64))
    guide: Any = AutoLowRank(model, rank=2, per="net")
    with torch.no_grad():
        for name, value in guide.named_parameters():
            value += (1.0 if name.endswith("log_scale") else 0.3) * torch.randn_like(value)
        states: list[Any] = [guide.states[name.replace(".", "/")] for name in model.sites]
        mean = torch.cat([state.loc.flatten() for state in states])
        factor = torch.cat([state.factor * state.log_scale.exp().reshape(-1, 1) for state in states])
        covariance = factor @ factor.T + torch.cat([2 * s.log_scale.flatten() for s in states]).exp().diag()
    return model, guide, mean, covariance


def flat(weights: dict[str, Tensor], model: BayesianNet) -> Tensor:
    return torch.cat([weights[name].flatten(-model.net.get_parameter(name).dim()) for name in model.sites], -1)


def test_draws_have_the_joint_covariance() -> None:
    """20,000 draws; no entry of the mean or of the covariance is off by more than 6 of its standard errors.

    Of 170 entries, one is with probability below 1e-6 on correct code.
    """
    model, guide, mean, covariance = problem()
    draws = flat(guide.sample_weights(20_000), model) - mean
    assert (draws.mean(0).abs() < 6 * (covariance.diagonal() / len(draws)).sqrt()).all()
    products = torch.einsum("si,sj->sij", draws, draws)
    assert ((products.mean(0) - covariance).abs() < 6 * products.std(0) / len(draws) ** 0.5).all()


def test_the_density_and_the_kl_are_the_joint_ones() -> None:
    model, guide, mean, covariance = problem()
    x = torch.randn(3, 2, dtype=F64)
    trace = poutine.trace(guide).get_trace(x)
    value = flat({name: trace.nodes[name]["value"] for name in model.sites}, model)
    expected = stats.multivariate_normal(mean, covariance).logpdf(value.detach())
    assert trace.log_prob_sum().item() == pytest.approx(expected, rel=1e-10)
    spread = torch.cat([model.prior_of(name).stddev.flatten() for name in model.sites])
    prior = MultivariateNormal(torch.zeros_like(spread), spread.square().diag())
    divergence = kl_divergence(MultivariateNormal(mean, covariance), prior)
    found = ELBO().parts(model, guide, x, x[:, :1])["kl"]
    assert found.item() == pytest.approx(divergence.item(), rel=1e-10)
