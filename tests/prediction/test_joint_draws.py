"""Log p(y | w) and log p(w) of each draw against scipy's densities; chains, seeds, and models of every kind."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

import pyro_dropout as pd
from pyro_dropout.generative.model_call import ModelCall
from pyro_dropout.prediction.joint_draws import JointDraws, joint_draws
from tests.oracles.predictions import problem


def numbers(value: Tensor) -> Any:
    return value.detach().double().numpy()


def forward(weights: dict[str, Tensor], x: Tensor) -> Any:
    """Outputs of the net 2-3-D by hand, (chains, draws, N, D)."""
    w = {name: numbers(value) for name, value in weights.items()}
    h = np.tanh(np.einsum("nq,cskq->csnk", numbers(x), w["0.weight"]) + w["0.bias"][:, :, None])
    return np.einsum("csnk,csdk->csnd", h, w["2.weight"]) + w["2.bias"][:, :, None]


def check_prior(draws: JointDraws, rtol: float) -> None:
    """The prior of a net 2-3-D: N(0, 1), and N(0, 1/3) for the weights of the second layer."""
    scales = {"0.weight": 1.0, "0.bias": 1.0, "2.weight": 3**-0.5, "2.bias": 1.0}
    scores = [stats.norm.logpdf(numbers(w), 0, scales[name]) for name, w in draws.weights.items()]
    expected = sum(score.reshape(*score.shape[:2], -1).sum(-1) for score in scores)
    np.testing.assert_allclose(numbers(draws.log_prior), expected, rtol=rtol)


@pytest.mark.parametrize("out", [1, 3])
def test_densities_of_a_regression(dtype: torch.dtype, out: int) -> None:
    model, _, x = problem(out=out, dtype=dtype)
    y = torch.randn(5, out, dtype=dtype)
    draws = joint_draws(ModelCall(model, (x, y)), pd.AutoMeanField(model), 20, None, replicate=True)
    rtol = 1e-4 if dtype == torch.float32 else 1e-10
    f = forward(draws.weights, x)
    expected = stats.norm.logpdf(numbers(y), f, 0.5).sum(-1)
    np.testing.assert_allclose(numbers(draws.log_likelihood["y"]), expected, rtol=rtol)
    check_prior(draws, rtol)
    np.testing.assert_allclose(
        numbers(draws.log_joint), expected.sum(-1) + numbers(draws.log_prior), rtol=rtol, atol=rtol
    )
    assert draws.log_likelihood["y"].dtype == draws.log_prior.dtype == torch.float64
    assert draws.replicated["y"].dtype == dtype
    assert draws.replicated["y"].shape == ((1, 20, 5) if out == 1 else (1, 20, 5, out))
    assert draws.dims == {"y": ("point", "output")[: 1 + (out > 1)]}
    assert torch.equal(draws.log_data, draws.log_likelihood["y"].sum(-1))


def plain(tau: float = 4.0) -> Any:
    """A model with a likelihood of the package in it, and another written onto it, which says nothing."""
    inside = pd.Gaussian(tau)

    def model(x: Tensor, y: Tensor | None = None, num_data: int | None = None) -> Tensor:
        width = pyro.sample("width", dist.LogNormal(0.0, 0.5))
        weight = pyro.sample("W", dist.Normal(0.0, width).expand([1, 2]).to_event(2))
        f: Tensor = x @ weight.mT
        inside(f, y, num_data)
        return f

    model.likelihood = pd.Gaussian(100.0)  # type: ignore[attr-defined]
    return model


def test_a_wrapper_that_can_evaluate_but_whose_prior_is_random() -> None:
    """The quick way would take the prior of the first draw for that of all; it must be seen that this is wrong."""

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.likelihood, self.inner = pd.Gaussian(4.0), plain()
            self.sites = {"width": None, "W": None}

        def evaluate(self, weights: dict[str, Tensor], x: Tensor) -> Tensor:
            return x @ weights["W"].mT

        def forward(self, x: Tensor, y: Tensor | None = None, num_data: int | None = None) -> Any:
            return self.inner(x, y, num_data)

    model, x, y = Wrapped(), torch.randn(5, 2), torch.randn(5, 1)
    guide = pd.AutoMeanField(model)
    guide(x, y)
    draws = joint_draws(ModelCall(model, (x, y)), guide, 20, 3)
    np.testing.assert_allclose(
        numbers(draws.log_prior),
        numbers(joint_draws(ModelCall(model.inner, (x, y)), guide, 20, 3).log_prior),
        rtol=1e-6,
    )


def test_a_sampler_keeps_its_chains_and_is_thinned_evenly() -> None:
    model, _, x = problem()
    kept = {name: torch.randn(3, 100, *value.shape) for name, value in model.net.named_parameters()}
    posterior = SimpleNamespace(weights=kept)
    draws = joint_draws(ModelCall(model, (x, torch.zeros(5, 1))), posterior, 34, None)
    assert torch.equal(draws.weights["0.weight"], kept["0.weight"][:, ::3])
    assert joint_draws(ModelCall(model, (x, torch.zeros(5, 1))), posterior, 500, None).log_joint.shape == (3, 100)
    assert draws.log_q is None
    assert "sampler" in draws.why
    check_prior(draws, 1e-4)
    expected = stats.norm.logpdf(0.0, forward(draws.weights, x)[..., 0], 0.5)
    np.testing.assert_allclose(numbers(draws.log_likelihood["y"]), expected, rtol=1e-3, atol=1e-4)
