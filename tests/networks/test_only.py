"""A part of a network that is Bayesian: the last layer, or what a pattern names."""

from typing import Any

import pytest
import torch
from torch import nn

import pyro_dropout as pd


def network() -> nn.Sequential:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU())
    return nn.Sequential(body, nn.Linear(6, 2))


@pytest.mark.parametrize("only", ["1.*", ["1.weight", "1.bias"], ("1.?????*", "1.bias")])
def test_only_the_named_parameters_are_random_and_trained(only: Any) -> None:
    net = network()
    model = pd.BayesianNet(net, only=only)
    assert list(model.sites) == ["1.weight", "1.bias"]
    before = {name: value.clone() for name, value in net.state_dict().items()}
    guide = pd.AutoMeanField(model)
    x, y = torch.randn(8, 3), torch.randn(8, 2)
    pd.fit(model, guide, x, y, steps=3, compile=False, progress=False)
    body = {name: value for name, value in net.state_dict().items() if name.startswith("0.")}
    assert all(torch.equal(value, before[name]) for name, value in body.items())  # running statistics too
    assert set(guide.posterior("1.weight").variance.shape) == {2, 6}


@pytest.mark.parametrize(
    ("only", "said"),
    [
        ("classifier.*", r"only names 'classifier.\*', which matches no parameter of Sequential; there are 6, such as"),
        ([], "only must be a pattern of names"),
        (3, "only must be a pattern of names"),
        ("0.1.*", "normalisation|hidden|hides"),
    ],
)
def test_what_matches_nothing_is_named(only: Any, said: str) -> None:
    net = network()
    with pytest.raises(pd.errors.PyroDropoutError, match=said):
        pd.BayesianNet(net, only=only)
