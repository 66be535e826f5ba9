"""Models and likelihoods go through pickle, torch.save, copies and new processes, and come out the same."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pyro
import pytest
import torch
from torch import Tensor, nn

import pyro_dropout as pd
from tests.contracts.likelihoods import LIKELIHOODS

X, Y = torch.linspace(-1, 2, 12).reshape(6, 2), torch.linspace(3, 9, 6).unsqueeze(-1)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 1)).eval()


def doubled(name: str) -> float:
    return 2.0


def nothing_hidden(name: str, module: nn.Module) -> bool:
    return False


MODELS: dict[str, Callable[[], Any]] = {
    "network": lambda: pd.BayesianNet(net()),
    "network with functions": lambda: pd.BayesianNet(net(), pd.Prior(doubled, hide=nothing_hidden)),
    "standardised": lambda: pd.Standardised(pd.BayesianNet(net(), likelihood=pd.Gaussian(4.0, learn=True)), X, Y),
    "finite rank": lambda: pd.paper.FiniteRankGP(2, 5, 1),
    "deep": lambda: pd.paper.DeepGP(2, [5, 4], 1, nonlinearity=["erf", "cos"]),
    "deep, of functions": lambda: pd.paper.DeepGP(
        2, [5, 4], 1, nonlinearity=["tanh", nn.functional.gelu], space="function"
    ),
}
EVERYTHING = {**MODELS, **{name: case.make for name, case in LIKELIHOODS.items()}}


def through_file(given: Any) -> Any:
    room = io.BytesIO()
    torch.save(given, room)
    room.seek(0)
    return torch.load(room, weights_only=False)


WAYS: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda given: pickle.loads(pickle.dumps(given)),
    "torch.save": through_file,
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
}


def answers(given: Any) -> list[Tensor]:
    """All that a model draws, its priors and its output; or the densities of a likelihood."""
    pyro.set_rng_seed(3)
    if isinstance(given, pd.generative.Likelihood):
        f = torch.linspace(-1, 1, 12).reshape(6, 2)
        y = given.distribution(f).sample()
        return [y, given.distribution(f).log_prob(y)]
    trace = pyro.poutine.trace(given).get_trace(X)
    sites = [site for site in trace.nodes.values() if site["type"] == "sample" and site["name"] != "data"]
    drawn = [site["value"] for site in sites]
    return [*drawn, *(site["fn"].log_prob(site["value"]) for site in sites), trace.nodes["_RETURN"]["value"]]


def same(one: list[Tensor], other: list[Tensor]) -> None:
    assert len(one) == len(other)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", EVERYTHING)
@pytest.mark.thinned(3)
def test_what_comes_back_is_the_same(name: str, way: str) -> None:
    given = EVERYTHING[name]()
    back = WAYS[way](given)
    assert back is not given
    same(answers(given), answers(back))
    own = given.model if isinstance(given, pd.Standardised) else given
    if isinstance(own, pd.BayesianNet):
        other = back.model if isinstance(back, pd.Standardised) else back
        widths, again = own.prior.scales(own.net), other.prior.scales(other.net)
        assert list(widths) == list(again)
        same(list(widths.values()), list(again.values()))
