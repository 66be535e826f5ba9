"""Whether predicted distributions are calibrated: how often targets fall where the prediction says they will.

If a prediction is calibrated, the central interval of any level contains that share of the targets, and the
distribution function F(y) at the targets (the probability integral transform, PIT) is uniform between 0 and 1. Both use
the full mixture given by the draws, noise included.

The calibration of §5 is another one: an uncertainty means little by itself, and more relative to the training set. A
standard deviation of 5 is alarming if training points have 0.2 to 2, and reassuring if they have 10 to 15. So a simple
distribution is fitted to those of the training set, and a new one is reported as its percentile.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_dropout.errors import PyroDropoutError, ShapeError
from pyro_dropout.mathematics.checks import (
    check_finite,
    check_level,
    check_non_negative,
    check_positive,
    describe,
)
from pyro_dropout.mathematics.shapes import Float
from pyro_dropout.prediction.plot_style import PALETTE, axes_or_new
from pyro_dropout.prediction.prediction import Prediction, check_prediction
from pyro_dropout.protocols import Axes
from pyro_dropout.registry import score

_F64 = torch.float64
LEVELS = torch.arange(1, 20, dtype=_F64) / 20
_GREY = "0.75"
_TWO_SIDED_99 = 2.5758293035489004  # normal quantile of 0.995


@dataclass(frozen=True, eq=False)
class CoverageCurve:
    """The coverage of central intervals at many levels; returned by ``coverage_curve``.

    Attributes:
        levels: the nominal probabilities of the intervals, (L,).
        coverage: the fraction of targets inside, (L,).
        width: their mean width in units of y, (L,).
        count: number of targets.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> half = torch.tensor([0.25, 0.75])
        >>> pdrop.judging.CoverageCurve(levels=half, coverage=torch.tensor([0.25, 0.5]), width=half, count=100).error
        0.125
    """

    levels: Float[Tensor, " L"]
    coverage: Float[Tensor, " L"]
    width: Float[Tensor, " L"]
    count: int

    @property
    def error(self) -> float:
        """The mean distance of coverage from its level: 0 for calibrated intervals, at most 0.5."""
        return (self.coverage - self.levels).abs().mean().item()

    def plot(self, ax: Axes = None) -> Axes:
        """Plot coverage against level, with the band that calibrated predictions stay in; return matplotlib's axes."""
        ax = axes_or_new(ax)
        draw_band(ax, self.count)
        ax.plot([0, 1], [0, 1], color="0.4", linewidth=0.8)
        ax.plot(self.levels, self.coverage, color=PALETTE[0], marker="o", markersize=3, label=f"{self.count} targets")
        ax.set(xlabel="level of the central interval", ylabel="fraction of targets inside", xlim=(0, 1), ylim=(0, 1))
        ax.legend(frameon=False, loc="upper left")
        return ax


def draw_band(ax: Axes, count: int) -> None:
    """Draw the band that calibrated coverage of ``count`` targets stays in, with 99 % at each level."""
    level = torch.linspace(0, 1, 101, dtype=_F64)
    reach = _TWO_SIDED_99 * (level * (1 - level) / count).sqrt()
    band = ((level - reach).clamp_min(0), (level + reach).clamp_max(1))
    ax.fill_between(level, *band, color=_GREY, alpha=0.5, linewidth=0, label="99 % band if calibrated")


def pit(prediction: Prediction, y: Tensor) -> Float[Tensor, "*N"]:
    """Return the PIT of each target, (N, D): its F(y) under the mixture of the draws, uniform on (0, 1) if calibrated.

    Args:
        prediction: of continuous numbers, with its samples kept.
        y: the targets, (N, D).

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> model = pdrop.BayesianNet(torch.nn.Linear(2, 1))
        >>> answer = pdrop.predict(model, pdrop.AutoMeanField(model), torch.zeros(4, 2), samples=100, seed=0)
        >>> pdrop.judging.pit(answer, answer.mean + 20).min().item()
        1.0
    """
    y = check_prediction(prediction).checked_targets(y)
    prediction.check_kind("pit", "continuous numbers")
    return prediction.log_tails(y)[0].exp().to(prediction.mean)


@score(
    "coverage",
    heading="95 % coverage",
    meaning="Share of held-out targets inside the central 95 % interval: 0.95 is right.",
    better="level",
    of=("numbers",),
    order=6,
)
def coverage(prediction: Prediction, y: Tensor, level: float = 0.95) -> float:
    """Return the fraction of targets inside the central interval that should contain ``level`` of them.

    Args:
        prediction: of numbers, with its samples kept. Whole numbers are inside at least as often as ``level``.
        y: the targets, (N, D); all N·D count alike.
        level: strictly between 0 and 1.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> model = pdrop.BayesianNet(torch.nn.Linear(2, 1))
        >>> answer = pdrop.predict(model, pdrop.AutoMeanField(model), torch.zeros(4, 2), samples=100, seed=0)
        >>> pdrop.coverage(answer, answer.mean + torch.tensor([[0.0], [1.0], [-1.0], [9.0]]), level=0.9)
        0.75
    """
    check_level("level", level)
    y = check_prediction(prediction).checked_targets(y)
    prediction.check_kind("coverage", "numbers")
    low, high = prediction.interval(level)
    return ((low <= y) & (y <= high)).to(_F64).mean().item()


def shares_inside(prediction: Prediction, y: Tensor, levels: Tensor) -> Tensor:
    """Return the share of targets in the central interval of each level, (L,); intervals of whole numbers hold more."""
    below, above = prediction.log_tails(prediction.checked_targets(y))
    least = (1 - 2 * torch.minimum(below, above).exp()).clamp_min(0)  # level that holds the target; 0 at the median
    return (least.cpu().reshape(-1, 1) <= levels).to(_F64).mean(0)


def coverage_curve(prediction: Prediction, y: Tensor, levels: Sequence[float] | Tensor | None = None) -> CoverageCurve:
    """Return the coverage and the mean width of the central intervals at many levels.

    Args:
        prediction: of continuous numbers, with its samples kept.
        y: the targets, (N, D); all N·D count alike.
        levels: strictly between 0 and 1; by default 0.05, 0.1, ... 0.95.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> model = pdrop.BayesianNet(torch.nn.Linear(2, 1))
        >>> answer = pdrop.predict(model, pdrop.AutoMeanField(model), torch.zeros(4, 2), samples=100, seed=0)
        >>> curve = pdrop.judging.coverage_curve(answer, answer.mean, levels=[0.5, 0.9])  # targets at the centre
        >>> curve.coverage.tolist(), bool(curve.width[0] < curve.width[1]), round(curve.error, 2)
        ([1.0, 1.0], True, 0.3)
    """
    given: object = LEVELS.tolist() if levels is None else levels.tolist() if isinstance(levels, Tensor) else levels
    if isinstance(given, str) or not isinstance(given, Sequence) or not given:
        raise ShapeError(f"levels must hold at least one level, as a list; got {describe(levels)}.")
    for level in given:
        check_level("levels", level)
    check_prediction(prediction).check_kind("coverage_curve", "continuous numbers")
    asked = torch.tensor([float(level) for level in given], dtype=_F64)
    inside = shares_inside(prediction, y, asked)
    tails = [prediction.tail_ends(tail.log()) for tail in (1 - asked) / 2]
    width = torch.stack([(high - low).mean().cpu() for low, high in tails])
    return CoverageCurve(asked, inside, width, y.numel())


def coverage_error(prediction: Prediction, y: Tensor) -> float:
    """Return the mean distance of coverage from its level, 0.05 to 0.95, without the slower widths."""
    prediction.check_kind("ece", "continuous numbers")
    return float((shares_inside(prediction, y, LEVELS) - LEVELS).abs().mean())


_SAME = 1e-12  # below this variance of the logarithms, the standard deviations differ only by rounding


class UncertaintyPercentile:
    """How unusual an uncertainty is: its percentile in a log-normal distribution fitted to those of the training set.

    Args:
        std_train: predictive standard deviations at the training points, of any shape; all are pooled, so
            targets in different units each need their own object.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> std = torch.tensor([5.0])
        >>> calm = pdrop.judging.UncertaintyPercentile(torch.linspace(0.2, 2.0, 100))
        >>> calm.percentile(std).round(decimals=1)  # more uncertain than almost all training points
        tensor([99.7000])
        >>> pdrop.judging.UncertaintyPercentile(torch.linspace(10.0, 15.0, 100)).percentile(std).round(decimals=1)
        tensor([0.])
    """

    def __init__(self, std_train: Tensor) -> None:
        check_finite("std_train", std_train)
        check_positive("std_train", std_train)
        self._logs = std_train.detach().to(_F64).log().reshape(-1)
        if len(self._logs) < 2 or self._logs.var(correction=0) < _SAME:
            raise PyroDropoutError(
                f"std_train must hold different values to fit a lognormal; got {describe(std_train)}."
            )

    def __repr__(self) -> str:
        return f"UncertaintyPercentile({len(self._logs)} training points)"

    def percentile(self, std: Tensor) -> Tensor:
        """Return the percentile of each standard deviation, 0 to 100, in the shape of ``std``."""
        check_finite("std", std)
        check_non_negative("std", std)
        logs = std.detach().to(self._logs).log()
        share: Tensor = torch.special.ndtr((logs - self._logs.mean()) / self._logs.std(correction=0))
        return (100 * share).to(std)


def rescale(std: Tensor, std_train: Tensor) -> Tensor:
    """Rescale uncertainties linearly: 0 at the smallest of the training set, 1 at the largest.

    Points less certain than all training points are above 1, and more certain ones below 0: nothing is clipped.

    Args:
        std: the uncertainties, of any shape; so are the results.
        std_train: uncertainties at the training points, of any shape.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> pdrop.judging.rescale(torch.tensor([0.5, 1.5, 5.0]), std_train=torch.tensor([0.5, 1.0, 2.5])).tolist()
        [0.0, 0.5, 2.25]
    """
    check_finite("std", std)
    check_finite("std_train", std_train)
    if not std_train.numel() or bool((std_train == std_train.reshape(-1)[0]).all()):
        raise PyroDropoutError(f"std_train must hold different values to span a scale; got {describe(std_train)}.")
    low, high = std_train.aminmax()
    return (std - low.to(std)) / (high - low).to(std)
