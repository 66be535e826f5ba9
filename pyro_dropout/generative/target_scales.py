"""Targets on a scale of their own: positive numbers by their logarithm, proportions by their log-odds, and counts.

p(y | f) is the density of y itself: it has the Jacobian of the scale, so that log-likelihoods of models of y, log y and
logit y can be compared.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from pyro_dropout.generative.likelihood import Likelihood, checked_numbers
from pyro_dropout.generative.likelihoods import Gaussian, HeteroscedasticGaussian
from pyro_dropout.generative.registration import buffered
from pyro_dropout.mathematics.checks import check_choice, check_flag, check_positive, describe
from pyro_dropout.mathematics.errors import PyroDropoutError, RangeError, ShapeError
from pyro_dropout.mathematics.negative_binomial import NegativeBinomial
from pyro_dropout.mathematics.normal import LogitNormal, LogNormal
from pyro_dropout.mathematics.shapes import base_distribution
from pyro_dropout.protocols import Distribution

Link = Literal["log", "logit"]


class Transformed(Likelihood):
    """Targets whose logarithm or log-odds have Gaussian noise: log y ~ N(f, τ⁻¹), or logit y ~ N(f, τ⁻¹).

    Predictions are of y: intervals of positive targets are positive, and ``log_prob`` is the log density of y.
    ``Standardised`` shifts and scales log y or logit y.

    Args:
        likelihood: of log y or logit y; a ``Gaussian`` or a ``HeteroscedasticGaussian``.
        link: "log" for positive numbers, "logit" for proportions between 0 and 1, both without their ends.

    Example:
        >>> import torch, pyro_dropout as pd
        >>> price = pd.Transformed(pd.Gaussian(tau=4.0), "log")
        >>> p = price.distribution(torch.tensor([[12.0]]))
        >>> p.log_prob(torch.tensor([[150_000.0]])).item()  # log N(log y; 12, 1/4) - log y
        -12.157...
    """

    def __init__(self, likelihood: Gaussian | HeteroscedasticGaussian, link: Link) -> None:
        super().__init__()
        if not isinstance(likelihood, Gaussian | HeteroscedasticGaussian) or likelihood.shape is not None:
            raise PyroDropoutError(
                f"likelihood must be a Gaussian or a HeteroscedasticGaussian without dims; got {describe(likelihood)}."
            )
        check_choice("link", link, ("log", "logit"))
        self.likelihood, self.link = likelihood, link

    def distribution(self, f: Tensor) -> Distribution:
        """Return p(y | f), log-normal or logit-normal."""
        normal = base_distribution(self.likelihood.distribution(f))
        made = LogNormal if self.link == "log" else LogitNormal
        return made(normal.loc, normal.scale).to_event(1)

    def checked(self, f: Tensor, y: Tensor) -> Tensor:
        """Return ``y`` if it holds numbers, as many as there are means in ``f``."""
        return self.likelihood.checked(f, y)

    def check_values(self, f: Tensor, y: Tensor) -> None:
        """Raise unless every target has a finite logarithm, or finite log-odds."""
        if self.link == "log" and not bool(((y > 0) & torch.isfinite(y)).all()):
            raise RangeError(f"y must be positive to have a logarithm; got {describe(y)}. Model y itself, or counts.")
        if self.link == "logit" and not bool(((y > 0) & (y < 1)).all()):
            raise RangeError(
                f"y must lie between 0 and 1, both excluded, to have log-odds; got {describe(y)}. Model y itself."
            )

    def free(self, y: Tensor) -> Tensor:
        """Return log y or logit y, which may be any number."""
        return y.log() if self.link == "log" else torch.logit(y)

    def bound(self, z: Tensor) -> Tensor:
        """Return the y of log y or logit y."""
        return z.exp() if self.link == "log" else torch.sigmoid(z)

    def curvature_root(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        """Return that of the likelihood of log y or logit y: the scale of y does not change what y says about f."""
        return self.likelihood.curvature_root(f, None if y is None else self.free(y))

    def standardised_targets(self) -> bool:
        """Yes: means and precisions are those of the standardised log y or logit y."""
        return True

    def raw_outputs(self, f: Tensor, mean: Tensor, std: Tensor) -> Tensor:
        """Return outputs that speak of log y or logit y as it is."""
        return self.likelihood.raw_outputs(f, mean, std)

    def raw_likelihood(self, std: Tensor) -> Likelihood:
        """Return the likelihood of y for these outputs."""
        inner = self.likelihood.raw_likelihood(std)
        assert isinstance(inner, Gaussian | HeteroscedasticGaussian)
        return Transformed(inner, self.link)


class Counts(Likelihood):
    """Counts that spread more than Poisson's: negative binomial with mean μ = exp(offset + f) and variance μ + μ²/r.

    Args:
        concentration: r; the larger, the closer to Poisson.
        learn: whether r is a parameter, trained together with the guide.
        by_input: whether r depends on the input: the network then gives D log means and D logs of r/concentration.
        offset: added to the outputs, such as the log of the mean count, so that the outputs are of size one.

    Example:
        >>> import torch, pyro_dropout as pd
        >>> p = pd.Counts(concentration=2.0).distribution(torch.zeros(1, 1))
        >>> p.mean.item(), p.variance.item()
        (1.0, 1.5)
    """

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
        return super().checked(self._split(f)[0], checked_numbers(y)).to(f.dtype)

    def check_values(self, f: Tensor, y: Tensor) -> None:
        """Raise unless every target is a count."""
        if not bool(((y >= 0) & (y == y.floor()) & torch.isfinite(y)).all()):
            raise RangeError(f"y must hold counts, whole numbers from 0; got {describe(y)}.")

    def curvature_root(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        """Return diag √(μ r/(μ + r)); a concentration that depends on the input has no closed form."""
        if self.by_input:
            raise PyroDropoutError("Counts(by_input=True) has no curvature in closed form; use by_input=False.")
        means, log_r = self._split(f)
        return torch.diag_embed(torch.exp(0.5 * -torch.logaddexp(-(means + self.offset.to(f)), -log_r)))

    def standardised_targets(self) -> bool:
        """No: counts stay as they are."""
        return False
