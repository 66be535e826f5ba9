"""Targets on a scale of their own: positive numbers by their logarithm, proportions by their log-odds.

p(y | f) is the density of y itself: it has the Jacobian of the scale, so that log-likelihoods of models of y, log y and
logit y can be compared.
"""

from typing import Literal

import torch
from torch import Tensor

from pyro_dropout.errors import PyroDropoutError, RangeError
from pyro_dropout.generative.likelihoods.gaussian import Gaussian
from pyro_dropout.generative.likelihoods.heteroscedastic import HeteroscedasticGaussian
from pyro_dropout.generative.likelihoods.likelihood import Likelihood
from pyro_dropout.generative.likelihoods.moments import F64, Outputs, is_one_of, outputs_of
from pyro_dropout.mathematics.checks import check_choice, describe
from pyro_dropout.mathematics.normal import LogitNormal, LogNormal
from pyro_dropout.mathematics.shapes import base_distribution
from pyro_dropout.protocols import Distribution
from pyro_dropout.registry import likelihood as registered

Link = Literal["log", "logit"]


class _OnItsScale(Outputs):
    """Targets whose logarithm or log-odds are those of another likelihood."""

    def log_prob(self, mean: Tensor, covariance: Tensor, y: Tensor) -> Tensor:
        y, inner = y.to(F64), outputs_of(self.likelihood.likelihood, self.nodes)
        steepness = -y.log() if self.likelihood.link == "log" else -y.log() - torch.log1p(-y)
        return inner.log_prob(mean, covariance, self.likelihood.free(y)) + steepness.sum(-1)


@registered("log-normal", make=lambda: Transformed(Gaussian(), "log"))
class Transformed(Likelihood):
    """Targets whose logarithm or log-odds have Gaussian noise: log y ~ N(f, τ⁻¹), or logit y ~ N(f, τ⁻¹).

    Predictions are of y: intervals of positive targets are positive, and ``log_prob`` is the log density of y.
    ``Standardised`` shifts and scales log y or logit y.

    Args:
        likelihood: of log y or logit y; a ``Gaussian`` or a ``HeteroscedasticGaussian``.
        link: "log" for positive numbers, "logit" for proportions between 0 and 1, both without their ends.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> price = pdrop.Transformed(pdrop.Gaussian(tau=4.0), "log")
        >>> p = price.distribution(torch.tensor([[12.0]]))
        >>> p.log_prob(torch.tensor([[150_000.0]])).item()  # log N(log y; 12, 1/4) - log y
        -12.157...
    """

    gaussian_outputs = _OnItsScale

    def __init__(self, likelihood: Gaussian | HeteroscedasticGaussian, link: Link) -> None:
        super().__init__()
        if not is_one_of(likelihood, Gaussian, HeteroscedasticGaussian) or likelihood.shape is not None:
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
