"""The normal distribution of models and guides, numbers whose logarithm or log-odds are normal, and expectations.

Those of smooth functions are by the trapezoid rule in float64, whose error is e^(-2πd/h): h is the step, and d the
distance of the function's nearest pole from the real axis.
"""

import math
from collections.abc import Callable, Sequence
from typing import ClassVar, Self

import pyro.distributions as dist
import torch
from torch import Size, Tensor
from torch.distributions import constraints
from torch.distributions.transforms import ExpTransform, SigmoidTransform, Transform

_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


class Normal(dist.Normal):
    """Pyro's Normal, for units of any size and for draws that are mapped over replicas.

    The log density squares (y - μ)/σ, a number of size one, and not σ: in float32 the square of σ = 1e-27 is zero, and
    that of 1e22 is infinite. Draws are new tensors: torch fills an empty one, which ``vmap`` cannot do for each.
    """

    def rsample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Draw with gradients; the same numbers as torch's, for the same seed."""
        shape = self._extended_shape(Size(sample_shape))
        noise = torch.randn(shape, dtype=self.loc.dtype, device=self.loc.device)
        found: Tensor = self.loc + noise * self.scale
        return found

    def log_prob(self, value: Tensor) -> Tensor:
        """Return log p(value), in the shape that value and parameters broadcast to."""
        if self._validate_args:
            self._validate_sample(value)
        z: Tensor = (value - self.loc) / self.scale
        return -0.5 * z.square() - self.scale.log() - _HALF_LOG_2PI


_F64 = torch.float64
_PIECE = 2**15  # numbers whose moments are integrated at once
_REACH = 10.0  # standard deviations beyond which a normal density is nothing
_BELOW = 45.0  # e^-45 of the largest value is nothing, too
_FARTHEST = 1e6
NODES, _ZOOMS = 513, 6


class _OfNormal(dist.TransformedDistribution):  # type: ignore[misc]
    """y = h(z) with z ~ N(loc, scale²)."""

    arg_constraints: ClassVar = {"loc": constraints.real, "scale": constraints.positive}
    transform: ClassVar[type[Transform]]
    base_dist: Normal

    def __init__(self, loc: Tensor, scale: Tensor, validate_args: bool | None = False) -> None:
        z = Normal(loc, scale, validate_args=False)
        self.loc, self.scale = z.loc, z.scale
        super().__init__(z, [type(self).transform()], validate_args=validate_args)

    def expand(self, batch_shape: Size | list[int] | tuple[int, ...], _instance: object = None) -> Self:
        """Return the same distribution in larger plates."""
        return type(self)(self.loc.expand(batch_shape), self.scale.expand(batch_shape))


class LogNormal(_OfNormal):
    """Positive y with log y ~ N(loc, scale²)."""

    transform, support = ExpTransform, constraints.positive

    @property
    def mean(self) -> Tensor:
        """exp(loc + scale²/2), in float64."""
        return torch.exp(self.loc.to(_F64) + 0.5 * self.scale.to(_F64).square())

    @property
    def variance(self) -> Tensor:
        """The squared mean times exp(scale²) - 1, in float64."""
        return self.mean.square() * torch.expm1(self.scale.to(_F64).square())


class LogitNormal(_OfNormal):
    """Proportions y between 0 and 1 with log y/(1 - y) ~ N(loc, scale²); moments by quadrature."""

    transform, support = SigmoidTransform, constraints.unit_interval

    @property
    def mean(self) -> Tensor:
        """E[y], in float64."""
        return self._moments(0)

    @property
    def variance(self) -> Tensor:
        """Var[y], in float64."""
        return self._moments(1)

    def _moments(self, which: int) -> Tensor:
        flat = zip(self.loc.reshape(-1).split(_PIECE), self.scale.reshape(-1).split(_PIECE), strict=True)
        return torch.cat([sigmoid_moments(*each)[which] for each in flat]).reshape(self.loc.shape)


def sigmoid_moments(mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return E s, Var s, E s(1 - s) and the mean entropy of a coin with the probability s = sigmoid(f), f normal."""
    mean, std = mean.to(_F64), std.to(_F64)
    narrow, wide = _narrow(mean, std.clamp_max(1)), _wide(mean, std.clamp_min(1))
    p, spread, noise, entropy = (torch.where(std < 1, a, b) for a, b in zip(narrow, wide, strict=True))
    return p, spread, noise, entropy


def _narrow(mean: Tensor, std: Tensor) -> tuple[Tensor, ...]:
    """For std up to 1, at nodes of the normal variable."""
    z = torch.linspace(-_REACH, _REACH, 201, dtype=_F64, device=mean.device)
    weights = torch.softmax(-0.5 * z.square(), 0)
    s = torch.sigmoid(mean.unsqueeze(-1) + std.unsqueeze(-1) * z)
    p = s @ weights
    entropy = torch.special.entr(s) + torch.special.entr(1 - s)
    return p, (s - p.unsqueeze(-1)).square() @ weights, (s * (1 - s)) @ weights, entropy @ weights


def _wide(mean: Tensor, std: Tensor) -> tuple[Tensor, ...]:
    """For std from 1 up, at nodes of f: sigmoid(f) is the probability that a logistic variable is less than f."""
    u = torch.linspace(-40, 40, 321, dtype=_F64, device=mean.device)
    step, s = 0.25, torch.sigmoid(u)
    slope = torch.sigmoid(u) * torch.sigmoid(-u)
    z = (mean.unsqueeze(-1) - u) / std.unsqueeze(-1)
    density = torch.exp(-0.5 * z.square()) / (std.unsqueeze(-1) * math.sqrt(2 * math.pi))
    p = torch.special.ndtr(z) @ slope * step
    noise = density @ slope * step
    entropy = density @ (torch.special.entr(s) + torch.special.entr(torch.sigmoid(-u))) * step
    return p, (p * (1 - p) - noise).clamp_min(0), noise, entropy


def log_expectation(log_g: Callable[[Tensor], Tensor], mean: Tensor, std: Tensor) -> Tensor:
    """Return log E g(f) for a normal f and a positive function g, which may be far narrower than the density of f.

    ``log_g`` gives log g at nodes f, (nodes, ...). A grid that reaches a million standard deviations, finest in the
    middle, is narrowed, six times, to where the product of both densities is not negligible.
    """
    mean, std = mean.to(_F64), std.to(_F64)
    t = torch.linspace(-1, 1, NODES, dtype=_F64, device=mean.device).reshape(-1, *[1] * mean.dim())
    z = torch.sinh(math.asinh(_FARTHEST) * t).expand(NODES, *mean.shape)
    for zoom in range(_ZOOMS + 1):
        h = log_g(mean + std * z) - 0.5 * z.square()
        h = torch.where(torch.isfinite(h), h, -torch.inf)  # where g is zero, or too far away to be computed
        if zoom < _ZOOMS:
            large = (h > h.amax(0) - _BELOW).to(torch.uint8)
            first = (large.argmax(0) - 1).clamp_min(0).unsqueeze(0)
            last = (NODES - large.flip(0).argmax(0)).clamp_max(NODES - 1).unsqueeze(0)
            low, high = z.gather(0, first), z.gather(0, last)
            z = low + (high - low) * (t + 1) / 2
    step = (z[1] - z[0]).log()
    found: Tensor = torch.logsumexp(h, 0) + step - 0.5 * math.log(2 * math.pi)
    return found
