"""The models and guides that the command line compares: reasonable defaults for unknown data."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from pyro_dropout.generative.likelihoods import Gaussian
from pyro_dropout.generative.networks import BayesianNet
from pyro_dropout.generative.priors import Prior
from pyro_dropout.generative.standardised import Standardised
from pyro_dropout.protocols import Model, PyroModel
from pyro_dropout.registry import guides, resolve_guide

Data = tuple[Tensor, Tensor]

_FASTEST = 30.0  # standard deviation of a wave's frequency, in radians per standard deviation of the input
_DROP = 0.1


class Waves(nn.Linear):
    """A layer of sine waves; with random frequencies and phases, the features of a Gaussian process."""

    def reset_parameters(self) -> None:
        """Draw frequencies from their prior, and phases uniformly from the circle."""
        nn.init.normal_(self.weight, std=_FASTEST)
        nn.init.uniform_(self.bias, -math.pi, math.pi)

    def forward(self, x: Tensor) -> Tensor:
        """Return sin(ωx + φ)."""
        return torch.sin(super().forward(x))


def wave_model(train: Data, width: int = 100, tau: float = 20.0) -> Standardised:
    """Return a network of waves for a series with a fast period, in the units of its data."""
    x, y = train
    net = nn.Sequential(Waves(x.shape[1], width), nn.Linear(width, y.shape[1]))
    model = BayesianNet(net, Prior(length_scale=1 / _FASTEST), Gaussian(tau))
    return Standardised(model, x, y)


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
