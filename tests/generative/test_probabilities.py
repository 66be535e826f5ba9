"""A network that gives probabilities to a likelihood of logits is told, once; one that gives logits is not."""

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pyro_dropout as pd
from tests.networks.layers import Output, Parts

X = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(40) % 10
QUIET = {"steps": 2, "compile": False, "progress": False}


def net(outputs: int, *end: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, outputs), *end)


def functional() -> nn.Module:
    return Output(net(10), lambda net, x: F.softmax(net(x), -1))


def gated(ends: bool) -> nn.Module:
    """Registers a sigmoid last; with ``ends``, it is the end too."""
    one: Any = lambda net, x: net.gate(net.inner(x))  # noqa: E731
    return Parts(one if ends else lambda net, x: 3 * net.inner(x) * one(net, x), inner=net(1), gate=nn.Sigmoid())


def maps() -> nn.Module:
    """Classes at five positions, with the classes first."""
    return Output(net(20), lambda net, x: net(x).unflatten(1, (4, 5)).softmax(1))


PROBABILITIES: dict[str, tuple[Any, Any, Any, str]] = {
    "softmax": (lambda: net(10, nn.Softmax(-1)), pd.Categorical, LABELS, r"nn.Softmax.*than 0.23.*nn.LogSoftmax\(-1\)"),
    "function": (functional, pd.Categorical, LABELS, r"sum to one.* Categorical takes logits"),
    "maps": (maps, lambda: pd.Categorical(dims=(4, 5), dim=0), LABELS[:, None].expand(40, 5) % 4, "than 0.48"),
    "sigmoid": (lambda: net(1, nn.Sigmoid()), pd.Bernoulli, LABELS % 2, r"nn.Sigmoid, but Bernoulli.*nn.Identity"),
}


@pytest.mark.parametrize("name", PROBABILITIES)
@pytest.mark.parametrize("how", [{}, {"keep_samples": False}, {"method": "linearised"}, {"method": "standard"}])
@pytest.mark.thinned(3)
def test_every_verb_tells_it_once(name: str, how: dict[str, Any]) -> None:
    make, likelihood, y, said = PROBABILITIES[name]
    model, guide = pd.from_dropout(make(), likelihood=likelihood())
    with pytest.warns(UserWarning, match=said) as told:
        pd.predict(model, guide, X, samples=4, **how)
    assert told[0].filename == __file__
    pd.predict(model, guide, X, samples=4, **how)  # warnings are errors here
    model, guide = pd.from_dropout(make(), likelihood=likelihood())
    with pytest.warns(UserWarning, match=said):
        pd.fit(model, guide, X, y, **QUIET)
    pd.predict(model, guide, X, samples=4, **how)


def test_a_sigmoid_at_the_end_of_a_module_of_its_own_is_told_by_predict() -> None:
    with pytest.warns(UserWarning, match=r"nn.Sigmoid, but Bernoulli"):
        pd.predict(*pd.from_dropout(gated(ends=True), likelihood=pd.Bernoulli()), X, samples=4)


@pytest.mark.parametrize(
    ("make", "likelihood", "y"),
    [
        (lambda: net(10), pd.Categorical, LABELS),
        (lambda: net(10, nn.LogSoftmax(-1)), pd.Categorical, LABELS),
        (lambda: net(1), pd.Bernoulli, LABELS % 2),
        (lambda: gated(ends=False), pd.Bernoulli, LABELS % 2),
        (lambda: net(1, nn.Sigmoid()), pd.Gaussian, torch.rand(40, 1)),
    ],
)
def test_others_are_not_told(make: Any, likelihood: Any, y: Tensor) -> None:
    model, guide = pd.from_dropout(make(), likelihood=likelihood())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pd.fit(model, guide, X, y, **QUIET)
        pd.predict(model, guide, X, samples=4)
