"""Predictions of new targets by a model and its posterior: moments, densities, intervals, classes.

Var y is the sum of two parts: epistemic, the variance of E[y | f] over the draws, and aleatoric, the mean of
Var[y | f], which is noise. More data reduce the first in the exact posterior; with a fixed ``keep`` they need not.
"""

import functools
import math
from collections.abc import Callable, Iterator
from typing import cast

import torch
from torch import Tensor

from pyro_dropout.errors import NotAvailableError, PyroDropoutError, RangeError, ShapeError
from pyro_dropout.generative.likelihoods.likelihood import OutputShape
from pyro_dropout.generative.likelihoods.moments import (
    F64,
    Points,
    Sums,
    base_of,
    block_log_prob,
    block_outer,
    indicator_covariance,
    is_class,
    moments_of,
)
from pyro_dropout.mathematics.checks import check_dense, check_finite, check_level, check_number, describe
from pyro_dropout.prediction.tails import Tails, is_whole, log_tails, mixed, mixture_ends
from pyro_dropout.protocols import Distribution, Likelihood

_PIECE = 2**22  # numbers of the samples that are processed at once


class Prediction:
    """The prediction of a model and its posterior for the targets at N points; made by ``predict``.

    Targets of classes are indicators: D is then the number of classes, and ``mean`` their probabilities. Variances are
    in float64 where the type of the outputs cannot hold them, as for targets of size 1e-27 or 1e22 in float32.

    Args:
        likelihood: p(y | f), a copy that later training does not change.
        sums: over all draws, for each point.
        count: how many draws.
        like: some of the model's outputs, (1, 1, outputs) or more, for their dtype and device.
        samples: the outputs, if they were kept.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> model = pdrop.BayesianNet(torch.nn.Linear(2, 3), likelihood=pdrop.Categorical())
        >>> answer = pdrop.predict(model, pdrop.AutoDropout(model, keep=0.8), torch.ones(4, 2), samples=100)
        >>> answer
        Prediction(4 points, 100 draws, Categorical, samples kept)
        >>> answer.probs.sum(-1).allclose(torch.ones(4)), answer.mutual_information.shape
        (True, torch.Size([4]))
        >>> torch.allclose(answer.variance, answer.probs * (1 - answer.probs))
        True
    """

    _made_by = "predict"
    members: int | None = None  # of the ensemble that it comes from, if it comes from one

    def __init__(
        self,
        likelihood: Likelihood | Distribution,
        sums: Sums,
        count: int,
        like: Tensor,
        samples: Tensor | None,
    ) -> None:
        self.likelihood, self._sums, self._count, self.like = likelihood, sums, count, like
        self._samples = samples

    def __repr__(self) -> str:
        kept = "samples kept" if self._samples is not None else "samples not kept"
        return f"Prediction({len(self._sums['mean'])} points, {self._count} draws, {self.family}, {kept})"

    @property
    def family(self) -> str:
        """The name of the likelihood, for messages."""
        return type(self.likelihood).__name__

    # --- moments ------------------------------------------------------------------------------------------------------

    @property
    def mean(self) -> Tensor:
        """E[y], (N, D)."""
        return self._sums["mean"].to(self.like)

    @property
    def epistemic(self) -> Tensor:
        """The variance of E[y | f] over the draws, divided by T: that of the mixture that the draws make, (N, D)."""
        return (self._sums["spread"] / self._count).to(self._squares)

    @property
    def error_over_members(self) -> Tensor:
        """How far ``mean`` would still move with other members of the ensemble, (N, D): √(epistemic/M).

        For members that are points it is the standard error of the mean; for members with a spread of their own, at
        most as large as this.
        """
        if self.members is None:
            raise NotAvailableError("error_over_members is for predictions of an Ensemble; this one has no members.")
        if self.members == 1:
            raise NotAvailableError("one member does not say how far others would be; predict with at least two.")
        return (self._sums["spread"] / (self._count * self.members)).sqrt().to(self.like)

    @property
    def aleatoric(self) -> Tensor:
        """The mean of Var[y | f] over the draws, (N, D): 1/τ with Gaussian noise."""
        return (self._sums["noise"] / self._count).to(self._squares)

    @property
    def variance(self) -> Tensor:
        """Var[y], (N, D): epistemic plus aleatoric."""
        return self._variance.to(self._squares)

    @property
    def std(self) -> Tensor:
        """The standard deviation of y, (N, D)."""
        return self._variance.sqrt().to(self.like)

    @property
    def _variance(self) -> Tensor:
        """Var[y], in float64."""
        return (self._sums["spread"] + self._sums["noise"]) / self._count

    @functools.cached_property
    def _squares(self) -> Tensor:
        """A tensor of the type that can hold variances: float64, where that of the outputs cannot hold them all."""
        limits, size = torch.finfo(self.like.dtype), self._variance
        lost = ((size > 0) & (size < limits.tiny)) | ((size > limits.max) & size.isfinite())
        return self.like.double() if bool(lost.any()) else self.like

    @property
    def covariance(self) -> Tensor:
        """Cov[y] between the targets of a point, (N, D, D): E[yyᵀ] - E[y]E[y]ᵀ, noise included (Prop. 4).

        Samples must be kept, except for classes.
        """
        return self._covariance().to(self._squares)

    def _covariance(self) -> Tensor:
        """Cov[y], in float64."""
        mean = self._sums["mean"]
        if self.one_of_several:
            return indicator_covariance(mean)
        if self._target_dims > 1:
            raise PyroDropoutError("covariance is for points with targets in a row, (N, D); this one has maps of them.")
        noise = torch.diag_embed(self._sums["noise"] / self._count)
        spread = self._by_piece(lambda n, mean: block_outer(self.distribution_at(n), mean), mean, noise.shape)
        return noise + spread / self._count

    # --- the whole distribution ---------------------------------------------------------------------------------------

    @property
    def samples(self) -> Tensor:
        """The model's outputs in every draw, (T, N, outputs), before the likelihood."""
        if self._samples is None:
            raise NotAvailableError(f"the samples were not kept; call {self._made_by}(..., keep_samples=True).")
        return self._samples

    def log_prob(self, y: Tensor) -> Tensor:
        """Return log p(y | x) ≈ logsumexp_t log p(y | f_t) - log T of each point, (N,); samples must be kept."""
        y = self.checked_targets(y)
        found = self._by_piece(lambda n, y: block_log_prob(self.distribution_at(n), y), y, y.shape[:1])
        return (found - math.log(self._count)).to(self.like)

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Return the ends, each (N, D), of the central interval that holds y with probability ``level``.

        They are quantiles of the mixture that the draws make, noise included; samples must be kept. Whole numbers are
        held with at least that probability.
        """
        check_level("level", level)
        self.check_kind("interval()", "numbers")
        low, high = self.tail_ends(torch.tensor((1 - level) / 2, dtype=F64).log())
        return low.to(self.like), high.to(self.like)

    def quantile(self, level: float) -> Tensor:
        """Return the least y that is not exceeded with a probability of at least ``level``, (N, D).

        The mixture that the draws make is used, noise included; samples must be kept.

        Example:
            >>> import torch, pyro_dropout as pdrop
            >>> model = pdrop.BayesianNet(torch.nn.Linear(2, 1))
            >>> answer = pdrop.predict(model, pdrop.AutoMeanField(model), torch.zeros(4, 2), method="standard")
            >>> torch.allclose(answer.quantile(0.975), answer.mean + 1.959964 * answer.std)
            True
        """
        check_level("level", level)
        self.check_kind("quantile()", "numbers")
        tail, upper = torch.tensor([level, 1 - level], dtype=F64).log()
        rises = level > 0.5 and not is_whole(self.target_distribution)
        return (self.tail_ends(upper)[1] if rises else self.tail_ends(tail)[0]).to(self.like)

    def probability_above(self, threshold: float | Tensor) -> Tensor:
        """Return P(y > threshold), (N, D), under the mixture that the draws make; samples must be kept.

        Args:
            threshold: one number, or one for each target, (D,), or for each target of each point, (N, D).

        Example:
            >>> import torch, pyro_dropout as pdrop
            >>> model = pdrop.BayesianNet(torch.nn.Linear(2, 1))
            >>> answer = pdrop.predict(model, pdrop.AutoMeanField(model), torch.zeros(4, 2), method="standard")
            >>> answer.probability_above(answer.mean).flatten().tolist()
            [0.5, 0.5, 0.5, 0.5]
        """
        if self.one_of_several:
            self.check_kind("probability_above()", "numbers")
        t = torch.as_tensor(check_number("threshold", threshold), dtype=F64, device=self.like.device)
        shape = self.mean.shape
        check_finite("threshold", t)
        if t.dim() and t.shape not in (shape, shape[1:]):
            raise ShapeError(f"threshold must be a number, {tuple(shape[1:])} or {tuple(shape)}; got {tuple(t.shape)}.")
        t = t.floor() + 1 if is_whole(self.target_distribution) else t  # P(y > 2.5) and P(y > 2) are P(y ≥ 3)
        return self.log_tails(t)[1].exp().to(self.like)

    # --- classes ------------------------------------------------------------------------------------------------------

    @property
    def probs(self) -> Tensor:
        """Probabilities of the classes, (N, C); with a Bernoulli likelihood, those of "yes", (N, D)."""
        self.check_kind("probs", "classes")
        return self.mean

    @property
    def entropy(self) -> Tensor:
        """The entropy of the predicted class in nats, (N,); with a Bernoulli likelihood, of each target, (N, D)."""
        self.check_kind("entropy", "classes")
        return self._entropy().to(self.like)

    @property
    def mutual_information(self) -> Tensor:
        """The mutual information of the class and the weights, in nats: the epistemic part of the entropy."""
        self.check_kind("mutual_information", "classes")
        return (self._entropy() - self._sums["surprise"] / self._count).clamp_min(0).to(self.like)

    @property
    def variation_ratio(self) -> Tensor:
        """The fraction of draws that do not vote for the most common class."""
        self.check_kind("variation_ratio", "classes")
        votes = self._sums["votes"].to(F64) / self._count
        most = votes.amax(-1) if self.one_of_several else torch.maximum(votes, 1 - votes)
        return (1 - most).to(self.like)

    @property
    def one_of_several(self) -> bool:
        """Whether the target is one of several classes, rather than numbers or yes and no."""
        return isinstance(self.target_distribution, torch.distributions.Categorical)

    def _entropy(self) -> Tensor:
        p = self._sums["mean"]
        each: Tensor = torch.special.entr(p)
        return each.sum(-1) if self.one_of_several else each + torch.special.entr(1 - p)

    def undefined(self) -> Tensor:
        """Return at which points the moments are not finite, and should be: the outputs were not, (N,)."""
        mean, noise = self._sums["mean"], self._sums["noise"]
        rows = (~mean.isfinite() | noise.isnan()).reshape(len(mean) if mean.dim() else 1, -1).any(1)
        if not bool(rows.any()):
            return rows
        if self._samples is None:
            return rows & self._has_moments()
        outputs = self._samples.reshape(len(self._samples), len(rows), -1)
        return rows & ~outputs.isfinite().all(-1).all(0)  # finite ones may have moments that are not

    def _has_moments(self) -> bool:
        """Whether the targets have a mean and a variance, at outputs of zero."""
        moments = moments_of(self.likelihood.distribution(torch.zeros_like(self.like)))
        return all(bool(each.isfinite().all()) for each in moments.values())

    # --- checks -------------------------------------------------------------------------------------------------------

    @functools.cached_property
    def target_distribution(self) -> Distribution:
        """p(y | f) at some output, for its kind."""
        return base_of(self.likelihood.distribution(self.like[0]))

    def check_kind(self, name: str, kind: str) -> None:
        """Raise unless targets are "classes", "numbers" or "continuous numbers"; ``name`` is what was asked for."""
        classes = is_class(target := self.target_distribution)
        if classes != (kind == "classes") or (kind == "continuous numbers" and is_whole(target)):
            advice = "use probs, reliability, ece or brier" if classes else "use its mean, interval, coverage or crps"
            raise NotAvailableError(f"{name} is for {kind}; this prediction is of {self.family}; {advice}.")

    def checked_targets(self, y: Tensor) -> Tensor:
        """Return ``y`` as the likelihood expects it; raise if it or one of its values is not valid."""
        if not isinstance(y, Tensor):
            raise ShapeError(f"y must be a tensor; got {type(y).__name__} {y!r}.")
        check_dense("y", y)
        f = self.like[0, :1].expand(len(self._sums["mean"]), -1)
        checked: Tensor = self.likelihood.checked(f, y.to(f.device))
        self.likelihood.check_values(f, checked)
        if not bool(torch.isfinite(checked).all()):
            raise RangeError(f"y must be finite; got {describe(y)}.")
        if self.one_of_several:  # checked whatever the likelihood checks, because torch would crash on a GPU
            classes, known = self._sums["mean"].shape[-1], checked[self.counted(checked)]
            if not bool(((known >= 0) & (known < classes)).all()):
                low, high = int(known.min()), int(known.max())
                raise RangeError(f"y must hold class indices from 0 to {classes - 1}; got {low} to {high}.")
        return checked

    def counted(self, y: Tensor) -> Tensor:
        """Return which targets are data: all, without those that the likelihood ignores."""
        ignored = getattr(self.likelihood, "ignore_index", None)
        return torch.ones_like(y, dtype=torch.bool) if ignored is None else y != ignored

    # --- the draws, a piece at a time ---------------------------------------------------------------------------------

    def distribution_at(self, points: Points) -> Distribution:
        """Return p(y | f) of every draw at some points, (T, points, D)."""
        return self.likelihood.distribution(self.samples[:, points])

    def log_tails(self, y: Tensor) -> Tails:
        """Return log P(Y ≤ y) and log P(Y ≥ y) of each target under the mixture of the draws, in float64."""
        return self._tails(self.tails_at, y)

    def tail_ends(self, log_tail: Tensor) -> Tails:
        """Return the least y with log P(Y ≤ y) ≥ log_tail, and the greatest with log P(Y ≥ y) ≥ log_tail, in float64.

        Args:
            log_tail: at most log ½; broadcast to the targets. At -inf the ends are those of all possible targets.
        """

        def ends(points: Points, log_tail: Tensor) -> Tails:
            near = self._sums["mean"][points], self._variance[points].sqrt()
            tails = functools.partial(self.tails_at, points)
            return mixture_ends(self.target_distribution, self.distribution_at(points), tails, near, log_tail)

        return self._tails(ends, log_tail)

    def _tails(self, compute: Callable[[Points, Tensor], Tails], of_targets: Tensor) -> Tails:
        """Return two numbers for each target."""
        mean = self._sums["mean"]
        given = of_targets.to(mean).expand(mean.shape)
        found = self._by_piece(lambda n, own: torch.stack(compute(n, own), -1), given, (*mean.shape, 2))
        return found[..., 0], found[..., 1]

    def _by_piece(self, compute: Callable[[Points, Tensor], Tensor], given: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return what ``compute`` finds for some points at a time, in float64; samples must be kept."""
        found = torch.empty(shape, dtype=F64, device=self.like.device)
        for points in self.pieces():
            found[points] = compute(points, given[points])
        return found

    def tails_at(self, points: Points, y: Tensor) -> Tails:
        """Return log P(Y ≤ y) and log P(Y ≥ y) under the mixture of the draws at some points, (points, D)."""
        below, above = log_tails(self.distribution_at(points), y)
        return mixed(below), mixed(above)

    def draw_targets(self, points: Points) -> Tensor:
        """Return a y drawn with each draw at some points, (T, points, D)."""
        return cast(Tensor, self.distribution_at(points).sample())

    def per_point(self, each: Tensor) -> Tensor:
        """Return values of single targets, summed for each point, (N,)."""
        return each if self.one_of_several else each.sum(tuple(range(-self._target_dims, 0)))

    @property
    def _target_dims(self) -> int:
        """How many dimensions the numbers of a point have: 1, or more in sequences and maps."""
        shape = getattr(self.likelihood, "shape", None)
        return len(shape.dims) if isinstance(shape, OutputShape) else 1

    def pieces(self) -> Iterator[Points]:
        """Yield the points in pieces whose samples can be processed at once."""
        count, points, width = self.samples.shape
        size = max(1, _PIECE // (count * width))
        return (slice(start, start + size) for start in range(0, points, size))


def check_prediction(prediction: object) -> Prediction:
    """Return what a score was given; raise unless it is a ``Prediction``."""
    if not isinstance(prediction, Prediction):
        got = type(prediction).__name__
        raise PyroDropoutError(f"prediction must be what predict(model, posterior, x) returns; got {got}.")
    return prediction
