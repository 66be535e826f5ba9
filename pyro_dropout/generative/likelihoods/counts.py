"""Counts: Poisson's, and those that spread more than Poisson's."""

import pyro.distributions as dist
import torch
from torch import Tensor, nn

from pyro_dropout.errors import PyroDropoutError, RangeError, ShapeError
from pyro_dropout.generative.likelihoods.likelihood import Likelihood, stays
from pyro_dropout.generative.likelihoods.moments import F64, Outputs, Sums, variance_of
from pyro_dropout.generative.registration import buffered
from pyro_dropout.mathematics.checks import check_flag, check_positive, describe
from pyro_dropout.mathematics.negative_binomial import NegativeBinomial
from pyro_dropout.protocols import Distribution
from pyro_dropout.registry import likelihood


def _check_counts(self: Likelihood, f: Tensor, y: Tensor) -> None:
    """Raise unless every target is a count."""
    if not bool(((y >= 0) & (y == y.floor()) & torch.isfinite(y)).all()):
        raise RangeError(f"y must hold counts, whole numbers from 0; got {describe(y)}.")


class _Rates(Outputs):
    """Counts by Poisson, whose rate is log-normal."""

    def moments(self, mean: Tensor, covariance: Tensor) -> Sums:
        variance = variance_of(covariance)
        rate = torch.exp(mean.to(F64) + 0.5 * variance)
        return {"mean": rate, "spread": rate.square() * torch.expm1(variance), "noise": rate}


@likelihood("poisson")
class Poisson(Likelihood):
    """Counts with rate exp(f); ``y`` is (N, D).

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> pdrop.Poisson().distribution(torch.zeros(2, 1)).mean.tolist()
        [[1.0], [1.0]]
    """

    gaussian_outputs, standardised_targets, check_values = _Rates, stays, _check_counts

    def distribution(self, f: Tensor) -> Distribution:
        """Return independent Poisson counts with log rate ``f``."""
        return dist.Poisson(torch.exp(f), validate_args=False).to_event(1)

    def checked(self, f: Tensor, y: Tensor) -> Tensor:
        """Return ``y`` as numbers of the model's type."""
        return super().checked(f, y).to(f.dtype)

    def curvature_root(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        """Return diag √rate."""
        return torch.diag_embed(torch.exp(0.5 * f))


@likelihood("counts")
class Counts(Likelihood):
    """Counts that spread more than Poisson's: negative binomial with mean μ = exp(offset + f) and variance μ + μ²/r.

    Args:
        concentration: r; the larger, the closer to Poisson.
        learn: whether r is a parameter, trained together with the guide.
        by_input: whether r depends on the input: the network then gives D log means and D logs of r/concentration.
        offset: added to the outputs, such as the log of the mean count, so that the outputs are of size one.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> p = pdrop.Counts(concentration=2.0).distribution(torch.zeros(1, 1))
        >>> p.mean.item(), p.variance.item()
        (1.0, 1.5)
    """

    standardised_targets, check_values = stays, _check_counts
    offset: Tensor

    def __init__(
        self,
        concentration: float | Tensor = 10.0,
        learn: bool = False,
        by_input: bool = False,
        offset: float | Tensor = 0.0,
    ) -> None:
        super().__init__()
        check_positive("concentration", concentration)
        check_flag("learn", learn)
        check_flag("by_input", by_input)
        self.by_input = by_input
        self.register_buffer("offset", buffered(offset))
        log_concentration = buffered(concentration).log()
        if learn:
            self.log_concentration = nn.Parameter(log_concentration.to(torch.get_default_dtype()))
        else:
            self.register_buffer("log_concentration", log_concentration)

    def _split(self, f: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log means without offset, and the logs of r, (..., N, D)."""
        log_r = self.log_concentration.to(f)
        if not self.by_input:
            return f, log_r.expand(f.shape)
        if f.shape[-1] % 2:
            raise ShapeError(f"the model must have 2·D outputs, log means and concentrations; got {f.shape[-1]}.")
        means, logs = f.chunk(2, dim=-1)
        return means, logs + log_r

    def distribution(self, f: Tensor) -> Distribution:
        """Return independent counts."""
        means, log_r = self._split(f)
        return NegativeBinomial(means + self.offset.to(f), log_r).to_event(1)  # type: ignore[no-untyped-call]

    def checked(self, f: Tensor, y: Tensor) -> Tensor:
        """Return ``y`` as numbers of the model's type."""
        return super().checked(self._split(f)[0], y).to(f.dtype)

    def curvature_root(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        """Return diag √(μ r/(μ + r)); a concentration that depends on the input has no closed form."""
        if self.by_input:
            raise PyroDropoutError("Counts(by_input=True) has no curvature in closed form; use by_input=False.")
        means, log_r = self._split(f)
        return torch.diag_embed(torch.exp(0.5 * -torch.logaddexp(-(means + self.offset.to(f)), -log_r)))
