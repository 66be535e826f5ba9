"""Moments and densities of targets: over draws of the outputs f, and where these are Gaussian, N(m, C) at each point.

A block of draws is reduced to sums for each data point, which are added to the earlier ones, all in float64, so that no
draw is stored. With y_t the targets given the t-th output, Var y = Var_t E[y_t] + E_t Var[y_t].

Of Gaussian outputs they are in closed form with Gaussian noise, and for the moments of counts; by one-dimensional
quadrature, exact to rounding, for yes and no and for densities where a network has one output. Everything else is the
mean over quasi-random points.
"""

import functools
import math
from collections.abc import Callable, Iterator
from types import EllipsisType
from typing import Any, TypeGuard, TypeVar

import torch
from pyro.distributions.torch_distribution import MaskedDistribution
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, Normal

from pyro_dropout.errors import NotAvailableError
from pyro_dropout.mathematics.gaussian_rows import semidefinite_root
from pyro_dropout.mathematics.normal import NODES, log_expectation
from pyro_dropout.mathematics.shapes import base_distribution, keeps_density
from pyro_dropout.protocols import Distribution, Likelihood

F64 = torch.float64
Sums = dict[str, Tensor]
Kind = TypeVar("Kind")
Points = slice | int | EllipsisType  # some of a prediction's points, one replica of a fleet, or all

_THINNEST = 1e-150  # a standard deviation that underflows to zero would give NaN
_DIMENSIONS = torch.quasirandom.SobolEngine.MAXDIM
_PIECE = 2**22  # numbers that are processed at once
_LEAST = 256  # quasi-random points


def base_of(p: Distribution) -> Distribution:
    """Return p(y | f) of a single target."""
    return base_distribution(p, MaskedDistribution)


def is_class(p: Distribution) -> bool:
    """Whether targets are classes: one of several, or binary."""
    return isinstance(base_of(p), Categorical | Bernoulli)


def is_normal(p: Distribution) -> bool:
    """Whether targets have Gaussian noise."""
    return keeps_density(base_of(p), Normal)


def moments_of(p: Distribution) -> Sums:
    """Return the moments of each target under a distribution: "mean" and "noise", its variance, in float64.

    For classes also "surprise", the entropy, and "votes", the most probable one, as indicators.
    """
    base = base_of(p)
    if isinstance(base, Categorical):  # the mean of its targets is that of their indicators
        means, best = base.probs.to(F64), base.logits.argmax(-1, keepdim=True)
        votes = best == torch.arange(base.logits.shape[-1], device=best.device)
        return {"mean": means, "noise": means * (1 - means), "surprise": base.entropy().to(F64), "votes": votes}
    # In small or large units, float32 can hold a standard deviation, but not its square.
    noise = base.scale.to(F64).square() if isinstance(base, Normal) else p.variance.to(F64)
    found = {"mean": p.mean.to(F64), "noise": noise}
    if isinstance(base, Bernoulli):
        found |= {"surprise": base.entropy().to(F64), "votes": base.logits > 0}
    return found


def indicator_covariance(probs: Tensor) -> Tensor:
    """Return the covariance of the indicators of classes, of which one is 1: (..., C, C) from (..., C)."""
    return torch.diag_embed(probs) - probs.unsqueeze(-1) * probs.unsqueeze(-2)


def normal_parts(p: Distribution) -> tuple[Tensor, Tensor]:
    """Return the means and standard deviations of a distribution of normals, in float64."""
    base = base_of(p)
    return base.loc.to(F64), base.scale.to(F64).clamp_min(_THINNEST)


def block_sums(likelihood: Likelihood, f: Tensor) -> Sums:
    """Reduce a block of draws, f (T, N, D), to sums for each data point.

    "mean" is that of E[y], "spread" the sum of its squared distances from the mean, "noise" that of Var[y]; of classes
    "surprise" is the sum of the draws' own entropies, and "votes" how many draws vote for each class.
    """
    each = moments_of(likelihood.distribution(f))
    means = each.pop("mean")
    middle = means.mean(0)
    sums = {"mean": middle, "spread": (means - middle).square().sum(0)}
    return sums | {name: value.sum(0) for name, value in each.items()}


def block_log_prob(p: Distribution, y: Tensor) -> Tensor:
    """Return logsumexp_t log p(y | f_t) of a block of draws with p(y | f), (N,)."""
    return torch.logsumexp(p.log_prob(y).to(F64), 0)


def block_outer(p: Distribution, mean: Tensor) -> Tensor:
    """Return Σ_t (E[y | f_t] - mean)(E[y | f_t] - mean)ᵀ of a block of draws with p(y | f), (N, D, D).

    With the covariances of the noise between the targets of a point, where p(y | f) has them; without its variances.
    """
    apart = p.mean.to(F64) - mean
    found = torch.einsum("t...i,t...j->...ij", apart, apart)
    base = base_of(p)
    if not base.event_shape:
        return found
    if not hasattr(base, "covariance_matrix"):
        raise NotAvailableError(
            f"the targets of a point depend on each other, and {type(base).__name__} has no covariance_matrix that says"
            " how. Draw targets from likelihood.distribution(answer.samples), and take torch.cov of those of a point."
        )
    noise: Tensor = base.covariance_matrix.to(F64)
    variance = variance_of(noise)
    scale = (p.variance.to(F64) / variance).sqrt()  # of a Student t, Pyro's matrix is not the covariance
    noise = (noise - torch.diag_embed(variance)) * scale.unsqueeze(-1) * scale.unsqueeze(-2)
    return found + noise.sum(0)


class Running:
    """The sums of all draws so far, for ``points`` data points; their number is unused if all are added together."""

    def __init__(self, points: int) -> None:
        self.points = points
        self.sums: Sums = {}

    def add(self, seen: int, count: int, points: Points, block: Sums) -> None:
        """Add a block of ``count`` draws for some points, which already have ``seen`` draws."""
        if not self.sums:
            sizes = {k: v.shape if points is ... else (self.points, *v.shape[1:]) for k, v in block.items()}
            whole = {torch.bool: torch.int64}  # votes are counted
            self.sums = {k: v.new_zeros(sizes[k], dtype=whole.get(v.dtype, v.dtype)) for k, v in block.items()}
        own = {name: value[points] for name, value in self.sums.items()}
        # Chan, Golub and LeVeque (1983): two sets of draws, each with its own mean
        step = block["mean"] - own["mean"]
        own["mean"] += step * (count / (seen + count))
        own["spread"] += block["spread"] + step.square() * (seen * count / (seen + count))
        for name in block.keys() - {"mean", "spread"}:
            own[name] += block[name]


# --- Gaussian outputs -------------------------------------------------------------------------------------------------


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
    made: type[Outputs] = likelihood.gaussian_outputs if "gaussian_outputs" in said_of(likelihood) else Outputs  # type: ignore[attr-defined]
    return made(likelihood, nodes)


def said_of(likelihood: object) -> set[str]:
    """Return what a class says of its ``distribution``: what bases above say, they say of another distribution."""
    kinds = type(likelihood).__mro__
    place = next((k for k, kind in enumerate(kinds) if "distribution" in vars(kind)), 0)
    return {name for kind in kinds[: place + 1] for name in vars(kind)}


def is_one_of(likelihood: object, *kinds: type[Kind]) -> TypeGuard[Kind]:
    """Whether p(y | f) is that of one of these classes: a class below with its own ``distribution`` has another."""
    own = getattr(type(likelihood), "distribution", None)
    return any(isinstance(likelihood, kind) and own is vars(kind)["distribution"] for kind in kinds)


def variance_of(covariance: Tensor) -> Tensor:
    """Return the diagonals of covariances, (..., D)."""
    return covariance.diagonal(dim1=-2, dim2=-1)
