"""The layer that makes the outputs: found where it is one, and not taken for one where it is not."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pyro_dropout import BayesianNet
from pyro_dropout.generative.jacobians import last_layer

X = torch.randn(5, 3)


def found(net: nn.Module, x: Any = X, **options: Any) -> Any:
    model = BayesianNet(net, **options)
    return last_layer(model, {name: net.get_parameter(name) for name in model.sites}, x)


class Order(nn.Module):
    """Layers that run in another order than they are named in."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.body = nn.Linear(4, 2), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.body(x)))


class Skip(nn.Module):
    """The output is the last layer's plus something else that has weights too."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.last, self.how = nn.Linear(3, 2), nn.Linear(2, 2), how

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        f: Tensor = self.last(h)
        if self.how == "in place":
            f += h
            return f
        if self.how == "nothing":
            return f.reshape(-1, 2)
        if self.how == "twice":
            return self.last(f)
        return {"plus": f + h, "scaled": 2 * f, "softmax": f.softmax(-1), "clamped": f.clamp(-9, 9)}[self.how]


def test_it_is_the_layer_that_runs_last() -> None:
    net = Order()
    layer = found(net)
    assert (layer.path, layer.sites, layer.linear) == ("head", ("head.weight", "head.bias"), True)
    assert torch.equal(layer.features, torch.relu(net.body(X)))
    assert torch.equal(layer.outputs, net(X))


@pytest.mark.parametrize("how", ["in place", "plus", "scaled", "softmax", "twice", "clamped"])
def test_outputs_that_are_not_the_layers_are_not_taken_for_them(how: str) -> None:
    layer = found(Skip(how))
    assert (layer.path, layer.linear, layer.features) == ("last", False, None)


def test_a_view_of_the_layers_outputs_will_do() -> None:
    assert found(Skip("nothing")).linear
    assert found(nn.Sequential(nn.Linear(3, 2), nn.Unflatten(1, (2, 1)), nn.Flatten())).linear
    assert found(nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5).eval())).linear


def test_weights_that_are_shared_changed_or_hidden() -> None:
    tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    tied[1].weight = tied[0].weight
    layer = found(tied)
    assert (layer.path, layer.sites, layer.linear) == ("1", ("0.weight", "1.bias"), False)
    normed = nn.Sequential(nn.Linear(3, 2), nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)))
    assert not found(normed).linear
    frozen = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    frozen[1].bias.requires_grad_(False)
    layer = found(frozen)
    assert (layer.path, layer.sites, layer.linear) == ("1", ("1.weight",), True)
    layer = found(frozen, only="0.*")
    assert (layer.path, layer.linear) == ("0", False)
