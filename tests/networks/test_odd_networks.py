"""Networks of unusual kinds train and predict, or are refused with advice that works when it is followed."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pyro
import pytest
import torch
from torch import nn

import pyro_dropout as pd
from tests.networks.layers import Output

X = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True)
QUIET: Any = {"progress": False, "seed": 0, "compile": False}
GUIDES = [pd.AutoDropout, pd.AutoMeanField, pd.AutoLowRank, pd.AutoRowMixture, pd.AutoMultiplicative]


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))


@pytest.mark.parametrize("make", GUIDES)
@pytest.mark.parametrize(
    ("half", "shared"),
    [
        (torch.float16, False),
        pytest.param(torch.float16, True, marks=pytest.mark.deep),
        pytest.param(torch.bfloat16, False, marks=pytest.mark.deep),
        pytest.param(torch.bfloat16, True, marks=pytest.mark.deep),
    ],
)
@pytest.mark.thinned(6)
def test_half_precision_trains_as_single_precision_does(make: Callable[[Any], Any], half: Any, shared: bool) -> None:
    found = []
    for dtype in (torch.float32, half):
        model = pd.BayesianNet(mlp().to(dtype), likelihood=pd.Gaussian(4.0))
        torch.manual_seed(1)
        guide = make(model)
        assert all(parameter.dtype == torch.float32 for parameter in guide.parameters())
        x, y, elbo = X.to(dtype), Y.to(dtype), pd.ELBO(per_example=not shared)
        history = pd.fit(model, guide, x, y, steps=20, lr=0.02, loss=elbo, **QUIET)
        prediction = pd.predict(model, guide, x, samples=20, seed=0, shared=shared)
        assert bool(torch.isfinite(history.losses).all())
        found.append((history.losses, prediction.mean))
    (losses, mean), (half_losses, half_mean) = found
    torch.testing.assert_close(half_losses, losses, rtol=0.05, atol=0.5)
    torch.testing.assert_close(half_mean.float(), mean, rtol=0.05, atol=0.1)


def twice() -> nn.Module:
    parts = nn.ModuleList([nn.Linear(3, 3, bias=False), nn.Linear(3, 1)])
    return Output(parts, lambda net, x: net[1](torch.tanh(net[0](torch.tanh(net[0](x))))))


def normed(norm: Callable[[nn.Module], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(norm(nn.Linear(3, 8)), nn.Tanh(), nn.Linear(8, 1))


SHARED = {
    "a layer used twice": twice,
    "weight_norm": normed(nn.utils.parametrizations.weight_norm),
    "the old weight_norm": normed(nn.utils.weight_norm),
    "spectral_norm": normed(nn.utils.parametrizations.spectral_norm),
    "the old spectral_norm": normed(nn.utils.spectral_norm),
}


@pytest.mark.parametrize("name", list(SHARED))
@pytest.mark.parametrize("make", [pd.AutoMeanField, pd.AutoDropout])
@pytest.mark.thinned(2)
def test_what_cannot_be_drawn_for_each_point_shares_draws(name: str, make: Callable[[Any], Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = pd.BayesianNet(SHARED[name]())
        guide = make(model)
        pd.fit(model, guide, X, Y, steps=2, **QUIET)
    try:
        pd.predict(model, guide, X, samples=3, seed=0)
    except pd.errors.PyroDropoutError as refusal:
        assert "Write predict(..., shared=True)" in str(refusal)  # noqa: PT017
        assert "reused" not in str(refusal)  # noqa: PT017
    assert pd.predict(model, guide, X, samples=3, seed=0, shared=True).mean.shape == (12, 1)


def test_complex_weights_are_called_complex() -> None:
    net = Output(nn.Linear(4, 1), lambda net, x: net((x.to(torch.complex64) @ net.w).abs()))
    net.net.w = nn.Parameter(torch.randn(3, 4, dtype=torch.complex64))
    with pytest.raises(pd.errors.PyroDropoutError, match=r"'net.w' is complex, and weights are real"):
        pd.BayesianNet(net)
    model = pd.BayesianNet(net, pd.Prior(hide=lambda name, module: name == "net.w"))
    assert pd.fit(model, pd.AutoDropout(model), X, Y, steps=2, **QUIET).steps == 2


def test_the_means_of_tied_weights_go_back_into_the_plain_network() -> None:
    """As docs/networks.md writes it: a ``state_dict`` has tied weights under each of their names."""
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    net[2].weight = net[0].weight
    model = pd.BayesianNet(copy.deepcopy(net))
    guide = pd.AutoMeanField(model)
    pd.fit(model, guide, X, Y, steps=5, lr=0.1, **QUIET)
    net.load_state_dict(model.net.state_dict())
    net.load_state_dict(guide.mean(), strict=False)
    torch.testing.assert_close(net(X), pd.predict(model, guide, X, method="standard").mean)


class Centred(nn.Module):
    """Subtracts a running mean of its inputs, which it assigns in place of changing it."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return self.linear(x - self.mean)


@pytest.mark.parametrize("compile", [False, "traced", pytest.param(True, marks=pytest.mark.deep), None])
def test_a_buffer_that_a_network_assigns_moves_as_in_plain_torch(compile: Any) -> None:
    model = pd.BayesianNet(Centred())
    guide = pd.AutoDropout(model, keep=1.0)
    if compile is None:
        svi = pd.SVI(model, guide, pyro.optim.Adam({"lr": 0.01}))
        for _ in range(3):
            svi.step(X, Y)
    else:
        pd.fit(model, guide, X, Y, steps=3, **{**QUIET, "compile": compile})
    torch.testing.assert_close(model.net.mean, (1 - 0.9**3) * X.mean(0))
    pd.predict(model, guide, X, samples=3)
    pd.ELBO().parts(model, guide, X, Y)
    torch.testing.assert_close(model.net.mean, (1 - 0.9**4) * X.mean(0))
