"""The density of a draw of dropout against scipy's, and why there may be none."""

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


def test_dropout_with_a_scale_is_the_sum_over_all_masks(dtype: torch.dtype) -> None:
    model = pd.BayesianNet(nn.Linear(2, 1).to(dtype))
    guide = pd.AutoDropout(model, keep=0.7, scale=0.4, bias="gaussian")
    data = tuple(each.to(dtype) for each in DATA)
    weights, density, why = draws_with_density(ModelCall(model, data), guide, 50)
    assert why == ""
    w, b = (weights[name].detach().double().numpy() for name in ("weight", "bias"))
    loc, bias = guide.posterior("weight").loc.detach().double().numpy(), guide.posterior("bias")
    terms = []
    for mask in itertools.product([0.0, 1.0], repeat=2):
        chance = np.prod([0.7 if kept else 0.3 for kept in mask])
        terms.append(np.log(chance) + stats.norm.logpdf(w, loc * mask, 0.4).sum((-2, -1)))
    mean, std = (each.detach().double().numpy() for each in (bias.mean, bias.variance.sqrt()))
    expected = np.logaddexp.reduce(terms) + stats.norm.logpdf(b, mean, std).sum(-1)
    near = {"rtol": 2e-5, "atol": 2e-4} if dtype == torch.float32 else {"rtol": 1e-10, "atol": 1e-9}
    np.testing.assert_allclose(density.detach().numpy(), expected, **near)


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
