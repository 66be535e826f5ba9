"""What held-back rows say about a posterior: how far its intervals must reach to hold their level, and its scores."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pyro_dropout.judging.conformal import Conformal, conformal
from pyro_dropout.judging.scores.errors import accuracy, rmse
from pyro_dropout.judging.scores.interval_score import interval_score
from pyro_dropout.judging.support import Support
from pyro_dropout.mathematics.errors import RangeError
from pyro_dropout.prediction.prediction import Prediction
from pyro_dropout.protocols import Record

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
        by_group: the same within each group of rows.
        column: whose values are the groups.
        support: tells rows that are like those of the table from others.
    """

    rows: int = 0
    scores: dict[str, float] = field(default_factory=dict)
    intervals: Conformal | None = None
    by_group: Conformal | None = None
    column: str | None = None
    support: Support | None = None

    def interval(self, prediction: Prediction, level: float, groups: Sequence[str] | None = None) -> Ends | None:
        """Return calibrated ends, each (N, D), of a group's own rows where these are enough; None if too few are."""
        if self.intervals is None or not _supports(self.intervals, level):
            return None
        low, high = self.intervals.interval(prediction, level)
        own = self._own(groups, level)
        if own is not None:
            labels, known = own
            apart = self.by_group.interval(prediction, level, labels)  # type: ignore[union-attr]
            known = known.to(low.device).unsqueeze(-1)
            low, high = torch.where(known, apart[0], low), torch.where(known, apart[1], high)
        return low, high

    def sets(self, prediction: Prediction, level: float, groups: Sequence[str] | None = None) -> Tensor | None:
        """Return which classes are in the calibrated set of each row, (N, C); None if there are too few rows."""
        if self.intervals is None or not _supports(self.intervals, level):
            return None
        found: Tensor = self.intervals.sets(prediction, level)
        own = self._own(groups, level)
        if own is not None:
            labels, known = own
            apart = self.by_group.sets(prediction, level, labels)  # type: ignore[union-attr]
            found = torch.where(known.to(found.device).unsqueeze(-1), apart, found)
        return found

    def _own(self, groups: Sequence[str] | None, level: float) -> tuple[list[str], Tensor] | None:
        """Return a label for each row, and whether its group has enough rows; None if no group has."""
        if self.by_group is None or groups is None:
            return None
        enough = [label for label, count in self.by_group.counts.items() if _enough(count, level)]
        if not enough:
            return None
        known = [label in enough for label in groups]
        labels = [label if fine else enough[0] for label, fine in zip(groups, known, strict=True)]
        return labels, torch.tensor(known)

    def small_groups(self, level: float) -> dict[str, int]:
        """Return the groups with too few rows for intervals of their own, and how many rows they have."""
        counts = {} if self.by_group is None else self.by_group.counts
        return {label: count for label, count in counts.items() if not _enough(count, level)}

    def as_json(self) -> Record:
        """Return the argument of ``from_json``: all but the support, which the rows themselves give."""
        parts = {"intervals": self.intervals, "by_group": self.by_group}
        told: Record = {name: None if part is None else part.as_json() for name, part in parts.items()}
        return {"rows": self.rows, "scores": self.scores, "column": self.column, **told}

    @classmethod
    def from_json(cls, found: Record, support: Support | None = None) -> "Calibration":
        """Return what ``as_json`` was made from; raise ``KeyError`` or ``TypeError`` for anything else."""
        rows, scores, column = found["rows"], found["scores"], found["column"]
        if not isinstance(scores, dict) or not all(isinstance(each, int | float) for each in scores.values()):
            raise TypeError("the scores on held-back rows")
        if not isinstance(rows, int) or not (column is None or isinstance(column, str)):
            raise TypeError("what is known of held-back rows")
        told = {name: found[name] for name in ("intervals", "by_group")}
        parts = {name: None if each is None else Conformal.from_json(each) for name, each in told.items()}
        return cls(rows, scores, column=column, support=support, **parts)


def calibrate(
    answer: Prediction,
    held: Data,
    train: Data,
    classes: Sequence[str],
    *,
    intervals: bool = True,
    column: str | None = None,
    groups: Sequence[str] | None = None,
) -> Calibration:
    """Return what held-back rows say about a posterior that was trained without them.

    Args:
        answer: its prediction of the held-back rows, samples kept.
        held: their inputs and targets.
        train: those of the other rows.
        classes: names of the classes; () for numbers.
        intervals: whether to calibrate intervals or sets.
        column: whose values are groups of rows, each calibrated by itself too.
        groups: these values, one for each held-back row.
    """
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
    whole = conformal(answer, y) if intervals and len(x) <= _MOST else None
    by_group = conformal(answer, y, groups) if whole is not None and groups is not None else None
    found = Calibration(len(x), scores, whole, by_group, column)
    if whole is not None and _supports(whole, _LEVEL):
        scores |= _after(found, answer, y, bool(classes), groups)
    return found


def _after(
    found: Calibration, answer: Prediction, y: Tensor, classes: bool, groups: Sequence[str] | None
) -> dict[str, float]:
    """Return the scores of calibrated intervals or sets, on the rows that they are calibrated on."""
    if classes:
        sets = found.sets(answer, _LEVEL, groups)
        assert sets is not None
        held = sets.gather(-1, y.long().unsqueeze(-1)).double().mean()
        return {"set_coverage_95": float(held), "set_size_95": float(sets.sum(-1).double().mean())}
    ends = found.interval(answer, _LEVEL, groups)
    assert ends is not None
    covered, score = _scored(ends, y)
    return {"calibrated_coverage_95": covered, "calibrated_interval_score_95": score}


def _scored(ends: Ends, y: Tensor) -> tuple[float, float]:
    """Return the share of targets in their intervals, and the mean interval score."""
    inside = ((y >= ends[0]) & (y <= ends[1])).double().mean()
    return float(inside), float(interval_score(*ends, y, _LEVEL).mean())


def _enough(count: int, level: float) -> bool:
    return level <= count / (count + 1)


def _supports(found: Conformal, level: float) -> bool:
    if not 0 < level < 1:
        raise RangeError(f"level must lie strictly between 0 and 1; got {level!r}.")
    return _enough(sum(found.counts.values()), level)
