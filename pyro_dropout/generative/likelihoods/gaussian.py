"""Gaussian noise of one precision: y ~ N(f, τ⁻¹ I)."""

import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal

from pyro_dropout.errors import ShapeError, warn_caller
from pyro_dropout.generative.likelihoods.likelihood import Likelihood
from pyro_dropout.generative.likelihoods.moments import F64, Outputs, Sums, moments_of, variance_of
from pyro_dropout.generative.registration import buffered
from pyro_dropout.mathematics.checks import check_flag, check_positive
from pyro_dropout.mathematics.normal import Normal
from pyro_dropout.protocols import Distribution
from pyro_dropout.registry import likelihood

_FEW = 10  # points, of which numbers may be 0 and 1 by chance


class _GivenNoise(Outputs):
    """Gaussian noise of a given precision: y is Gaussian too."""

    normal = jointly_normal = True

    def _noise(self, mean: Tensor) -> Tensor:
        return moments_of(self.likelihood.distribution(mean))["noise"]

    def moments(self, mean: Tensor, covariance: Tensor) -> Sums:
        return {"mean": mean.to(F64), "spread": variance_of(covariance), "noise": self._noise(mean)}

    def log_prob(self, mean: Tensor, covariance: Tensor, y: Tensor) -> Tensor:
        total = covariance + torch.diag_embed(self._noise(mean))
        found: Tensor = MultivariateNormal(mean.to(F64), total, validate_args=False).log_prob(y.to(F64))
        return found

    def products(self, mean: Tensor, covariance: Tensor) -> Tensor:
        return covariance

    def strata(self, mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
        return mean.to(F64).unsqueeze(0), (variance_of(covariance) + self._noise(mean)).sqrt().unsqueeze(0)


@likelihood("gaussian")
class Gaussian(Likelihood):
    """Targets with Gaussian noise of precision τ: y ~ N(f, τ⁻¹ I).

    Args:
        tau: observation precision; on standardised targets, that of the standardised target.
        learn: whether τ is a parameter, trained together with the guide.

    Example:
        >>> import pyro_dropout as pdrop
        >>> pdrop.Gaussian(tau=0.25).tau.item()
        0.25
    """

    assumed = False  # whether a model took it because no likelihood was given
    gaussian_outputs = _GivenNoise

    def __init__(self, tau: float | Tensor = 1.0, learn: bool = False) -> None:
        super().__init__()
        check_positive("tau", tau)
        check_flag("learn", learn)
        log_tau = buffered(tau).log()
        if learn:
            self.log_tau = nn.Parameter(log_tau.to(torch.get_default_dtype()))
        else:
            self.register_buffer("log_tau", log_tau)

    @classmethod
    def of_log(cls, log_tau: Tensor) -> "Gaussian":
        """Return the likelihood with this log τ, which is not looked at: a tracer's tensor will do."""
        made = cls()
        made.register_buffer("log_tau", log_tau)
        return made

    @property
    def tau(self) -> Tensor:
        """The observation precision τ."""
        return self.log_tau.exp()

    def distribution(self, f: Tensor) -> Distribution:
        """Return N(f, τ⁻¹) over the last dimension of ``f``."""
        scale = torch.exp(-0.5 * self.log_tau).to(f)
        try:
            return Normal(f, scale.expand(f.shape)).to_event(1)  # type: ignore[no-untyped-call]
        except RuntimeError:
            allowed = f"one number, or one for each of the model's {f.shape[-1]} outputs"
            raise ShapeError(f"tau must be {allowed}; got shape {tuple(scale.shape)}.") from None

    def check_values(self, f: Tensor, y: Tensor) -> None:
        """Raise unless every target is finite; warn if they look like classes and nobody asked for Gaussian noise."""
        super().check_values(f, y)
        self.warn_of_classes(y)

    def warn_of_classes(self, y: Tensor) -> None:
        """Warn of targets that are 0 or 1, where the model took this likelihood because none was given."""
        if self.assumed and len(y) > _FEW and bool(((y == 0) | (y == 1)).all()) and bool((y != y.flatten()[0]).any()):
            one_hot = y.dim() == 2 and y.shape[1] > 1 and bool((y.sum(1) == 1).all())
            classes = "Categorical(), and y.argmax(1) as targets" if one_hot else "Bernoulli()"
            warn_caller(
                "y holds nothing but 0 and 1, and the likelihood is Gaussian because none was given. For classes give"
                f" the model likelihood={classes}; if these are numbers, likelihood=Gaussian(tau).",
            )

    def curvature_root(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        """Return diag √τ."""
        return torch.diag_embed(self.distribution(f).stddev.reciprocal())

    def standardised_targets(self) -> bool:
        """Yes: τ is the precision of standardised targets."""
        return True

    def raw_outputs(self, f: Tensor, mean: Tensor, std: Tensor) -> Tensor:
        """Return f·σ_y + mean."""
        return f * std + mean

    def raw_likelihood(self, std: Tensor) -> Likelihood:
        """Return the likelihood of precision τ/σ_y²."""
        log_tau = self.log_tau.detach().to(torch.float64)
        raw = Gaussian.of_log(log_tau - 2 * std.to(log_tau).log())
        raw.assumed = self.assumed
        return raw
