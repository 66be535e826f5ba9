"""The interfaces between the parts of the package, and the classes that meet them."""

from typing import Any

import pytest
import torch
from torch import nn

import pyro_dropout as pd
from pyro_dropout import protocols, registry
from pyro_dropout.protocols import FunctionPosterior, HasDensity, HasDraws, HasMean, Model, Posterior
from tests.contracts.likelihoods import LIKELIHOODS

X, Y = torch.linspace(-1, 1, 8).unsqueeze(-1), torch.linspace(0, 1, 8).unsqueeze(-1)


def net() -> Any:
    return pd.BayesianNet(nn.Linear(1, 1))


def test_a_network_is_a_model_and_not_a_posterior() -> None:
    for model in (net(), pd.Standardised(net(), X, Y)):
        assert isinstance(model, Model)
        assert not isinstance(model, Posterior)
    assert not isinstance(lambda x: x, Model)


@pytest.mark.parametrize("name", registry.guides())
def test_a_guide_is_a_posterior_with_a_mean(name: str) -> None:
    model = net()
    guide = registry.guides()[name].make(model, lambda site: 0.8)
    assert isinstance(guide, Posterior)
    assert isinstance(guide, HasMean)
    assert not isinstance(guide, FunctionPosterior)
    assert isinstance(guide, HasDraws) == ("ensemble" in name)  # it numbers its members


@pytest.mark.filterwarnings("ignore:chains disagree")
def test_references_say_what_they_can_do() -> None:
    exact = pd.references.conjugate(net(), X, Y)
    assert isinstance(exact, Posterior)
    assert isinstance(exact, HasDensity)
    sampled = pd.nuts(net(), X, Y, warmup=5, samples=5, chains=2, progress=False)
    assert isinstance(sampled, Posterior)
    assert isinstance(sampled, HasDraws)


def test_every_likelihood_is_one() -> None:
    assert all(isinstance(case.make(), protocols.Likelihood) for case in LIKELIHOODS.values())


def test_one_class_of_ones_own_is_enough() -> None:
    class Mine:
        def sample_weights(self, n: int) -> dict[str, torch.Tensor]:
            return {"weight": torch.ones(n, 1, 1), "bias": torch.zeros(n, 1)}

    assert isinstance(Mine(), Posterior)
    answer = pd.predict(net(), Mine(), X, samples=4, shared=True)
    assert isinstance(answer, protocols.Prediction)
    assert torch.allclose(answer.mean, X)
