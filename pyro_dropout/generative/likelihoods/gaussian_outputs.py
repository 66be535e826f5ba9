"""What a likelihood says where the outputs f of a network are Gaussian, N(m, C) at each point: moments and densities.

In closed form with Gaussian noise, and for the moments of counts; by one-dimensional quadrature, exact to rounding, for
yes and no and for densities where a network has one output. Everything else is the mean over quasi-random points.
"""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from pyro_dropout.generative.likelihoods.moments import F64, Sums, block_log_prob, block_outer, block_sums
from pyro_dropout.mathematics.gaussian_expectations import NODES, log_expectation
from pyro_dropout.mathematics.gaussian_rows import semidefinite_root
from pyro_dropout.protocols import Likelihood

_DIMENSIONS = torch.quasirandom.SobolEngine.MAXDIM
_PIECE = 2**22  # numbers that are processed at once
_LEAST = 256  # quasi-random points


class Nodes:
    """Quasi-random points of the standard normal distribution, a power of two of them, the same for all data."""

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.seed = 1 << (max(_LEAST, count) - 1).bit_length(), seed

    def outputs(self, mean: Tensor, covariance: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield some points, and outputs m + L z there, (count, points, D), in the type of ``mean``."""
        points, width = mean.shape
        z = _normal(width, self.count, self.seed, mean.dtype, mean.device)
        root = semidefinite_root(covariance).to(mean)
        size = max(1, _PIECE // (self.count * width))
        for start in range(0, points, size):
            some = slice(start, start + size)
            yield some, mean[some] + torch.einsum("nde,te->tnd", root[some], z)


@functools.lru_cache(maxsize=4)
def _normal(width: int, count: int, seed: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return quasi-random points, (count, width); the last few are kept for the next call."""
    if width > _DIMENSIONS:
        found = torch.randn(count, width, dtype=F64, generator=torch.Generator().manual_seed(seed), device="cpu")
    else:
        engine = torch.quasirandom.SobolEngine(width, scramble=True, seed=seed % 2**31)
        smallest = 0.5 / 2**30  # of the numbers that the engine gives, all but zero are larger
        found = torch.special.ndtri(engine.draw(count, dtype=F64).clamp(smallest, 1 - smallest))
    return found.to(device, dtype)


class Outputs:
    """p(y | f) of a likelihood where f is Gaussian at each point; here for any likelihood, by quasi-random points.

    In all methods ``mean`` is that of f, (N, D), in the type of the outputs, and ``covariance`` its covariance,
    (N, D, D), in float64. Derived classes have the formulas of a likelihood.
    """

    normal = False  # whether y is a mixture of normals
    jointly_normal = False  # whether it is one normal, at all points together

    def __init__(self, likelihood: Any, nodes: Nodes) -> None:
        self.likelihood, self.nodes = likelihood, nodes

    def moments(self, mean: Tensor, covariance: Tensor) -> Sums:
        """Return the sums of a prediction of one draw: "mean", "spread", "noise", and those of classes."""
        parts = [block_sums(self.likelihood, f) for _, f in self.nodes.outputs(mean, covariance)]
        whole = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        return {name: value if name == "mean" else value.to(F64) / self.nodes.count for name, value in whole.items()}

    def log_prob(self, mean: Tensor, covariance: Tensor, y: Tensor) -> Tensor:
        """Return log E p(y | f) of each point, all its targets together, (N,), in float64."""
        if mean.shape[-1] == 1:
            split = (each.split(_PIECE // NODES) for each in (y, mean[:, 0], covariance[:, 0, 0].sqrt()))
            return torch.cat([log_expectation(self._log_density(own), *at) for own, *at in zip(*split, strict=True)])
        each = self.nodes.outputs(mean, covariance)
        parts = [block_log_prob(self.likelihood.distribution(f), y[some]) for some, f in each]
        return torch.cat(parts) - math.log(self.nodes.count)

    def _log_density(self, y: Tensor) -> Callable[[Tensor], Tensor]:
        """Return log p(y | f) as a function of a network's only output, (nodes, N)."""
        y = y.to(F64) if y.is_floating_point() else y
        return lambda f: self.likelihood.distribution(f.unsqueeze(-1)).log_prob(y)

    def products(self, mean: Tensor, covariance: Tensor) -> Tensor:
        """Return the covariance of E[y | f] between the targets of a point, (N, D, D), in float64."""
        found = []
        for _, f in self.nodes.outputs(mean, covariance):
            p = self.likelihood.distribution(f)
            found.append(block_outer(p, p.mean.to(F64).mean(0)) / self.nodes.count)
        return torch.cat(found)

    def strata(self, mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
        """Return means and standard deviations of equally probable normals, (S, N, ...), whose mixture y has."""
        raise NotImplementedError


def outputs_of(likelihood: Likelihood, nodes: Nodes) -> Outputs:
    """Return what a likelihood says of Gaussian outputs: its formulas, or the mean over quasi-random points."""
    # The formulas of a base class are those of another distribution.
    asked = {"distribution", "gaussian_outputs"}
    own = next((kind for kind in type(likelihood).__mro__ if asked & vars(kind).keys()), object)
    made: Outputs = vars(own).get("gaussian_outputs", Outputs)(likelihood, nodes)
    return made


def variance_of(covariance: Tensor) -> Tensor:
    """Return the diagonals of covariances, (..., D)."""
    return covariance.diagonal(dim1=-2, dim2=-1)
