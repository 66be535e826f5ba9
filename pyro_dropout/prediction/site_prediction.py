"""A prediction of one site of a Pyro model: the mixture of the site's distributions over draws.

A network gives outputs, and a likelihood gives their meaning. Any other Pyro model gives a site's distribution at each
draw of its latent sites, and these are kept: one distribution for each draw. Results have the shape of the site: its
points, as its plates lay them out, and then the numbers of one point.
"""

import functools
import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributions.transforms import Transform

from pyro_dropout.mathematics.checks import check_dense, check_level, describe
from pyro_dropout.mathematics.errors import PyroDropoutError, RangeError, ShapeError
from pyro_dropout.prediction.moments import F64, Points, Sums, base_of, indicator_covariance, is_class, is_normal
from pyro_dropout.prediction.prediction import Prediction
from pyro_dropout.prediction.tails import log_tails
from pyro_dropout.protocols import Distribution


class SitePrediction(Prediction):
    """The prediction of a Pyro model and its posterior for one site; made by ``predict``, with all of ``Prediction``.

    Args:
        site: the site's name.
        kind: its distribution at some draw.
        sums: over all draws, for each element of the site.
        count: how many draws.
        parts: the site's distribution at each draw, if kept.
        samples: a value of the site drawn with each draw, (T, ...), if kept.

    Attributes:
        site: the site's name.
        deterministic: the predictions of the model's ``pyro.deterministic`` sites, by name; also ``answer[name]``.

    Example:
        >>> import pyro, torch, pyro.distributions as dist, pyro_dropout as pd
        >>> def model(x, y=None):
        ...     slope, sigma = pyro.sample("slope", dist.Normal(0.0, 1.0)), pyro.sample("sigma", dist.HalfNormal(1.0))
        ...     with pyro.plate("data", len(x)):
        ...         pyro.sample("obs", dist.Normal(slope * x, sigma), obs=y)
        >>> x = torch.linspace(-1, 1, 5)
        >>> guide = pyro.infer.autoguide.AutoNormal(model)
        >>> _ = pd.fit(model, guide, x, 2 * x, steps=10, compile=False, progress=False)
        >>> answer = pd.predict(model, guide, x, samples=100, seed=0)
        >>> answer
        SitePrediction('obs', shape (5,), 100 draws, Normal, samples kept)
        >>> answer.mean.shape, answer.log_prob(2 * x).shape, answer.interval(0.9)[0].shape
        (torch.Size([5]), torch.Size([5]), torch.Size([5]))
    """

    _likelihood: Distribution

    def __init__(
        self,
        site: str,
        kind: Distribution,
        sums: Sums,
        count: int,
        parts: list[Distribution] | None,
        samples: Tensor | None,
    ) -> None:
        tensors = (value for value in vars(base_of(kind)).values() if isinstance(value, Tensor))
        floating = next((value for value in tensors if value.is_floating_point()), torch.zeros(()))
        super().__init__(kind, sums, count, floating.new_zeros(()), samples, None)
        self.site, self._each = site, parts
        self.deterministic: dict[str, SitePrediction] = {}

    def __getitem__(self, name: str) -> "SitePrediction":
        """Return the prediction of the site itself, or of a deterministic site beside it."""
        found = {self.site: self, **self.deterministic}
        if name not in found:
            raise KeyError(f"{name!r} is not a predicted site; there are {', '.join(found)}")
        return found[name]

    def __repr__(self) -> str:
        kept = "samples kept" if self._samples is not None else "samples not kept"
        shape = tuple(self._likelihood.shape())
        return f"SitePrediction({self.site!r}, shape {shape}, {self._count} draws, {self.family}, {kept})"

    @property
    def family(self) -> str:
        """The name of the site's distribution, for messages."""
        return type(self.target_distribution).__name__

    @property
    def target_distribution(self) -> Distribution:
        """p(y | w), without the dimensions of its event."""
        return base_of(self._likelihood)

    @property
    def parts(self) -> list[Distribution]:
        """The site's distribution at each draw, T of them."""
        if self._each is None:
            raise PyroDropoutError("the draws were not kept; call predict(..., keep_samples=True).")
        return self._each

    def _covariance(self) -> Tensor:
        """Cov between the numbers of a point, (..., D, D): E[yyᵀ] - E[y]E[y]ᵀ; (..., 1, 1) if there is only one."""
        kind = self._likelihood
        if self.one_of_several and kind.event_dim == 0:
            return indicator_covariance(self._sums["mean"])
        if kind.event_dim == 0:
            return self._variance[..., None, None]
        if kind.event_dim > 1 or self.one_of_several:
            raise PyroDropoutError(
                f"covariance is for sites whose points are numbers or vectors; {self.site!r} has {tuple(kind.shape())}."
            )
        found = torch.zeros_like(torch.diag_embed(self._sums["mean"]))
        for p in self.parts:
            apart = p.mean.to(F64) - self._sums["mean"]
            noise = getattr(p, "covariance_matrix", None)
            found += torch.diag_embed(p.variance.to(F64)) if noise is None else noise.to(F64)
            found += apart.unsqueeze(-1) * apart.unsqueeze(-2)
        return found / self._count

    def log_prob(self, y: Tensor) -> Tensor:
        """Return log p(y) ≈ logsumexp_t log p(y | w_t) - log T of each point of the site."""
        y = self.checked_targets(y)
        found: Tensor = functools.reduce(torch.logaddexp, (p.log_prob(y).to(F64) for p in self.parts))
        return (found - math.log(self._count)).to(self._like)

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Return the ends of the central interval that holds each element of the site with probability ``level``.

        With normal noise they are quantiles of the mixture of normals, and otherwise those of the samples.
        """
        if is_normal(self.target_distribution):
            return super().interval(level)
        check_level("level", level)
        if is_class(self.target_distribution):
            raise PyroDropoutError(f"interval() is for numbers, but site {self.site!r} is of {self.family}; use probs.")
        drawn = self.samples.to(F64).sort(0).values
        low, high = (_between(drawn, tail).to(self._like) for tail in ((1 - level) / 2, (1 + level) / 2))
        return low, high

    # --- the interface for scores -------------------------------------------------------------------------------------

    def distribution_at(self, points: Points) -> Distribution:
        """Return the normal distributions of all draws as one distribution, (T, ...)."""
        bases = [base_of(p) for p in self.parts]
        loc, scale = (torch.stack([getattr(p, name) for p in bases]) for name in ("loc", "scale"))
        return torch.distributions.Normal(loc, scale, validate_args=False)

    def tails_at(self, points: Points, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return log P(Y ≤ y) and log P(Y ≥ y) with each draw, (T, ...)."""
        below, above = zip(*(log_tails(p, y) for p in self.parts), strict=True)
        return torch.stack(below), torch.stack(above)

    def normals_at(self, points: Points) -> tuple[Tensor, Tensor, Transform] | None:
        """Return the means and standard deviations of all draws if the site is normal."""
        return super().normals_at(points) if is_normal(self.target_distribution) else None

    def counts_at(self, points: Points) -> None:
        """Return None: a site's counts are not stacked."""

    def draw_targets(self, points: Points) -> Tensor:
        """Return a y drawn with each draw; all points are one piece."""
        return self.samples

    def pieces(self) -> Iterator[Points]:
        """Yield all points in one piece."""
        yield ...

    def per_point(self, each: Tensor) -> Tensor:
        """Return values of single numbers, added up for each point."""
        dims = list(range(-self._likelihood.event_dim, 0))
        return each.sum(dims) if dims else each

    def checked_targets(self, y: Tensor) -> Tensor:
        """Return ``y`` as the site's distribution expects it; raise if it is not valid."""
        if not isinstance(y, Tensor):
            raise ShapeError(f"y must be a tensor; got {type(y).__name__} {y!r}.")
        check_dense("y", y)
        wanted = tuple(self._likelihood.shape())
        if tuple(y.shape) != wanted:
            raise ShapeError(f"y must have the shape of site {self.site!r}, {wanted}; got {tuple(y.shape)}.")
        y = y.to(self._like.device)
        y = y.long() if self.one_of_several else y.to(self._like.dtype)
        try:
            inside = self._likelihood.support.check(y)
        except NotImplementedError:  # a distribution without a support
            return y
        if not bool(inside.all()):
            raise RangeError(f"y must lie in the support of site {self.site!r}, {self.family}; got {describe(y)}.")
        return y


def _between(ordered: Tensor, level: float) -> Tensor:
    """Return a quantile of sorted values, (T, ...), by linear interpolation."""
    place = level * (len(ordered) - 1)
    first = min(int(place), max(len(ordered) - 2, 0))
    last = min(first + 1, len(ordered) - 1)
    return ordered[first] + (place - first) * (ordered[last] - ordered[first])
