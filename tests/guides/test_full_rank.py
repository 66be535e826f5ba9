"""Posteriors over a whole network that are one Gaussian: against scipy's, and against a conjugate posterior."""

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from scipy import stats
from torch import Tensor, nn
from torch.distributions import MultivariateNormal, kl_divergence

import pyro_dropout as pd
from pyro_dropout import ELBO, AutoFullRank, AutoLowRank, BayesianNet
from tests.contracts.models import mlp

F64 = torch.float64


def problem(per: Any = "net") -> tuple[BayesianNet, Any, Tensor, Tensor]:
    """A guide away from where it starts, with the mean and the covariance of all its numbers, by loops."""
    model = BayesianNet(mlp().to(F64))
    guide = AutoFullRank(model, per)
    blocks = [list(model.sites)] if per == "net" else [["0.weight", "0.bias"], ["2.weight", "2.bias"]]
    roots, means = [], []
    with torch.no_grad():
        for value in guide.parameters():
            value += 0.5 * torch.randn_like(value)
        for block in blocks:
            states: list[Any] = [guide.states[name.replace(".", "/")] for name in block]
            size = sum(state.loc.numel() for state in states)
            root, row = torch.zeros(size, size, dtype=F64), 0
            for state in states:
                for scale, lower in zip(state.log_scale.flatten().exp(), state.lower, strict=True):
                    root[row, row] = scale
                    root[row, :row] = scale * lower[:row]
                    row += 1
            roots.append(root)
            means += [state.loc.flatten() for state in states]
    whole = torch.block_diag(*roots)
    return model, guide, torch.cat(means).detach(), whole @ whole.T


def low_rank() -> tuple[BayesianNet, Any, Tensor, Tensor]:
    """The same of a guide with a low rank."""
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


PROBLEMS = {"net": problem, "layer": lambda: problem("layer"), "low rank": low_rank}


def flat(weights: dict[str, Tensor], model: BayesianNet) -> Tensor:
    return torch.cat([weights[name].flatten(-model.net.get_parameter(name).dim()) for name in model.sites], -1)


@pytest.mark.parametrize("kind", PROBLEMS)
def test_draws_have_the_joint_covariance(kind: str) -> None:
    """20,000 draws; no entry of the mean or of the covariance is off by more than 6 of its standard errors.

    Of 170 entries, one is with probability below 1e-6 on correct code.
    """
    model, guide, mean, covariance = PROBLEMS[kind]()
    draws = flat(guide.sample_weights(20_000), model) - mean
    assert (draws.mean(0).abs() < 6 * (covariance.diagonal() / len(draws)).sqrt()).all()
    products = torch.einsum("si,sj->sij", draws, draws)
    assert ((products.mean(0) - covariance).abs() < 6 * products.std(0) / len(draws) ** 0.5).all()


@pytest.mark.parametrize("kind", PROBLEMS)
def test_the_density_and_the_kl_are_the_joint_ones(kind: str) -> None:
    model, guide, mean, covariance = PROBLEMS[kind]()
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


def test_a_site_alone_has_its_block_of_the_covariance() -> None:
    model, guide, mean, covariance = problem()
    first = model.net.get_parameter("0.weight").numel() + model.net.get_parameter("0.bias").numel()
    rows = slice(first, first + model.net.get_parameter("2.weight").numel())
    q = guide.posterior("2.weight")
    assert torch.allclose(q.covariance_matrix, covariance[rows, rows])
    value = torch.randn(4, *q.event_shape, dtype=F64)
    expected = stats.multivariate_normal(mean[rows], covariance[rows, rows]).logpdf(value.reshape(4, -1))
    assert q.log_prob(value).tolist() == pytest.approx(expected.tolist(), rel=1e-10)
    prior = dist.Normal(*torch.tensor([0.2, 0.7], dtype=F64)).expand(q.event_shape).to_event(2)
    wide = MultivariateNormal(torch.full_like(mean[rows], 0.2), 0.49 * torch.eye(len(mean[rows]), dtype=F64))
    joint = kl_divergence(MultivariateNormal(mean[rows], covariance[rows, rows]), wide)
    assert pd.paper.kl(q, prior).item() == pytest.approx(joint.item(), rel=1e-10)
    high = stats.norm(mean[rows], covariance.diagonal()[rows].sqrt()).ppf(0.9)
    assert guide.quantiles([0.9])["2.weight"].flatten().tolist() == pytest.approx(high.tolist(), rel=1e-6)


def test_every_draw_of_a_conjugate_posterior_gives_the_evidence() -> None:
    """The exact posterior of a linear model is in the family, and there log p(y, w) - log q(w) = log p(y)."""
    x = torch.randn(30, 2, dtype=F64) @ torch.tensor([[1.0, 0.9], [0.0, 0.3]], dtype=F64)
    y = x @ torch.tensor([[1.0], [-2.0]], dtype=F64) + 0.2 * torch.randn(30, 1, dtype=F64)
    model = BayesianNet(nn.Linear(2, 1).to(F64), pd.Prior(), pd.Gaussian(tau=25.0))
    guide: Any = AutoFullRank(model)
    inputs = torch.cat([x, torch.ones_like(y)], 1)
    covariance = torch.linalg.inv(25 * inputs.T @ inputs + torch.eye(3, dtype=F64))
    mean, root = (25 * covariance @ inputs.T @ y).flatten(), torch.linalg.cholesky(covariance)
    for name, rows in (("weight", slice(0, 2)), ("bias", slice(2, 3))):
        state, scale = guide.states[name], root.diagonal()[rows]
        state.loc.data = mean[rows].reshape(state.loc.shape)
        state.log_scale.data = scale.log().reshape(state.loc.shape)
        state.lower.data = (root[rows, : rows.stop - 1] / scale.unsqueeze(-1)).clone()
    evidence = stats.multivariate_normal(cov=inputs @ inputs.T + torch.eye(30, dtype=F64) / 25).logpdf(y.flatten())
    loss = pyro.infer.Trace_ELBO()
    assert [-loss.loss(model, guide, x, y) for _ in range(3)] == pytest.approx([evidence] * 3, rel=1e-10)
