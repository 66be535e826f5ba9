"""Running statistics of a frozen backbone stay as they are, whatever runs the model; what moves is said."""

from typing import Any

import pytest
import torch
from pyro.infer import Predictive
from torch import Tensor, nn

import pyro_dropout as pd

X, Y = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)) + 2, torch.zeros(8, 1)
QUIET: dict[str, Any] = {"compile": False, "progress": False}


def network(affine: bool = True) -> nn.Sequential:
    """A frozen backbone with normalisation, as torchvision's ResNets have it, and a head."""
    backbone = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8, affine=affine), nn.ReLU())
    backbone.train()(torch.randn(64, 3))  # it has seen other data
    return nn.Sequential(backbone.requires_grad_(False), nn.Linear(8, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1))


def statistics(net: nn.Module, layer: str) -> Tensor:
    found = net.get_submodule(layer)
    return torch.cat([found.running_mean, found.running_var, found.num_batches_tracked.reshape(1)])


def runs(model: pd.BayesianNet, guide: Any) -> dict[str, Any]:
    return {
        "fit": lambda: pd.fit(model, guide, X, Y, steps=2, **QUIET),
        "Predictive": lambda: Predictive(model, guide=guide, num_samples=3)(X),
        "vectorised": lambda: Predictive(model, guide=guide, num_samples=3, parallel=True)(X),
        "loss": lambda: pd.ELBO(num_particles=2).loss(model, guide, X, Y),
        "call": lambda: model(X),
    }


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("run", ["fit", "Predictive", "vectorised", "loss", "call"])
def test_frozen_statistics_stay(run: str, affine: bool) -> None:
    net = network(affine)
    model = pd.BayesianNet(net)
    guide = pd.AutoDropout(model)
    before, other = statistics(net, "0.1"), statistics(net, "2")
    runs(model, guide)[run]()
    assert torch.equal(statistics(net, "0.1"), before)
    assert not torch.equal(statistics(net, "2"), other)  # those of a trained layer move, as in torch
    assert all(module.training for module in net.modules())


def test_a_frozen_layer_normalises_with_its_statistics() -> None:
    net = network()
    model = pd.BayesianNet(net)
    seen: list[Tensor] = []
    net[0].register_forward_hook(lambda module, inputs, output: seen.append(output))
    model(X)
    with torch.no_grad():
        assert torch.equal(seen[0], net[0].eval()(X))


@pytest.mark.parametrize(("choice", "moved"), [(False, {"0.1", "2"}), (True, {"2"}), ("all", set())])
def test_it_can_be_chosen(choice: Any, moved: set[str]) -> None:
    net = network()
    model = pd.BayesianNet(net, frozen_statistics=choice)
    before = {layer: statistics(net, layer) for layer in ("0.1", "2")}
    model(X)
    assert {layer for layer, value in before.items() if not torch.equal(value, statistics(net, layer))} == moved
    for layer in before:
        kind = "running statistics that move in train(): " if layer in moved else "running statistics that stay: "
        line = next(line for line in repr(model).splitlines() if kind in line)
        assert layer in line.split(": ")[1].split(", ")
    with pytest.raises(pd.errors.PyroDropoutError, match="frozen_statistics"):
        pd.BayesianNet(net, frozen_statistics="some")  # type: ignore[arg-type]
