"""The decisions of §5.2: which inputs to defer to a human, and what that gains."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_dropout.judging.axes import axes_or_new
from pyro_dropout.mathematics.checks import check_finite, check_number, check_rate
from pyro_dropout.mathematics.errors import PyroDropoutError, ShapeError
from pyro_dropout.mathematics.shapes import Bool, Float
from pyro_dropout.protocols import Axes

_F64 = torch.float64


def defer(
    uncertainty: Float[Tensor, " N"], budget: float | None = None, threshold: float | None = None
) -> Bool[Tensor, " N"]:
    """Return which inputs to defer to a human: the most uncertain ones.

    Args:
        uncertainty: of each input, (N,): an entropy, a standard deviation, a percentile.
        budget: the share of inputs to defer, from 0 to 1; exactly round(budget·N) are deferred, and the first ones
            among equally uncertain inputs.
        threshold: defer all inputs that are more uncertain than this. Exactly one of the two must be given.

    Example:
        >>> import torch, pyro_dropout as pd
        >>> uncertainty = torch.tensor([0.1, 0.9, 0.4, 0.9])
        >>> pd.defer(uncertainty, budget=0.25).tolist()
        [False, True, False, False]
        >>> pd.defer(uncertainty, threshold=0.3).tolist()
        [False, True, True, True]
    """
    check_vector("uncertainty", uncertainty)
    if (budget is None) == (threshold is None):
        raise PyroDropoutError(f"give exactly one of budget and threshold; got {budget!r} and {threshold!r}.")
    if budget is None:
        return uncertainty > check_number("threshold", threshold)
    check_rate("budget", budget)
    most = uncertainty.argsort(descending=True, stable=True)[: round(float(budget) * len(uncertainty))]
    return torch.zeros_like(uncertainty, dtype=torch.bool).index_fill(0, most, True)


@dataclass(frozen=True, eq=False)
class RejectionCurve:
    """The score of the inputs kept when the most uncertain are rejected; returned by ``rejection_curve``.

    Attributes:
        kept: the fraction of inputs kept, (N,): 1/N, 2/N, ... 1.
        score: the mean score of the inputs kept, if the least uncertain are kept, (N,).
        random: the same, if inputs are kept at random, (N,): the mean of all.
        oracle: the same, if those with the best scores are kept, (N,).
        error: the standard error of ``score``, from the spread of the scores of those kept, (N,).

    Example:
        >>> import torch, pyro_dropout as pd
        >>> right = torch.tensor([1.0, 0.0, 1.0, 1.0])
        >>> curve = pd.rejection_curve(uncertainty=torch.tensor([0.1, 0.9, 0.3, 0.2]), score=right)
        >>> curve.score.tolist(), curve.ratio  # the one error is rejected first
        ([1.0, 1.0, 1.0, 0.75], 1.0)
    """

    kept: Float[Tensor, " N"]
    score: Float[Tensor, " N"]
    random: Float[Tensor, " N"]
    oracle: Float[Tensor, " N"]
    error: Float[Tensor, " N"]

    @property
    def area(self) -> float:
        """The mean of the curve over all fractions kept."""
        return self.score.mean().item()

    @property
    def ratio(self) -> float:
        """The share of the oracle's gain over chance: 1 for the best order, 0 for chance; NaN if none is possible."""
        possible = (self.oracle - self.random).mean()
        return ((self.score - self.random).mean() / possible).item()

    def plot(self, ax: Axes = None, *, ylabel: str = "mean score of those kept") -> Axes:
        """Plot the curve with those of chance and of the oracle; return matplotlib's axes."""
        ax = axes_or_new(ax)
        kept, score, oracle, error = (part.cpu() for part in (self.kept, self.score, self.oracle, self.error))
        band = (score - 2 * error, score + 2 * error)
        ax.fill_between(kept, *band, color="#0072B2", alpha=0.2, linewidth=0, label="± 2 standard errors")
        ax.plot(kept, oracle, color="#009E73", linestyle="--", label="best possible order")
        ax.plot(kept, score, color="#0072B2", label="by uncertainty")
        ax.plot(kept, self.random.cpu(), color="0.4", linestyle=":", label="by chance")
        ax.set(xlabel="fraction of inputs kept", ylabel=ylabel, xlim=(0, 1))
        ax.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, fontsize=8)
        return ax


def rejection_curve(
    uncertainty: Float[Tensor, " N"], score: Tensor, *, higher_is_better: bool = True
) -> RejectionCurve:
    """Return how the mean score improves as the most uncertain inputs are rejected: the accuracy-rejection curve.

    Args:
        uncertainty: of each input, (N,). Ties are averaged over random orders.
        score: of each input, (N,): whether the prediction was right, a log-likelihood, or an error.
        higher_is_better: whether a high score is good; False for errors.

    Example:
        >>> import torch, pyro_dropout as pd
        >>> error = torch.tensor([0.5, 2.0, 1.0, 0.1])
        >>> curve = pd.rejection_curve(torch.tensor([0.3, 0.9, 0.2, 0.1]), error, higher_is_better=False)
        >>> [round(value, 3) for value in curve.score.tolist()], 0 < curve.ratio < 1
        ([0.1, 0.55, 0.533, 0.9], True)
    """
    check_vector("uncertainty", uncertainty)
    if not isinstance(score, Tensor) or score.shape != uncertainty.shape:
        given = tuple(score.shape) if isinstance(score, Tensor) else type(score).__name__
        raise ShapeError(f"score must have one number for each of {len(uncertainty)} inputs; got {given}.")
    values = score.to(_F64)
    check_finite("score", values)
    order = uncertainty.argsort(stable=True)
    count = torch.arange(1, len(values) + 1, dtype=_F64, device=values.device)
    mean, square = (_fairly(uncertainty, part)[order].cumsum(0) / count for part in (values, values.square()))
    error = ((square - mean.square()).clamp_min(0) / count).sqrt()
    best = values.sort(descending=higher_is_better).values.cumsum(0) / count
    random = values.mean().expand(len(values)).clone()
    return RejectionCurve(count / len(values), mean, random, best, error)


def _fairly(uncertainty: Tensor, values: Tensor) -> Tensor:
    """Return the values, averaged over equally uncertain inputs: the expectation over random orders."""
    levels, group = uncertainty.unique(return_inverse=True)
    total = values.new_zeros(len(levels)).index_add(0, group, values)
    fair: Tensor = (total / group.bincount())[group]
    return fair


def check_vector(name: str, value: Tensor) -> None:
    """Raise unless ``value`` is a vector of at least one finite number."""
    check_finite(name, value)
    if value.dim() != 1 or len(value) == 0:
        hint = " Sum or average over its targets first." if value.dim() == 2 else ""
        raise ShapeError(f"{name} must have one number for each input, (N,); got shape {tuple(value.shape)}.{hint}")
