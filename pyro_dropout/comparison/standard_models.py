"""The models and guides that the command line compares: reasonable defaults for unknown data."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from pyro_dropout.generative.likelihoods import Gaussian
from pyro_dropout.generative.networks import BayesianNet
from pyro_dropout.generative.priors import Prior
from pyro_dropout.generative.standardised import Standardised
from pyro_dropout.protocols import Model, PyroModel
from pyro_dropout.registry import guides, resolve_guide

Data = tuple[Tensor, Tensor]

_SLOW, _FAST = 2.0, 40.0  # standard deviations of a wave's frequency, in radians per standard deviation of the input
_DROP = 0.1


class Waves(nn.Linear):
    """Random waves √2 sin(s ωx + φ), half of them slow and half fast.

    With ω ~ N(0, 1) and weights N(0, 1/K) after them, the variance of f is about 1. As K grows, f becomes a Gaussian
    process with two length-scales: a trend and a cycle.
    """

    scales: Tensor

    def __init__(self, inputs: int, waves: int) -> None:
        super().__init__(inputs, waves)
        self.register_buffer("scales", torch.where(torch.arange(waves) < waves // 2, _SLOW, _FAST))

    def reset_parameters(self) -> None:
        """Draw frequencies from their prior, and phases uniformly from the circle."""
        nn.init.normal_(self.weight)
        nn.init.uniform_(self.bias, -math.pi, math.pi)

    def forward(self, x: Tensor) -> Tensor:
        """Return the waves at x."""
        return math.sqrt(2) * torch.sin(self.scales * functional.linear(x, self.weight) + self.bias)


def wave_model(train: Data, width: int = 100, tau: float = 20.0) -> Standardised:
    """Return a network of waves for a series with a trend and a cycle, in the units of its data."""
    x, y = train
    net = nn.Sequential(Waves(x.shape[1], width), nn.Linear(width, y.shape[1]))
    return Standardised(BayesianNet(net, Prior(), Gaussian(tau)), x, y)


def regression_model(train: Data, width: int = 50) -> Standardised:
    """Return a network with one hidden layer of ReLU and a learned precision, in the units of its data."""
    x, y = train
    net = nn.Sequential(nn.Linear(x.shape[1], width), nn.ReLU(), nn.Linear(width, y.shape[1]))
    return Standardised(BayesianNet(net, likelihood=Gaussian(10.0, learn=True)), x, y)


def kept(model: Model, learned: bool = False) -> Callable[[str], float]:
    """Return the probability of keeping a row, by site: a layer's only input is not dropped, unless that is learned."""
    return lambda name: 1.0 if model.sites[name].fan_in == 1 and not learned else 1 - _DROP


def standard_guide(name: str, **options: int) -> Callable[[Model], PyroModel]:
    """Return what builds the guide of this name for a model of this file; options are those of its registry entry."""
    entry = resolve_guide(name)
    return lambda model: entry.make(model, kept(model, entry.learns_keep), **options)


GUIDES = {name: standard_guide(name) for name in guides()}
