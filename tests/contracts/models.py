"""The kinds of model that every guide must serve, each as small as it can be and still be of its kind."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pyro
import pyro.distributions as dist
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pyro_dropout import BayesianNet, Categorical, Gaussian
from pyro_dropout.paper import DeepGP, FiniteRankGP
from tests.networks.layers import Output

N, CLASSES = 6, 3


@dataclass(frozen=True)
class Problem:
    """A model with data for it.

    Attributes:
        model: a Pyro model of (x, y).
        x: inputs.
        y: targets.
        options: what a guide must be told of this model, if it takes such an option.
        latents: how many latent sites there are.
    """

    model: Any
    x: Tensor
    y: Tensor
    latents: int
    options: dict[str, Any] = field(default_factory=dict)


class Residual(nn.Module):
    """Two convolutions around a shortcut, with batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1, bias=False)
        self.norm, self.norm_again = nn.BatchNorm2d(2), nn.BatchNorm2d(2)
        self.out = nn.Linear(2, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.norm(self.first(x)))
        h = torch.relu(x + self.norm_again(self.second(h)))
        return self.out(h.mean((-2, -1)))


def recurrent(layer: nn.RNNBase, outputs: int = CLASSES) -> nn.Module:
    """A sequence read by a recurrent layer, and what is made of its last output."""
    layers = nn.ModuleList([layer, nn.Linear(layer.hidden_size, outputs)])
    return Output(layers, lambda net, x: net[1](net[0](x)[0][:, -1]))


def words() -> nn.Module:
    """A bag of words: embedded, averaged, classified."""
    layers = nn.ModuleList([nn.Embedding(7, 3), nn.Linear(3, CLASSES)])
    return Output(layers, lambda net, x: net[1](torch.tanh(net[0](x).mean(1))))


def tied() -> nn.Module:
    """Words in, words out, with one matrix for both."""
    layers = nn.ModuleList([nn.Embedding(CLASSES, 4), nn.Linear(4, CLASSES)])
    layers[1].weight = layers[0].weight
    return Output(layers, lambda net, x: net[1](torch.tanh(net[0](x).mean(1))))


def attention() -> nn.Module:
    """A sequence that looks at itself once."""
    layers = nn.ModuleList([nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, CLASSES)])
    return Output(layers, lambda net, x: net[1](net[0](x, x, x)[0].mean(1)))


def transformer() -> nn.Module:
    """One encoder layer, without dropout of its own."""
    layer = nn.TransformerEncoderLayer(4, 2, 5, dropout=0.0, batch_first=True)
    return Output(nn.ModuleList([layer, nn.Linear(4, CLASSES)]), lambda net, x: net[1](net[0](x).mean(1)))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))


def lenet() -> nn.Module:
    first = nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2)
    return nn.Sequential(*first, nn.Conv2d(2, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(3, CLASSES))


def _regression(model: Any, dtype: torch.dtype, latents: int, **rest: Any) -> Problem:
    x = torch.randn(N, 2, dtype=dtype)
    return Problem(model, x, x[:, :1] * x[:, 1:], latents, **rest)


def _classes(net: nn.Module, dtype: torch.dtype, latents: int, *shape: int, words: int = 0) -> Problem:
    """A classifier of real-valued inputs of the given shape, or of sentences of three words."""
    model = BayesianNet(net, likelihood=Categorical()).to(dtype)
    x = torch.randint(words, (N, 3)) if words else torch.randn(N, *shape, dtype=dtype)
    return Problem(model, x, torch.arange(N) % CLASSES, latents)


def plain(x: Tensor, y: Tensor | None = None) -> Tensor:
    """A network as a Pyro user writes it: x @ W + b, so that rows are counted by dimension 0."""
    zero, one = x.new_zeros(()), x.new_ones(())
    w1 = pyro.sample("W1", dist.Normal(zero, one).expand([2, 4]).to_event(2))
    b1 = pyro.sample("b1", dist.Normal(zero, one).expand([4]).to_event(1))
    w2 = pyro.sample("W2", dist.Normal(zero, 0.5 * one).expand([4, 1]).to_event(2))
    f = torch.tanh(x @ w1 + b1) @ w2
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(f, 0.5 * one).to_event(1), obs=y)
    return f


def noisy(x: Tensor, y: Tensor | None = None) -> Tensor:
    """A linear model whose noise is a latent variable too, and positive."""
    zero, one = x.new_zeros(()), x.new_ones(())
    weight = pyro.sample("weight", dist.Normal(zero, one).expand([1, 2]).to_event(2))
    noise = pyro.sample("noise", dist.LogNormal(zero, one))
    rate = pyro.sample("rate", dist.Gamma(2 * one, one).expand([1]).to_event(1))
    if weight.dim() > 2:  # sample dimensions, and perhaps a place for the plate of the data
        noise, rate = noise.reshape(-1, 1, 1), rate.reshape(-1, 1, 1)
        f = x @ weight.reshape(-1, 1, 2).mT
    else:
        f = F.linear(x, weight)
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(f * rate, noise * torch.ones_like(f)).to_event(1), obs=y)
    return f


KINDS: dict[str, Callable[[torch.dtype], Problem]] = {
    "mlp": lambda dtype: _regression(BayesianNet(mlp(), likelihood=Gaussian(tau=4.0)).to(dtype), dtype, 4),
    "lenet": lambda dtype: _classes(lenet(), dtype, 6, 1, 6, 6),
    "residual": lambda dtype: _classes(Residual(), dtype, 5, 2, 4, 4),
    "lstm": lambda dtype: _classes(recurrent(nn.LSTM(2, 3, batch_first=True)), dtype, 6, 3, 2),
    "gru": lambda dtype: _classes(recurrent(nn.GRU(2, 3, batch_first=True)), dtype, 6, 3, 2),
    "embedding": lambda dtype: _classes(words(), dtype, 3, words=7),
    "tied": lambda dtype: _classes(tied(), dtype, 2, words=CLASSES),
    "attention": lambda dtype: _classes(attention(), dtype, 6, 3, 4),
    "transformer": lambda dtype: _classes(transformer(), dtype, 10, 3, 4),
    "gp": lambda dtype: _regression(FiniteRankGP(2, 4, 1).to(dtype), dtype, 3),
    "deep-gp": lambda dtype: _regression(DeepGP(2, [4, 3], 1).to(dtype), dtype, 5),
    "plain": lambda dtype: _regression(plain, dtype, 3, options={"row_dim": 0}),
    "noisy": lambda dtype: _regression(noisy, dtype, 3),
}
