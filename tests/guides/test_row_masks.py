"""Which masks are on rows of a weight: whatever is read, predictions have the distribution of torch's training mode."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune

import pyro_dropout as pd
from tests.networks.agreement import largest_z, predicted, stochastic_passes
from tests.networks.layers import Parts

pytestmark = pytest.mark.filterwarnings("ignore:the network's own noise")  # of shared draws


def made_of(run: Callable[[Any, Tensor], Tensor], p: float = 0.4, inplace: bool = False) -> nn.Module:
    """Two layers, a dropout layer before the second, and the given forward pass."""
    layers: dict[str, nn.Module] = {"a": nn.Linear(3, 4), "d": nn.Dropout(p, inplace), "o": nn.Linear(4, 4)}
    return Parts(run, **layers, e=nn.Dropout2d(p, inplace), c=nn.Conv2d(2, 2, 2))


def in_place(run: Callable[[Any, Tensor], Tensor]) -> Callable[[], nn.Module]:
    return lambda: made_of(run, inplace=True)


def written_later(net: Any, x: Tensor) -> Tensor:
    h = net.a(x)
    z = net.d(h)
    h += 1  # dropout has made a copy
    return net.o(z) + h


def relu_on_the_copy(net: Any, x: Tensor) -> Tensor:
    h = net.a(x)
    return net.o(net.d(h).relu_()) + h


def pair_of_rows(net: Any, x: Tensor) -> Tensor:
    one, other = net.o(net.d(torch.cat([net.a(x).relu(), net.a(-x).relu()]))).chunk(2)
    return one * other


def frames(net: Any, x: Tensor) -> Tensor:
    return net.o(net.d(net.a(x.reshape(-1, 3)))).tanh().reshape(x.shape[0], -1, 4).mean(1)


# The network, the shape of a data point, and whether its mask is on rows.
NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], bool]] = {
    "in place, input used again": (in_place(lambda n, x: (lambda h: n.o(n.d(h)) + h)(n.a(x))), (3,), False),
    "in place, input used before": (in_place(lambda n, x: (lambda h: h.exp() + n.o(n.d(h)))(n.a(x))), (3,), False),
    "in place, twice": (in_place(lambda n, x: (lambda h: n.o(n.d(n.d(h))) + h)(n.a(x))), (3,), False),
    "in place on a view": (in_place(lambda n, x: (lambda h: n.o(n.d(h.view(-1, 4))) + h)(n.a(x))), (3,), False),
    "in place, a chain": (in_place(lambda n, x: n.o(n.d(n.a(x)))), (3,), True),
    "in place behind a ReLU": (in_place(lambda n, x: n.o(n.d(n.a(x).relu()))), (3,), True),
    "in place on the data": (lambda: nn.Sequential(nn.Dropout(0.3, inplace=True), nn.Linear(3, 2)), (3,), True),
    "in place on data used again": (
        lambda: made_of(lambda n, x: n.a(n.d(x)) * x.sum(1, keepdim=True), inplace=True), (3,), False,
    ),
    "functional, in place on data used again": (
        lambda: made_of(lambda n, x: n.a(F.dropout(x, 0.3, n.training, inplace=True)) * x.sum(1, keepdim=True)),
        (3,), False,
    ),
    "a copy, and its source written later": (lambda: made_of(written_later), (3,), True),
    "ReLU in place on the copy": (lambda: made_of(relu_on_the_copy), (3,), True),
    "two rows a point": (lambda: made_of(pair_of_rows), (3,), False),
    "frames in the first dimension": (lambda: made_of(frames), (5, 3), False),
    "one frame": (lambda: made_of(frames), (1, 3), True),
    "images in the first dimension": (
        lambda: made_of(lambda n, x: n.c(n.e(x.flatten(0, 1))).tanh().reshape(x.shape[0], -1)), (2, 2, 3, 3), False,
    ),
}  # fmt: skip


def made(name: str) -> tuple[nn.Module, Tensor, bool]:
    make, shape, rows = NETS[name]
    net, x = make().double(), torch.randn(2, *shape, dtype=torch.float64)
    return net.eval(), x, rows


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", NETS)
@pytest.mark.thinned(3)
def test_predictions_are_those_of_training_mode(name: str, shared: bool) -> None:
    # 16 differences at most, each beyond 4.5 standard errors with probability 7e-6 on correct code: 3e-3 for all.
    net, x, rows = made(name)
    before = x.clone()
    model, guide = pd.from_dropout(net, example=x)
    assert bool(model.dropped) is rows
    found = predicted(model, guide, x, 400 if shared else 3000, shared)
    assert torch.equal(x, before)
    assert largest_z(stochastic_passes(net, x, 4000), found) < 4.5


@pytest.mark.parametrize("name", NETS)
@pytest.mark.thinned(3)
def test_without_an_example_they_are_right_or_refused(name: str) -> None:
    # As above: 1 run in 600 of all fails on correct code.
    net, x, rows = made(name)
    model, guide = pd.from_dropout(net)
    try:
        found = predicted(model, guide, x, 400, True)
    except pd.errors.PyroDropoutError:
        assert model.dropped
        assert not rows
        with pytest.raises(pd.errors.PyroDropoutError, match=r"example=x"):
            pd.fit(model, guide, x, torch.zeros(2, 4), steps=1, progress=False)
    else:
        assert bool(model.dropped) is rows
        assert largest_z(stochastic_passes(net, x, 4000), found) < 4.5


def test_other_shapes_than_those_of_the_example_are_refused() -> None:
    net = made_of(frames)
    model, guide = pd.from_dropout(net, example=torch.randn(4, 1, 3))
    assert model.dropped == ["d"]
    with pytest.raises(pd.errors.PyroDropoutError, match=r"'d' drops units of 'o' separately at each row"):
        pd.predict(model, guide, torch.randn(4, 5, 3), samples=4, shared=True)


# --- networks that compute something else in training mode ------------------------------------------------------------


class Threshold(nn.Module):
    """Soft in training mode, hard in evaluation mode."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x) if self.training else (x > 0).to(x)


class Normed(nn.Module):
    """Statistics of the batch in training mode, running ones in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.centre.lerp_(x.detach().mean(0), 0.1)
            return x - x.mean(0)
        return x - self.centre


BRANCHES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "softmax in evaluation": (
        lambda: made_of(lambda n, x: (lambda f: f if n.training else f.softmax(-1))(n.o(n.d(n.a(x))))), "Parts",
    ),
    "a layer of its own": (
        lambda: nn.Sequential(nn.Linear(3, 4), Threshold(), nn.Dropout(0.3), nn.Linear(4, 2)), "Sequential",
    ),
    "statistics of its own": (
        lambda: nn.Sequential(nn.Linear(3, 4), Normed(), nn.Dropout(0.3), nn.Linear(4, 2)), "Sequential",
    ),
    "around noise": (
        lambda: made_of(lambda n, x: n.d(n.a(x)) * 3 if n.training else n.d(n.a(x))), "Parts",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BRANCHES)
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.thinned(2)
def test_a_branch_on_the_mode_is_refused_by_name(name: str, trained: bool) -> None:
    make, label = BRANCHES[name]
    words = f"{label} computes something else in training mode.*branches on self.training"
    net = make().train(trained)
    with pytest.raises(pd.errors.PyroDropoutError, match=words):
        pd.from_dropout(net, example=torch.randn(4, 3))
    with pytest.raises(pd.errors.PyroDropoutError, match=words):
        pd.predict(*pd.from_dropout(net), torch.randn(4, 3), samples=2)


# --- weights that are computed at every pass --------------------------------------------------------------------------


COMPUTED: dict[str, Callable[[], nn.Module]] = {
    "parametrised weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
    "spectral_norm": lambda: nn.utils.spectral_norm(nn.Linear(4, 4)),
    "parametrised spectral_norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
    "prune": lambda: prune.l1_unstructured(nn.Linear(4, 4), "weight", 0.5),
}


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("name", COMPUTED)
@pytest.mark.thinned(3)
def test_computed_weights(name: str, trained: bool) -> None:
    # 8 differences beyond 4.5 standard errors, 7e-6 each; 8 networks: 1 run in 2,000 of all.
    layer = COMPUTED[name]()
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Dropout(0.3), layer, nn.ReLU(), nn.Dropout(0.4), nn.Linear(4, 2))
    x = torch.randn(2, 3)
    with torch.no_grad():
        for _ in range(50):
            net(x)  # spectral norms are found in training mode
        expected = stochastic_passes(net, x, 4000)
    net.train(trained)
    before = {key: value.clone() for key, value in net.state_dict().items()}
    model, guide = pd.from_dropout(net, example=x)
    assert (model.noise, model.dropped) == (["2"], ["5"])
    found = predicted(model, guide, x, 3000)
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    assert largest_z(expected, found) < 4.5
    pd.fit(model, guide, x, torch.zeros(2, 2), steps=2, progress=False)
