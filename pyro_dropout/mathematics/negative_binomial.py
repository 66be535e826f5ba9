"""Counts that spread more than Poisson's: the negative binomial distribution by its mean, and its tails.

With mean μ and concentration r the variance is μ + μ²/r. P(Y ≤ k) = I_p(r, k + 1) with p = r/(r + μ), where I is the
regularised incomplete beta function, which torch lacks.
"""

import math
from typing import ClassVar

import pyro.distributions as dist
import torch
from torch import Size, Tensor
from torch.distributions import constraints
from torch.nn.functional import softplus

_F64 = torch.float64
_FAR = 80.0  # minus the log of the smallest r: float32 has numbers down to exp(-88)
_MANY = 32.0  # r from which Stirling's series has all digits
_MOST = 1e18  # the largest rate: torch draws whole numbers of 64 bits
_TERMS = 2000  # of the continued fraction; about √(a + b) of them are needed


class NegativeBinomial(dist.TorchDistribution):
    """Counts with mean exp(log_mean) and variance μ + μ²/r, r = exp(log_concentration).

    Example:
        >>> import torch
        >>> p = NegativeBinomial(torch.tensor(3.0).log(), torch.tensor(2.0).log())
        >>> p.mean.item(), p.variance.item()
        (3.0..., 7.5...)
        >>> below, above = p.log_tails(torch.tensor(3.0))
        >>> torch.allclose(below.exp() + above.exp() - p.log_prob(torch.tensor(3.0)).exp(), torch.ones((), dtype=_F64))
        True
    """

    arg_constraints: ClassVar = {"log_mean": constraints.real, "log_concentration": constraints.real}
    support = constraints.nonnegative_integer

    def __init__(self, log_mean: Tensor, log_concentration: Tensor, validate_args: bool | None = False) -> None:
        self.log_mean, self.log_concentration = torch.broadcast_tensors(log_mean, log_concentration)
        super().__init__(self.log_mean.shape, validate_args=validate_args)

    def expand(self, batch_shape: Size | list[int] | tuple[int, ...], _instance: object = None) -> "NegativeBinomial":
        """Return the same distribution in larger plates."""
        return NegativeBinomial(self.log_mean.expand(batch_shape), self.log_concentration.expand(batch_shape))

    @property
    def mean(self) -> Tensor:
        """μ."""
        return torch.exp(self.log_mean)

    @property
    def variance(self) -> Tensor:
        """μ + μ²/r."""
        return self.mean + torch.exp(2 * self.log_mean - self.log_concentration)

    def _bounded(self) -> Tensor:
        """Return log r up to 1/ε²: from there on all counts that a type holds, up to 1/ε, are Poisson's to rounding.

        Slopes are of size r, and the moments of an optimiser hold their squares.
        """
        far = -2 * math.log(torch.finfo(self.log_concentration.dtype).eps)
        found: Tensor = self.log_concentration.clamp(-_FAR, far)
        return found

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log probability of counts."""
        log_r = self._bounded()
        r, spread = log_r.exp(), softplus(self.log_mean - log_r)  # log(1 + μ/r)
        few, many = r.clamp(max=_MANY), r.clamp(min=_MANY)
        # log Γ(y + r)/Γ(r) - y log r. For large r both Γ are huge: Stirling's series is subtracted term by term.
        direct = torch.lgamma(value + few) - torch.lgamma(few) - value * few.log()
        ratio = torch.log1p(value / many)
        stirling = many * ratio - value + (value - 0.5) * ratio + _stirling(value + many) - _stirling(many)
        ways = torch.where(r < _MANY, direct, stirling) - torch.lgamma(value + 1)
        found: Tensor = ways - r * spread + value * (self.log_mean - spread)
        return found

    def sample(self, sample_shape: Size | list[int] | tuple[int, ...] = Size()) -> Tensor:  # noqa: B008
        """Draw counts: Poisson's, with rates that are drawn from a gamma distribution."""
        shape = self._extended_shape(Size(sample_shape))
        with torch.no_grad():
            log_r = self._bounded()
            r = log_r.exp().expand(shape)
            # As logs, and U^(1/r) times a draw for r + 1: for small r a draw is smaller than any number.
            drawn = torch._standard_gamma(r + 1).log() + torch.rand_like(r).log() / r
            rate: Tensor = torch.exp(drawn + self.log_mean - log_r)
            return torch.poisson(rate.clamp(max=_MOST))

    def log_tails(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return log P(Y ≤ value) and log P(Y ≥ value), in float64."""
        # Beyond, the tails are Poisson's, and the difference of two log Γ has no digits.
        r, log_mean = self.log_concentration.to(_F64).clamp(-_FAR, 20.0).exp(), self.log_mean.to(_F64)
        log_p = -torch.nn.functional.softplus(log_mean - r.log())
        log_q = -torch.nn.functional.softplus(r.log() - log_mean)
        most, least = value.to(_F64).floor(), value.to(_F64).ceil()
        below = log_incomplete_beta(r, most.clamp_min(0) + 1, log_p, log_q)[0]
        above = log_incomplete_beta(r, least.clamp_min(1), log_p, log_q)[1]
        return torch.where(most < 0, -math.inf, below), torch.where(least < 1, 0.0, above)


def _stirling(z: Tensor) -> Tensor:
    """Return log Γ(z) - (z - ½) log z + z - ½ log 2π, for z from 32; the next term is below 1e-14."""
    inverse = 1 / z
    square = inverse * inverse
    return inverse * (1 / 12 - square * (1 / 360 - square * (1 / 1260 - square / 1680)))


def log_incomplete_beta(a: Tensor, b: Tensor, log_x: Tensor, log_y: Tensor) -> tuple[Tensor, Tensor]:
    """Return log I_x(a, b) and log(1 - I_x(a, b)) with y = 1 - x, by a continued fraction (Lentz's method), in float64.

    Example:
        >>> import torch
        >>> x = torch.tensor(0.3, dtype=torch.float64)
        >>> one, two = torch.tensor(1.0), torch.tensor(2.0)
        >>> round(log_incomplete_beta(one, two, x.log(), (1 - x).log())[0].exp().item(), 6)  # 1 - (1 - x)²
        0.51
    """
    a, b, log_x, log_y = torch.broadcast_tensors(*(each.to(_F64) for each in (a, b, log_x, log_y)))
    swapped = log_x.exp() > (a + 1) / (a + b + 2)  # where the fraction of the other tail converges sooner
    a, b = torch.where(swapped, b, a), torch.where(swapped, a, b)
    log_x, log_y = torch.where(swapped, log_y, log_x), torch.where(swapped, log_x, log_y)
    front = torch.lgamma(a + b) - torch.lgamma(a) - torch.lgamma(b) + a * log_x + b * log_y - a.log()
    small = front + _log_fraction(a, b, log_x.exp())
    rest = torch.log(-torch.expm1(small.clamp_max(0)))
    return torch.where(swapped, rest, small), torch.where(swapped, small, rest)


def _log_fraction(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    """Return the log of the continued fraction of I_x(a, b), by the modified Lentz method of Numerical Recipes."""
    tiny = 1e-300

    def away(value: Tensor) -> Tensor:
        return torch.where(value.abs() < tiny, tiny, value)

    c, d = torch.ones_like(x), 1 / away(1 - (a + b) * x / (a + 1))
    found = d
    for m in range(1, _TERMS):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        d, c = 1 / away(1 + even * d), away(1 + even / c)
        found = found * d * c
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        d, c = 1 / away(1 + odd * d), away(1 + odd / c)
        found = found * d * c
        if bool(((d * c - 1).abs() < 1e-14).all()):
            break
    return found.log()
