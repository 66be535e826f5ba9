"""A draw for each data point has the distribution of drawing whole weights, at the price of a mask.

Draws for one data point are compared with draws of whole weights in distribution (Kolmogorov-Smirnov on projections),
in the covariance between positions of that point, and in the mean of gradients. Every pass has a noise of its own, so
samples are independent: flipout shares one noise in a batch, whose points are uncorrelated only, and even that only in
what is linear in the weights.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.func import vmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pyro_dropout import ELBO, BayesianNet, per_example
from tests.contracts.guides import GUIDES as ALL_GUIDES
from tests.networks.layers import Output, Parts

F64 = torch.float64
SAMPLES = 4_000
# Every comparison below fails on correct code with this probability; there are some 6,000 of them in this file.
RARE = 1e-7


# A draw of a full covariance is shared by all data points.
GUIDES = {name: make for name, make in ALL_GUIDES.items() if not name.startswith("full-rank")}


def flat(layer: nn.Module) -> nn.Module:
    """A layer's outputs at all positions, in one row for each data point."""
    return Output(layer, lambda layer, x: layer(x).flatten(1))


def tied() -> nn.Module:
    """Words in, words out, with one square matrix: a mistake about its sides would show in the distribution only."""
    words, out = nn.Embedding(3, 3), nn.Linear(3, 3)
    out.weight = words.weight
    return flat(nn.Sequential(words, out))


def scaled() -> nn.Module:
    """A layer with a slope for each channel of negative outputs, and a scale for each unit."""
    layers = nn.Sequential(nn.Conv1d(2, 2, 2), nn.PReLU(2))
    return Parts(lambda net, x: (net.gain * net.layers(x)).flatten(1), layers=layers, gain=nn.Parameter(torch.rand(3)))


def around_one(*shape: int) -> Tensor:
    """Inputs that are alike at all positions, so that outputs which should be correlated are."""
    return 1 + 0.5 * torch.randn(*shape, dtype=F64)


# What a layer is given: one data point, twice.
LAYERS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "linear": (lambda: flat(nn.Linear(3, 2)), lambda: around_one(3)),
    "linear-positions": (lambda: flat(nn.Linear(3, 2)), lambda: around_one(2, 3)),
    "convolution": (lambda: flat(nn.Conv2d(2, 2, 2)), lambda: around_one(2, 3, 2)),
    "grouped": (lambda: flat(nn.Conv1d(4, 2, 2, groups=2)), lambda: around_one(4, 3)),
    "transposed": (lambda: flat(nn.ConvTranspose1d(2, 4, 2, groups=2)), lambda: around_one(2, 2)),
    "embedding": (lambda: flat(nn.Embedding(4, 2)), lambda: torch.tensor([1, 2, 1])),
    "tied": (tied, lambda: torch.tensor([0, 2])),
    "scaled": (scaled, lambda: around_one(2, 4)),
}


def problem(guide: str, layer: str) -> tuple[BayesianNet, Any, Tensor]:
    make, point = LAYERS[layer]
    model = BayesianNet(make().to(F64))
    q = GUIDES[guide](model)
    with torch.no_grad():  # away from where guides start, so that no part of them is too small to see
        for name, value in q.named_parameters():
            value += 0.5 if name.endswith("log_scale") else 0.3 * torch.randn_like(value)
    x = torch.stack([point()] * 2)
    q(x)
    return model, q, x


def point_draws(model: BayesianNet, q: Any, x: Tensor, samples: int = SAMPLES, **options: Any) -> Tensor:
    """Outputs with a draw for each data point, (samples, N, D): independent passes, run side by side."""

    def one(_: Tensor) -> Tensor:
        with per_example(**options):
            return model.evaluate(q(x), x)

    return vmap(one, randomness="different")(torch.empty(samples))


def whole_weights(q: Any, x: Tensor, samples: int) -> dict[str, Tensor]:
    """Draws of whole weights as the guide makes them in training, (samples, ...), with their gradients."""
    return vmap(lambda _: q(x), randomness="different")(torch.empty(samples))


def outputs(model: BayesianNet, weights: dict[str, Tensor], x: Tensor) -> Tensor:
    """Outputs at the first data point with whole weights, (samples, D)."""
    return model.evaluate(weights, x[:1]).squeeze(-2)


CASES = [pytest.param(guide, layer, id=f"{guide}-{layer}") for guide in GUIDES for layer in LAYERS]


def same_mean(a: Tensor, b: Tensor | float) -> None:
    """Means over the first dimension differ by chance only: no t statistic beyond that of ``RARE``."""
    b = b if isinstance(b, Tensor) else torch.full_like(a, b)
    error = (a.var(0) / len(a) + b.var(0) / len(b)).sqrt()
    score = (a.mean(0) - b.mean(0)).abs() / (error + 1e-9 * (1 + a.abs().amax(0)))
    assert score.max() < stats.t.isf(RARE / 2, 2 * len(a) - 2)


@pytest.mark.parametrize(("guide", "layer"), CASES)
@pytest.mark.thinned(9)
def test_draws_for_a_point_are_draws_of_weights(guide: str, layer: str) -> None:
    """Two-sample tests on projections, and the covariance of all outputs of one point, between positions too."""
    model, q, x = problem(guide, layer)
    with torch.no_grad():
        relaxed = guide == "concrete"  # in training; its posterior has flips that are not
        weights = whole_weights(q, x, SAMPLES) if relaxed else q.sample_weights(SAMPLES)
        mine, whole = point_draws(model, q, x), outputs(model, weights, x)
    first, second = mine.unbind(1)
    axes = torch.cat([torch.eye(whole.shape[-1], dtype=F64)[:, :2], torch.randn(whole.shape[-1], 2, dtype=F64)], -1)
    for a, b in zip((first @ axes).T, (whole @ axes).T, strict=True):
        # outputs of dropout are discrete, and equal ones must be equal to the last digit to count as ties
        tested = stats.ks_2samp(np.round(a.numpy(), 8), np.round(b.numpy(), 8), method="asymp")
        assert tested.pvalue > RARE
    mean = whole.mean(0)
    same_mean(first, whole)
    same_mean(_products(first - mean, first - mean), _products(whole - mean, whole - mean))
    if layer not in ("tied", "scaled"):  # what is linear in the weights is uncorrelated between points
        same_mean(_products(first - first.mean(0), second - second.mean(0)), 0.0)


def _products(a: Tensor, b: Tensor) -> Tensor:
    """All products of an output with an output, (samples, D²)."""
    return torch.einsum("si,sj->sij", a, b).flatten(1)


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(("guide", "layer"), CASES)
@pytest.mark.thinned(40)
def test_gradients_have_the_same_mean(guide: str, layer: str) -> None:
    """Of E[Σ(f - 1)⁴], in 20 independent estimates of 200 draws each; labels have no gradient of this kind."""
    model, q, x = problem(guide, layer)
    parameters = [value for name, value in q.named_parameters() if not name.endswith("logits")]

    def gradients(f: Tensor) -> Tensor:
        found = []
        for part in (f - 1).pow(4).sum(-1).split(200):
            grads = torch.autograd.grad(part.mean(), parameters, retain_graph=True, allow_unused=True)
            pairs = zip(grads, parameters, strict=True)
            found.append(torch.cat([(torch.zeros_like(v) if g is None else g).flatten() for g, v in pairs]))
        return torch.stack(found)

    mine = gradients(point_draws(model, q, x)[:, 0])
    same_mean(mine, gradients(outputs(model, whole_weights(q, x, SAMPLES), x)))


# --- its price --------------------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """Notes how many numbers the largest tensor has that any operation makes, backward included."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                self.numel = max(self.numel, value.untyped_storage().nbytes() // value.element_size())
        return result


@pytest.mark.parametrize("guide", GUIDES)
def test_no_tensor_holds_weights_for_every_point(guide: str) -> None:
    points, width = 512, 64
    model = BayesianNet(nn.Linear(width, width))
    q, x = GUIDES[guide](model), torch.randn(points, width)
    with Largest() as largest:
        ELBO().loss_and_grads(model, q, x, torch.zeros(points, width))
    assert points * width <= largest.numel < points * width * width / 8
