"""What held-back rows say about a posterior: how far its intervals must reach to hold their level, and its scores."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from pyro_dropout.judging.conformal import Conformal, conformal
from pyro_dropout.judging.scores.errors import accuracy, interval_score, rmse
from pyro_dropout.judging.support import Support
from pyro_dropout.mathematics.checks import check_level
from pyro_dropout.prediction.prediction import Prediction
from pyro_dropout.prediction.tails import is_whole
from pyro_dropout.protocols import Record

_F64 = torch.float64
_LEVEL = 0.95
_MOST = 20_000  # held-back rows whose scores are kept

Data = tuple[Tensor, Tensor]
Ends = tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class Calibration:
    """What held-back rows say about a posterior.

    Attributes:
        rows: how many there were.
        scores: on them, by name.
        intervals: calibrated on all of them; None if they are not to be.
        support: tells rows that are like those of the table from others.
    """

    rows: int = 0
    scores: dict[str, float] = field(default_factory=dict)
    intervals: Conformal | None = None
    support: Support | None = None

    def calibrates(self, level: float) -> bool:
        """Return whether enough rows were held back for intervals or sets of this level."""
        check_level("level", level)
        return self.intervals is not None and level <= self.intervals.highest_level

    def interval(self, prediction: Prediction, level: float) -> Ends:
        """Return the ends, each (N, D), of calibrated intervals; the posterior's own if too few rows were held back."""
        known = self.intervals if self.calibrates(level) else None
        return prediction.interval(level) if known is None else known.interval(prediction, level)

    def quantile(self, prediction: Prediction, level: float) -> Tensor:
        """Return the quantile of each row, (N, D): an end of the calibrated interval that has as much beyond it.

        There is no guarantee for each side. Levels further out than the held-back rows support are the posterior's own,
        and not inside those that are.
        """
        own, central = prediction.quantile(level), round(abs(1 - 2 * level), 12)
        if self.intervals is None or central == 0:
            return own
        ends = self.intervals.interval(prediction, min(central, self.intervals.highest_level))
        if self.calibrates(central):
            return ends[level > 0.5]
        return torch.maximum(own, ends[1]) if level > 0.5 else torch.minimum(own, ends[0])

    def probability_above(self, prediction: Prediction, threshold: float) -> Tensor:
        """Return P(y > threshold) of each row, (N, D), from the calibrated central intervals.

        There is no guarantee for each side. That of whole numbers is the posterior's own: their intervals hold more
        than their level.
        """
        own = prediction.probability_above(threshold)
        if self.intervals is None or is_whole(prediction.target_distribution):
            return own
        below, above = prediction.log_tails(torch.full_like(own, threshold, dtype=_F64))
        outer = torch.minimum(below, above)
        found = _calibrated(outer, self.intervals.scores)
        return torch.where(above > below, 1 - found, found).to(own)

    def sets(self, prediction: Prediction, level: float) -> Tensor | None:
        """Return which classes are in the calibrated set of each row, (N, C); None if there are too few rows."""
        return self.intervals.sets(prediction, level) if self.intervals and self.calibrates(level) else None

    def as_json(self) -> Record:
        """Return the argument of ``from_json``: all but the support, which the rows themselves give."""
        intervals = None if self.intervals is None else self.intervals.as_json()
        return {"rows": self.rows, "scores": self.scores, "intervals": intervals}

    @classmethod
    def from_json(cls, found: Record, support: Support | None = None) -> "Calibration":
        """Return what ``as_json`` was made from; {} for nothing."""
        intervals = found.get("intervals")
        known = None if intervals is None else Conformal.from_json(intervals)
        return cls(found.get("rows", 0), found.get("scores", {}), known, support)


def calibrate(
    answer: Prediction,
    held: Data,
    train: Data,
    classes: Sequence[str],
    *,
    intervals: bool = True,
) -> Calibration:
    """Return what held-back rows say about a posterior that was trained without them and gives this answer."""
    x, y = held
    y = y.to(answer.mean.device)
    scores = {"log_lik": float(answer.log_prob(y).mean())}
    if classes:
        commonest = train[1].mode().values.to(y)
        plainly = float((y == commonest).double().mean())
        scores |= {"accuracy": accuracy(answer, y), "accuracy_of_commonest": plainly}
    else:
        plainly = float((train[1].mean().to(y) - y).double().square().mean().sqrt())
        own = _scored(answer.interval(_LEVEL), y)
        scores |= {"rmse": rmse(answer, y), "rmse_of_mean": plainly, "coverage_95": own[0], "interval_score_95": own[1]}
    found = Calibration(len(x), scores, conformal(answer, y) if intervals and len(x) <= _MOST else None)
    if classes and (sets := found.sets(answer, _LEVEL)) is not None:
        held_in = sets.gather(-1, y.long().unsqueeze(-1)).double().squeeze(-1)
        scores |= {"set_coverage_95": float(held_in.mean()), "set_size_95": float(sets.sum(-1).double().mean())}
        scores |= {f"set_coverage_95 of {classes[k]}": float(held_in[y == k].mean()) for k in y.unique().tolist()}
    elif not classes and found.calibrates(_LEVEL):
        covered, score = _scored(found.interval(answer, _LEVEL), y)
        scores |= {"calibrated_coverage_95": covered, "calibrated_interval_score_95": score}
    return found


def _scored(ends: Ends, y: Tensor) -> tuple[float, float]:
    """Return the share of targets in their intervals, and the mean interval score."""
    inside = ((y >= ends[0]) & (y <= ends[1])).double().mean()
    return float(inside), float(interval_score(*ends, y, _LEVEL).mean())


def _calibrated(log_tail: Tensor, scores: Tensor) -> Tensor:
    """Return the probability beyond a point, (N, D), from the log of what the posterior says, at most log ½.

    The k-th of n scores, -log of a tail, is where (1 - k/(n + 1))/2 is left beyond; straight lines lead from one to the
    next, and from a half at the median. Beyond the last, tails shrink as the posterior's do.
    """
    found = np.empty(log_tail.shape)
    for k, column in enumerate(scores.numpy().T):
        own = -log_tail[:, k].double().cpu().numpy()
        x = np.maximum(np.append(-np.inf, column[np.isfinite(column)]), math.log(2))
        y = 0.5 * (1 - np.arange(len(x)) / (len(column) + 1))
        found[:, k] = np.where(own > x[-1], y[-1] * np.exp(np.minimum(x[-1] - own, 0)), np.interp(own, x, y))
    return torch.from_numpy(found).to(log_tail.device)
