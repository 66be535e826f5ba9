"""The density of a draw against scipy's, for guides that factorise and for others; and why there may be none."""

import itertools
import re
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
from pyro_dropout.prediction.weight_draws import draws_with_density
from tests.oracles.predictions import hidden_net

DATA = (torch.zeros(4, 2), torch.zeros(4, 1))


def drawn(guide: Any, samples: int = 50, model: Any = None) -> tuple[dict[str, Any], Any]:
    dtype = next(guide.parameters()).dtype if isinstance(guide, nn.Module) else torch.float32
    with torch.no_grad():
        x, y = torch.zeros(4, 2, dtype=dtype), torch.zeros(4, 1, dtype=dtype)
        weights, density, why = draws_with_density(ModelCall(model, (x, y)), guide, samples)
    assert why == ""
    assert density is not None
    return {name: value.double().numpy() for name, value in weights.items()}, density.numpy()


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    return {"rtol": 2e-5, "atol": 2e-4} if dtype == torch.float32 else {"rtol": 1e-10, "atol": 1e-9}


def numbers(value: Tensor) -> Any:
    return value.detach().double().numpy()


def test_dropout_with_a_scale_is_the_sum_over_all_masks(dtype: torch.dtype) -> None:
    model = pd.BayesianNet(nn.Linear(2, 1).to(dtype))
    guide = pd.AutoDropout(model, keep=0.7, scale=0.4, bias="gaussian")
    weights, density = drawn(guide)
    loc, bias = numbers(guide.posterior("weight").loc), guide.posterior("bias")
    terms = []
    for mask in itertools.product([0.0, 1.0], repeat=2):
        chance = np.prod([0.7 if kept else 0.3 for kept in mask])
        terms.append(np.log(chance) + stats.norm.logpdf(weights["weight"], loc * mask, 0.4).sum((-2, -1)))
    scores = stats.norm.logpdf(weights["bias"], numbers(bias.mean), numbers(bias.variance) ** 0.5)
    np.testing.assert_allclose(density, np.logaddexp.reduce(terms) + scores.sum(-1), **tolerance(dtype))


def test_a_network_wide_guide_is_one_normal(dtype: torch.dtype) -> None:
    guide = pd.AutoLowRank(pd.BayesianNet(hidden_net(1, dtype)), rank=4, per="net", init_scale=0.5)
    states: list[Any] = list(guide.states.values())
    for state in states:
        state.factor.data.mul_(20)
    scale = np.concatenate([np.exp(numbers(state.log_scale)).ravel() for state in states])
    factor = scale[:, None] * np.concatenate([numbers(state.factor) for state in states])
    mean = np.concatenate([numbers(state.loc).ravel() for state in states])
    weights, density = drawn(guide)
    flat = np.concatenate([value.reshape(50, -1) for value in weights.values()], -1)
    q = stats.multivariate_normal(mean, np.diag(scale**2) + factor @ factor.T)
    np.testing.assert_allclose(density, q.logpdf(flat), **tolerance(dtype))


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
