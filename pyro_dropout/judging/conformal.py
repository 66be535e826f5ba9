"""Intervals and sets that hold what they promise: split conformal prediction on top of a posterior.

Each held-back target gets a score, how far out it lies in its own predicted distribution. For numbers it is minus the
log of the smaller tail, -log min(P(Y ≤ y), P(Y ≥ y)); for classes it is -log P(y). If a new row is exchangeable with
the n held-back ones, the rank of its score among theirs is uniform. So it is at most the k-th smallest of theirs,
k = ⌈(n + 1)·level⌉, with a probability of at least ``level``, whatever the posterior is worth. All y with such scores
are the interval. It is the posterior's own central interval, of another level: wide where the posterior is uncertain,
inside the support of the likelihood, and growing with the level.
"""

import math
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from pyro_dropout.errors import PyroDropoutError, RangeError, ShapeError
from pyro_dropout.generative.likelihoods.moments import is_class
from pyro_dropout.mathematics.checks import check_level
from pyro_dropout.mathematics.shapes import Bool, Float
from pyro_dropout.prediction.prediction import Prediction, check_prediction
from pyro_dropout.protocols import Record

_F64 = torch.float64


def conformal(prediction: Prediction, y: Tensor) -> "Conformal":
    """Calibrate intervals, or sets of classes, on rows that were held back from training.

    To hold the level within each group of rows, calibrate each group by itself.

    Args:
        prediction: at the held-back rows, samples kept. Predict new rows with the same options.
        y: their targets, (N, D), or classes, (N,). With several targets each has an interval of its own.

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
    y = check_prediction(prediction).checked_targets(y)
    if prediction.mean.dim() > 2:
        raise PyroDropoutError("conformal is for targets (N, D) or one class a row; this prediction has maps of them.")
    scores = _scores(prediction, y)
    kept = prediction.counted(y).reshape(len(scores), -1).all(-1)
    if not bool(kept.any()):
        raise ShapeError("y must have at least one target that is not ignored.")
    ordered = scores[kept].sort(0).values.cpu()
    return Conformal(ordered, prediction.family, is_class(prediction.target_distribution))


@dataclass(frozen=True, eq=False)
class Conformal:
    """Intervals, or sets of classes, that hold their level on rows exchangeable with the held-back ones.

    Made by ``conformal``; ``as_json`` and ``from_json`` carry it to another process.

    Attributes:
        scores: of the held-back rows, in ascending order, (n, D).
        family: of the likelihood.
        classes: whether targets are classes.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> scores = torch.arange(1.0, 20.0, dtype=torch.float64).unsqueeze(-1)
        >>> held_back = pdrop.judging.Conformal(scores, "Gaussian")
        >>> held_back.highest_level, held_back.posterior_level(0.5).item()  # the tenth of 19: 1 - 2 exp(-10)
        (0.95, 0.99990...)
    """

    scores: Float[Tensor, "n D"]
    family: str
    classes: bool = False

    def __repr__(self) -> str:
        return f"Conformal({len(self.scores)} rows, {self.family}; levels up to {self.highest_level:.4g})"

    @property
    def highest_level(self) -> float:
        """The highest level that the held-back rows support: n/(n + 1)."""
        found = len(self.scores) / (len(self.scores) + 1)
        # A level means its decimal number: that of 12/13 may be a little more than 12/13.
        return found if self._place(found) <= len(self.scores) else math.nextafter(found, 0)

    def interval(self, prediction: Prediction, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Return the ends, each (N, D), of intervals that hold y with a probability of at least ``level``.

        That is the probability before the held-back rows are known; given them, the share of new rows inside varies
        about it by √(level·(1 - level)/n). Ends are infinite where held-back targets lie too far outside.

        Args:
            prediction: at new rows, samples kept.
            level: strictly between 0 and 1; at most ``highest_level``.
        """
        limit = self._limit_for(prediction, level)
        if self.classes:
            raise PyroDropoutError(f"interval is for numbers; this prediction is of {self.family}. Use sets(...).")
        low, high = prediction.tail_ends(-limit)
        return low.to(prediction.mean), high.to(prediction.mean)

    def sets(self, prediction: Prediction, level: float = 0.95) -> Bool[Tensor, "..."]:
        """Return which classes are in the set of each row, (N, C), so that it holds y with at least ``level``.

        Classes are taken by their probability, with one limit for all rows (least ambiguous sets). The most probable
        class is always in the set, so none is empty.

        Args:
            prediction: of classes, at new rows. With a Bernoulli likelihood, sets are (N, D, 2): no, yes.
            level: strictly between 0 and 1; at most ``highest_level``.
        """
        limit = self._limit_for(prediction, level)
        if not self.classes:
            raise PyroDropoutError(f"sets is for classes; this prediction is of {self.family}. Use interval(...).")
        surprise = _class_scores(prediction)
        limit = limit if surprise.dim() == 2 else limit.unsqueeze(-1)
        return surprise <= torch.maximum(limit, surprise.amin(-1, keepdim=True))

    def posterior_level(self, level: float = 0.95) -> Tensor:
        """Return the level of the posterior's own intervals that hold ``level`` of the targets, (D,); for numbers.

        Above ``level`` the posterior is overconfident, and below it too cautious.
        """
        if self.classes:
            raise PyroDropoutError(f"posterior_level is for intervals; these are sets of classes, of {self.family}.")
        return 1 - 2 * torch.exp(-self._limit(level))

    def as_json(self) -> Record:
        """Return the argument of ``from_json``: lists and text only, with None for an infinite score."""
        rows = [[value if math.isfinite(value) else None for value in row] for row in self.scores.tolist()]
        return {"scores": {"": rows}, "family": self.family, "grouped": False, "classes": self.classes}

    @classmethod
    def from_json(cls, found: Record) -> "Conformal":
        """Return what ``as_json`` was made from; raise ``KeyError`` or ``TypeError`` if it is invalid."""
        family, groups, classes = found["family"], found["scores"], found["classes"]
        whole = isinstance(groups, dict) and set(groups) == {""} and found["grouped"] is False
        if not whole or not isinstance(family, str) or not isinstance(classes, bool):
            raise TypeError("the held-back rows, which must be in one group,")
        try:
            rows = [[math.inf if value is None else value for value in row] for row in groups[""]]
            scores = torch.tensor(rows, dtype=_F64)
        except ValueError:  # of torch: text, or rows of different lengths
            raise TypeError("the scores of held-back rows") from None
        if scores.dim() != 2 or not scores.numel() or not torch.equal(scores, scores.sort(0).values):
            raise TypeError("the scores of held-back rows, which are none, or not in order,")
        return cls(scores, family, classes)

    def _limit_for(self, prediction: Prediction, level: float) -> Tensor:
        """Return the greatest score of intervals or sets, (D,), on the prediction's device."""
        check_prediction(prediction)
        width, targets = self.scores.shape[1], 1 if prediction.one_of_several else prediction.mean[:1].numel()
        if (prediction.family, targets) != (self.family, width):
            given = f"got {prediction.family} with {targets}"
            raise PyroDropoutError(f"prediction must be of {self.family} with {width} targets, as held back; {given}.")
        return self._limit(level).to(prediction.like.device)

    def _limit(self, level: float) -> Tensor:
        """Return the k-th smallest score, k = ⌈(n + 1)·level⌉, (D,)."""
        check_level("level", level)
        place, exact = self._place(level), _decimal(level)
        if place > len(self.scores):
            raise RangeError(
                f"level must be at most {self.highest_level:.4g} with {len(self.scores)} held-back rows; got {level!r},"
                f" which needs {math.ceil(exact / (1 - exact))}."
            )
        return self.scores[place - 1]

    def _place(self, level: float) -> int:
        """Return k = ⌈(n + 1)·level⌉."""
        return math.ceil((len(self.scores) + 1) * _decimal(level))


def _decimal(level: float) -> Fraction:
    """Return a level as it is written: 0.55·100 is 55.000000000000007 in floating point, and its ceiling 56."""
    return Fraction(str(float(level)))


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
