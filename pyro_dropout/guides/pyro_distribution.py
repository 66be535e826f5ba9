"""Distributions of torch as distributions of Pyro, which can be called in a sample statement and put into plates."""

import copy

from pyro.distributions.torch_distribution import TorchDistributionMixin
from torch.distributions import Distribution as TorchDistribution

from pyro_dropout.protocols import Distribution

_CONVERTED: dict[type, type] = {}  # a class of torch, and the one that also has Pyro's methods


def pyro_distribution(q: Distribution) -> Distribution:
    """Return a distribution of torch as one of Pyro, with the same parameters; anything else as it is.

    Example:
        >>> import torch
        >>> q = pyro_distribution(torch.distributions.Independent(torch.distributions.Normal(torch.zeros(3), 1.0), 1))
        >>> q().shape, isinstance(q, torch.distributions.Independent)
        (torch.Size([3]), True)
    """
    if not isinstance(q, TorchDistribution) or isinstance(q, TorchDistributionMixin):
        return q
    converted, kind = copy.copy(q), type(q)
    if kind not in _CONVERTED:
        _CONVERTED[kind] = type(kind.__name__, (kind, TorchDistributionMixin), {"__module__": kind.__module__})
    converted.__class__ = _CONVERTED[kind]
    return converted
