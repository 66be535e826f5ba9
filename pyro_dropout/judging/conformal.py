"""Intervals and sets that hold what they promise: split conformal prediction on top of a posterior.

Each held-back target gets a score, how far out it lies in its own predicted distribution. For numbers it is minus the
log of the smaller tail, -log min(P(Y ≤ y), P(Y ≥ y)); for classes it is -log P(y). If a new row is exchangeable with
the n held-back ones, the rank of its score among theirs is uniform. So it is at most the k-th smallest of theirs,
k = ⌈(n + 1)·level⌉, with a probability of at least ``level``, whatever the posterior is worth. All y with such scores
are the interval. It is the posterior's own central interval, of another level: wide where the posterior is uncertain,
inside the support of the likelihood, and growing with the level.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from numbers import Integral

import torch
from torch import Tensor

from pyro_dropout.errors import PyroDropoutError, RangeError, ShapeError
from pyro_dropout.generative.likelihoods.moments import is_class
from pyro_dropout.judging.checked_prediction import check_prediction, checked_targets
from pyro_dropout.mathematics.checks import check_level, describe
from pyro_dropout.mathematics.shapes import Bool
from pyro_dropout.prediction.prediction import Prediction
from pyro_dropout.protocols import Record

Groups = Sequence[str] | Sequence[int] | Tensor

_F64 = torch.float64
_ALL = ""  # the name of the only group, if rows are not grouped


def conformal(prediction: Prediction, y: Tensor, groups: Groups | None = None) -> "Conformal":
    """Calibrate intervals, or sets of classes, on rows that were held back from training.

    Args:
        prediction: at the held-back rows, samples kept. Predict new rows with the same options.
        y: their targets, (N, D), or classes, (N,). With several targets each has an interval of its own.
        groups: a label for each row, text or whole numbers, to calibrate each group by itself (Mondrian): intervals
            then hold within every group. By default all rows together.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> _ = torch.manual_seed(0)
        >>> model = pdrop.BayesianNet(torch.nn.Linear(2, 1), likelihood=pdrop.Gaussian(tau=100.0))
        >>> guide = pdrop.AutoMeanField(model, init=lambda name, shape: torch.zeros(shape), init_scale=0.01)
        >>> def ask(rows):
        ...     return pdrop.predict(model, guide, torch.zeros(rows, 2), samples=50, seed=0)
        >>> held_back = pdrop.conformal(ask(999), torch.randn(999, 1))  # the noise is 1, and not 0.1
        >>> held_back
        Conformal(999 rows, Gaussian; levels up to 0.999)
        >>> low, high = held_back.interval(ask(2), level=0.95)
        >>> bool((high - low > 3.6).all() & (high - low < 4.3).all())  # ±1.96
        True
    """
    y = checked_targets(prediction, y)
    if prediction.mean.dim() > 2:
        raise PyroDropoutError("conformal is for targets (N, D) or one class a row; this prediction has maps of them.")
    scores = _scores(prediction, y)
    labels = _labels(groups, len(scores))
    kept = prediction.counted(y).reshape(len(scores), -1).all(-1).tolist()
    rows: dict[str, list[int]] = {}
    for row, (label, counted) in enumerate(zip(labels, kept, strict=True)):
        if counted:
            rows.setdefault(label, []).append(row)
    ordered = {label: scores[rows[label]].sort(0).values.cpu() for label in sorted(rows)}
    return Conformal(ordered, prediction.family, groups is not None, is_class(prediction.target_distribution))


@dataclass(frozen=True, eq=False)
class Conformal:
    """Intervals, or sets of classes, that hold their level on rows exchangeable with the held-back ones.

    Made by ``conformal``; ``as_json`` and ``from_json`` carry it to another process.

    Attributes:
        scores: of the held-back rows of each group, in ascending order, (n, D); the group of all rows is "".
        family: of the likelihood.
        grouped: whether rows have groups.
        classes: whether targets are classes.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> scores = torch.arange(1.0, 20.0, dtype=torch.float64).unsqueeze(-1)
        >>> held_back = pdrop.judging.Conformal({"": scores}, "Gaussian")
        >>> held_back.highest_level, held_back.posterior_level(0.5).item()  # the tenth of 19: 1 - 2 exp(-10)
        (0.95, 0.99990...)
    """

    scores: Mapping[str, Tensor]
    family: str
    grouped: bool = False
    classes: bool = False

    def __repr__(self) -> str:
        rows = f"{sum(self.counts.values())} rows" + (f" in {len(self.scores)} groups" if self.grouped else "")
        return f"Conformal({rows}, {self.family}; levels up to {self.highest_level:.4g})"

    @property
    def counts(self) -> dict[str, int]:
        """The number of held-back rows in each group."""
        return {label: len(scores) for label, scores in self.scores.items()}

    @property
    def highest_level(self) -> float:
        """The highest level that the smallest group supports: n/(n + 1)."""
        least = min(self.counts.values())
        return least / (least + 1)

    def interval(
        self, prediction: Prediction, level: float = 0.95, groups: Groups | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the ends, each (N, D), of intervals that hold y with a probability of at least ``level``.

        That is the probability before the held-back rows are known; given them, the share of new rows inside varies
        about it by √(level·(1 - level)/n). Ends are infinite where held-back targets lie too far outside.

        Args:
            prediction: at new rows, samples kept.
            level: strictly between 0 and 1; at most ``highest_level``.
            groups: a label for each new row, if the held-back ones had labels.
        """
        limit = self._limits(prediction, level, groups)
        if self.classes:
            raise PyroDropoutError(f"interval is for numbers; this prediction is of {self.family}. Use sets(...).")
        low, high = prediction.tail_ends(-limit.reshape(prediction.mean.shape))
        return low.to(prediction.mean), high.to(prediction.mean)

    def sets(self, prediction: Prediction, level: float = 0.95, groups: Groups | None = None) -> Bool[Tensor, "..."]:
        """Return which classes are in the set of each row, (N, C), so that it holds y with at least ``level``.

        Classes are taken by their probability, with one limit for all rows (least ambiguous sets). The most probable
        class is always in the set, so none is empty.

        Args:
            prediction: of classes, at new rows. With a Bernoulli likelihood, sets are (N, D, 2): no, yes.
            level: strictly between 0 and 1; at most ``highest_level``.
            groups: a label for each new row, if the held-back ones had labels.
        """
        limit = self._limits(prediction, level, groups)
        if not self.classes:
            raise PyroDropoutError(f"sets is for classes; this prediction is of {self.family}. Use interval(...).")
        surprise = _class_scores(prediction)
        limit = limit if surprise.dim() == 2 else limit.unsqueeze(-1)
        return surprise <= torch.maximum(limit, surprise.amin(-1, keepdim=True))

    def posterior_level(self, level: float = 0.95, group: str | int = _ALL) -> Tensor:
        """Return the level of the posterior's own intervals that hold ``level`` of the targets, (D,); for numbers.

        Above ``level`` the posterior is overconfident, and below it too cautious.
        """
        if self.classes:
            raise PyroDropoutError(f"posterior_level is for intervals; these are sets of classes, of {self.family}.")
        return 1 - 2 * torch.exp(-self._limit(str(group), level))

    # --- to other processes -------------------------------------------------------------------------------------------

    def as_json(self) -> Record:
        """Return the argument of ``from_json``: lists and text only, with None for an infinite score."""
        scores = {
            label: [[value if math.isfinite(value) else None for value in row] for row in each.tolist()]
            for label, each in self.scores.items()
        }
        return {"scores": scores, "family": self.family, "grouped": self.grouped, "classes": self.classes}

    @classmethod
    def from_json(cls, found: Record) -> "Conformal":
        """Return what ``as_json`` was made from; raise ``KeyError`` or ``TypeError`` if it is invalid."""
        family, groups, flags = found["family"], found["scores"], (found["grouped"], found["classes"])
        kinds = (isinstance(family, str), isinstance(groups, dict), *(isinstance(flag, bool) for flag in flags))
        if not all(kinds) or not groups or (not flags[0] and set(groups) != {_ALL}):
            raise TypeError("the groups of held-back rows")
        scores = {label: _read_scores(rows) for label, rows in groups.items()}
        if len({each.shape[1] for each in scores.values()}) > 1:
            raise TypeError("the scores of held-back rows, which have different numbers of targets,")
        return cls(scores, family, *flags)

    def _limits(self, prediction: Prediction, level: float, groups: Groups | None) -> Tensor:
        """Return the greatest score of the interval or set of each row, (N, D)."""
        check_prediction(prediction)
        points, width = len(prediction.mean), next(iter(self.scores.values())).shape[1]
        targets = 1 if prediction.one_of_several else prediction.mean[:1].numel()
        if (prediction.family, targets) != (self.family, width):
            given = f"got {prediction.family} with {targets}"
            raise PyroDropoutError(f"prediction must be of {self.family} with {width} targets, as held back; {given}.")
        if (groups is not None) != self.grouped:
            what = "were calibrated by groups; give groups" if self.grouped else "have no groups; leave groups out"
            raise PyroDropoutError(f"groups: the held-back rows {what}.")
        labels = _labels(groups, points)
        limits = {label: self._limit(label, level) for label in dict.fromkeys(labels)}
        return torch.stack([limits[label] for label in labels]).to(prediction.like.device)

    def _limit(self, label: str, level: float) -> Tensor:
        """Return the k-th smallest score of a group, k = ⌈(n + 1)·level⌉, (D,)."""
        check_level("level", level)
        if label not in self.scores:
            known = ", ".join(map(repr, [*self.scores][:8])) + (", ..." if len(self.scores) > 8 else "")
            raise RangeError(f"groups must be among those of the held-back rows, {known}; got {label!r}.")
        scores = self.scores[label]
        exact = Fraction(str(float(level)))  # 0.55·100 is 55.000000000000007 in floating point, and its ceiling 56
        place = math.ceil((len(scores) + 1) * exact)
        if place > len(scores):
            where = f" in group {label!r}" if self.grouped else ""
            raise RangeError(
                f"level must be at most {len(scores) / (len(scores) + 1):.4g} with {len(scores)} held-back rows{where};"
                f" got {level!r}, which needs {math.ceil(exact / (1 - exact))}."
            )
        return scores[place - 1]


def _scores(prediction: Prediction, y: Tensor) -> Tensor:
    """Return the score of each target, (N, D), in float64."""
    if not is_class(prediction.target_distribution):
        below, above = prediction.log_tails(y)
        # At most ½, so that the median is in every interval, also where whole numbers have two tails above ½.
        return torch.maximum(-torch.minimum(below, above), below.new_tensor(math.log(2))).reshape(len(y), -1)
    surprise = _class_scores(prediction)
    index = y.long().clamp(0, surprise.shape[-1] - 1)  # a row that is not counted has any
    return surprise.gather(-1, index.unsqueeze(-1)).reshape(len(y), -1)


def _class_scores(prediction: Prediction) -> Tensor:
    """Return -log P of each class, (N, C); of yes and no, (N, D, 2)."""
    probs = prediction.probs.to(_F64)
    return -(probs if prediction.one_of_several else torch.stack([1 - probs, probs], -1)).log()


def _labels(groups: Groups | None, points: int) -> list[str]:
    """Return the label of each row as text; raise unless there is one for each."""
    if groups is None:
        return [_ALL] * points
    given = groups.tolist() if isinstance(groups, Tensor) else list(groups) if not isinstance(groups, str) else groups
    if isinstance(given, str) or not all(isinstance(each, str | Integral) for each in given):
        raise RangeError(f"groups must hold text or whole numbers, one for each row; got {describe(groups)[:80]}.")
    if len(given) != points:
        raise ShapeError(f"groups must have a label for each of the {points} rows; got {len(given)}.")
    return [str(each) for each in given]


def _read_scores(rows: object) -> Tensor:
    if not isinstance(rows, list) or not rows or not all(isinstance(row, list) and row for row in rows):
        raise TypeError("the scores of held-back rows")
    values = [value for row in rows for value in row]
    known = all(isinstance(value, int | float | None) and not isinstance(value, bool) for value in values)
    if not known or len({len(row) for row in rows}) > 1:
        raise TypeError("the scores of held-back rows")
    found = torch.tensor([[math.inf if value is None else value for value in row] for row in rows], dtype=_F64)
    if bool(found.isnan().any()) or not torch.equal(found, found.sort(0).values):
        raise TypeError("the scores of held-back rows, which are not in order,")
    return found
