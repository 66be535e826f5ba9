"""Draws with their densities: log p and log q against scipy's, why there may be no q, and draws that are kept."""

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoDelta
from scipy import stats
from torch import Tensor, nn

import pyro_dropout as pd
from pyro_dropout.generative.model_call import ModelCall
from pyro_dropout.prediction.joint_draws import joint_draws
from pyro_dropout.prediction.weight_draws import draws_with_density
from tests.oracles.predictions import hidden_net, problem

DATA = (torch.zeros(4, 2), torch.zeros(4, 1))


@pytest.mark.parametrize(
    ("make", "site", "reason"),
    [
        (lambda m: pd.AutoDropout(m), "0.weight", r"scale\) is 0"),
        (lambda m: pd.AutoDropout(m, scale=0.1), "0.bias", "is a point"),
        (lambda m: pd.AutoDropout(m, keep=1.0, bias="gaussian"), "0.weight", "is a point"),
        (lambda m: pd.AutoConcreteDropout(m), "0.weight", r"scale\) is 0"),
        (lambda m: pd.AutoMultiplicative(m, alpha=0.1), "0.weight", r"scale\) is 0"),
        (lambda m: AutoDelta(m), "0.weight", "is a point"),
    ],
)
def test_why_there_is_no_density(make: Any, site: str, reason: str) -> None:
    model = pd.BayesianNet(hidden_net())
    weights, density, why = draws_with_density(ModelCall(model, DATA), make(model), 7)
    assert density is None
    assert site in why
    assert re.search(reason, why)
    assert set(weights) == set(model.sites)
    assert all(len(value) == 7 for value in weights.values())


def test_a_guide_that_picks_one_of_several_points_has_no_density() -> None:
    """Its draws change, as mapped ones do, but nothing says with which density."""

    def model(x: Tensor, y: Tensor) -> None:
        pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))

    def guide(x: Tensor, y: Tensor) -> None:
        pyro.sample("w", dist.Delta(torch.randn(2), event_dim=1))

    _, density, why = draws_with_density(ModelCall(model, DATA), guide, 10)
    assert density is None
    assert "'w'" in why


class Wrapped(nn.Module):
    """Can be evaluated at all draws at once, as a network; but its prior is another one at each draw."""

    def __init__(self) -> None:
        super().__init__()
        self.likelihood = pd.Gaussian(4.0)
        self.sites = {"width": None, "W": None}

    def evaluate(self, weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return x @ weights["W"].mT

    def forward(self, x: Tensor, y: Tensor | None = None, num_data: int | None = None) -> Any:
        width = pyro.sample("width", dist.LogNormal(0.0, 0.5))
        weight = pyro.sample("W", dist.Normal(0.0, width).expand([1, 2]).to_event(2))
        f: Tensor = x @ weight.mT
        self.likelihood(f, y, num_data)
        return f


def test_the_prior_of_each_draw_is_its_own() -> None:
    model, x, y = Wrapped(), torch.randn(5, 2), torch.randn(5, 1)
    guide = pd.AutoMeanField(model)
    guide(x, y)
    draws = joint_draws(ModelCall(model, (x, y)), guide, 20, 3)
    width, weight = (draws.weights[name].detach().double().numpy() for name in ("width", "W"))
    prior = stats.lognorm.logpdf(width, 0.5) + stats.norm.logpdf(weight, 0, width[..., None, None]).sum((-2, -1))
    np.testing.assert_allclose(draws.log_prior.detach().numpy(), prior, rtol=1e-5)
    f = np.einsum("nq,csoq->csn", x.double().numpy(), weight)
    expected = stats.norm.logpdf(y[:, 0].double().numpy(), f, 0.5)
    np.testing.assert_allclose(draws.log_likelihood["y"].detach().numpy(), expected, rtol=1e-5)


def test_a_sampler_keeps_its_chains_and_is_thinned_evenly() -> None:
    model, _, x = problem(out=3)
    kept = {name: torch.randn(3, 100, *value.shape) for name, value in model.net.named_parameters()}
    call, posterior = ModelCall(model, (x, torch.zeros(5, 3))), SimpleNamespace(weights=kept)
    draws = joint_draws(call, posterior, 34, None)
    assert torch.equal(draws.weights["0.weight"], kept["0.weight"][:, ::3])
    assert joint_draws(call, posterior, 500, None).log_joint.shape == (3, 100)
    assert draws.dims == {"y": ("point", "output")}
    assert draws.log_likelihood["y"].shape == (3, 34, 5)
    assert draws.log_q is None
    assert "sampler" in draws.why
