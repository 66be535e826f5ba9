"""Counts that spread more than Poisson's: the negative binomial distribution by its mean, and its tails.

With mean μ and concentration r the variance is μ + μ²/r. P(Y ≤ k) = I_p(r, k + 1) with p = r/(r + μ), where I is the
regularised incomplete beta function.
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


class NegativeBinomial(dist.TorchDistribution):
    """Counts with mean exp(log_mean) and variance μ + μ²/r, r = exp(log_concentration)."""

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
        """Return log P(Y ≤ value) and log P(Y ≥ value), in float64; -inf below the smallest number."""
        log_odds = self.log_concentration.to(_F64).clamp(-_FAR, 20.0) - self.log_mean.to(_F64)
        r = self.log_concentration.to(_F64).clamp(-_FAR, 20.0).exp()  # beyond, the tails are Poisson's
        most, least = value.to(_F64).floor(), value.to(_F64).ceil()
        below = _incomplete_beta(r, most.clamp_min(0) + 1, torch.sigmoid(log_odds))
        above = _incomplete_beta(least.clamp_min(1), r, torch.sigmoid(-log_odds))
        return torch.where(most < 0, 0.0, below).log(), torch.where(least < 1, 1.0, above).log()


def _incomplete_beta(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    """Return I_x(a, b), in float64."""
    from scipy.special import betainc

    found = betainc(*(each.detach().cpu().numpy() for each in (a, b, x)))
    return torch.as_tensor(found, dtype=_F64).to(x.device)


def _stirling(z: Tensor) -> Tensor:
    """Return log Γ(z) - (z - ½) log z + z - ½ log 2π, for z from 32; the next term is below 1e-14."""
    inverse = 1 / z
    square = inverse * inverse
    return inverse * (1 / 12 - square * (1 / 360 - square * (1 / 1260 - square / 1680)))
