"""The normal distribution that models and guides use, and numbers whose logarithm or log-odds are normal."""

import math
from collections.abc import Sequence
from typing import ClassVar, Self

import pyro.distributions as dist
import torch
from torch import Size, Tensor
from torch.distributions import constraints
from torch.distributions.transforms import ExpTransform, SigmoidTransform, Transform

from pyro_dropout.mathematics.gaussian_expectations import sigmoid_moments

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
