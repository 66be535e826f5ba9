"""The columns, cells and rows of a comparison, and its table."""

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pyro_dropout.generative.inputs import AnyInputs
from pyro_dropout.generative.model_call import ModelCall
from pyro_dropout.guides.summary import table
from pyro_dropout.prediction.prediction import Prediction
from pyro_dropout.protocols import PyroModel, Record
from pyro_dropout.registry import Column, scores


def distinct(names: Iterable[str], separator: str = " ") -> list[str]:
    """Return the names with a number after each that came before, in the same or another case.

    Example:
        >>> distinct(["a", "b", "a", "A"])
        ['a', 'b', 'a 2', 'A 3']
    """
    found: dict[str, str] = {}
    for name in names:
        numbered = (f"{name}{separator}{k}" for k in itertools.count(2))
        chosen = next(each for each in itertools.chain([name], numbered) if each.casefold() not in found)
        found[chosen.casefold()] = chosen
    return list(found.values())


REFERENCE = "reference"  # name of the row that the others are compared with
PAPER = ("elbo", "objective", "gap", "khat")  # for those who compare q(w) with p(w|y); predictions do not need them
_AT_ONE = "At T = 1: the default prior trains guides with the KL times a T of at most 1."
# Those beside the registered scores: name, heading, which values are better, digits, meaning.
_OTHERS = f"""
between | in-between | | 2 | Epistemic standard deviation in the widest gaps of the data, divided by that at the data.
outside | outside | | 2 | The same at three times the data's distance from their centre.
d_mean | mean off | less | 3 | Distance of the predictive mean from the reference's, in its standard deviations.
d_std | std. off | less | 3 | Distance of the logarithm of the predictive standard deviation from the reference's.
d_w1 | W₁ | less | 3 | 1-Wasserstein distance of the predictive distribution from the reference's, in the units of y.
parameters | parameters | | 0 | Number of trained parameters.
us | µs a step | less | 0 | Time of one training step of one network, without compilation.
seconds | seconds | less | 1 | Time of all training and compilation, all seeds together.
elbo | ELBO | more | 1 | Evidence lower bound with the exact KL, in nats over the training data. {_AT_ONE}
objective | large-K objective | | 1 | nll + KL in the paper's form, at T = 1. No bound; at σ = 0 up to a constant.
gap | gap | | 2 | What the large-K form leaves out of the KL, E[H(z|w)], in nats.
khat | k̂ | | 2 | Pareto shape of the importance ratios to the true posterior: usable below 0.7. {_AT_ONE}
"""


def columns() -> dict[str, Column]:
    """Return every column by name: the registered scores, those registered since included, and then the others."""
    found: dict[str, Column] = dict(scores())
    for line in _OTHERS.strip().splitlines():
        name, heading, better, digits, meaning = (part.strip() for part in line.split("|", 4))
        found[name] = Column(name, heading, meaning, better, int(digits))
    return found


_SHOWN = 6  # digits of a number
_LARGE = 1e7  # from here on, numbers are printed with an exponent


@dataclass
class Score:
    """One cell: a mean over seeds with its standard error, or the reason why it is missing.

    Attributes:
        values: one for each seed.
        note: why there is none.
        points: of each seed whose value is a mean over held-back points, these numbers, (N,).
        drawn: the Monte Carlo error of each value, where it is known.
    """

    values: list[float] = field(default_factory=list)
    note: str = ""
    points: list[Tensor] = field(default_factory=list)
    drawn: list[float] = field(default_factory=list)

    def add(self, value: float | Tensor) -> None:
        """Add the value of a seed, or its values at the held-back points."""
        each = torch.as_tensor(value).detach().double().cpu().flatten()
        self.values.append(each.mean().item())
        if len(each) > 1:
            self.points.append(each)

    @property
    def mean(self) -> float:
        """The mean over seeds; NaN if there is no value."""
        return sum(self.values) / len(self.values) if self.values else math.nan

    @property
    def error(self) -> float | None:
        """The standard error of that mean: over seeds or of the draws, whichever is larger; None if there is none."""
        mean, count, known = self.mean, len(self.values), [each for each in self.drawn if math.isfinite(each)]
        errors = [math.sqrt(math.fsum(each**2 for each in known)) / len(known)] if known else []
        if count > 1:
            errors.append(math.sqrt(sum((v - mean) ** 2 for v in self.values) / (count - 1) / count))
        return max(errors, default=None)

    def within_error(self, other: "Score", column: Column) -> bool:
        """Whether two means differ by less than two standard errors of their difference.

        The error is that over seeds and, where both are means over the same held-back points, that over points.
        """
        variance = []
        if self.error is not None and other.error is not None:
            variance.append(self.error**2 + other.error**2)
        if self.points and other.points and len(self.points[0]) == len(other.points[0]):
            apart = torch.stack(self.points).mean(0) - torch.stack(other.points).mean(0)
            variance.append(apart.var().item() / len(apart))
        lead = abs(column.badness(self.mean) - column.badness(other.mean))
        return bool(variance) and lead <= 2 * math.sqrt(math.fsum(variance))

    def text(self, digits: int, tiny: bool = False) -> str:
        """Return the cell as it is printed; ``tiny`` says whether a small number is more than none."""
        if not self.values:
            return self.note or "–"
        size, error = abs(self.mean), self.error
        fixed = size < _LARGE and not (tiny and 0 < size < 10.0**-digits)
        if fixed and size >= 1:
            digits = max(0, min(digits, _SHOWN - 1 - math.floor(math.log10(size))))
        how = f".{digits}f" if fixed else ".2e"
        return f"{self.mean:{how}}" + (f" ± {error:{how}}" if error is not None else "")


@dataclass
class Row:
    """One posterior approximation: its scores and trained guides.

    Attributes:
        name: as it was given.
        scores: {column: score}.
        note: what went wrong, if anything did; if nothing could be scored, the row has only this note.
        trained: (model, guide) of every seed whose training did not diverge.
        answer: the prediction at the test points, of the first of them.
        curve: (x, mean, low, high, epistemic standard deviation) along one input, of the first of them.
    """

    name: str
    scores: dict[str, Score] = field(default_factory=dict)
    note: str = ""
    trained: list[tuple[PyroModel, object]] = field(default_factory=list)
    answer: Prediction | None = None
    curve: tuple[Tensor, ...] | None = None


@dataclass
class Findings:
    """The rows of a comparison, with their table.

    Attributes:
        rows: one per guide, after the reference if there is one.
        train: the training data.
        test: the held-back data.
        settings: seeds, steps and so on.
        seconds: total time.
        call: the arguments of a model that is not a network, with the training data; ``train`` and ``test`` then hold
            the numbers of the points, and the data of the observed site.
        known: every column that there may be, by name.
    """

    rows: list[Row]
    train: tuple[AnyInputs, Tensor]
    test: tuple[AnyInputs, Tensor]
    settings: Record
    seconds: float
    call: ModelCall | None = None
    known: Mapping[str, Column] = field(default_factory=columns, init=False)

    def __repr__(self) -> str:
        names = ", ".join(row.name for row in self.rows)
        points = f"{len(self.train[1])} training and {len(self.test[1])} test points"
        return f"{type(self).__name__}({names}; {points}; {self.seconds:.0f} s)"

    def _repr_html_(self) -> str:
        """Return the scores, one in a line, for notebooks."""
        return table(["", *(row.name for row in self.rows)], self._lines())

    def __str__(self) -> str:
        """The table, transposed: one line per score, because screens are narrow."""
        lines = [["", *(row.name for row in self.rows)], *self._lines()]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
        return "\n".join([*text, *(f"{row.name}: {row.note}" for row in self.rows if row.note)])

    def _lines(self) -> list[list[str]]:
        return [[column.heading, *(self.cell(row, key) for row in self.rows)] for key, column in self.columns.items()]

    @property
    def answers(self) -> dict[str, Prediction]:
        """The prediction at the test points, by posterior; without those that could not be scored."""
        return {row.name: row.answer for row in self.rows if row.answer is not None}

    @property
    def curves(self) -> dict[str, tuple[Tensor, ...]]:
        """The bands along one input, by posterior; empty if there are several inputs."""
        return {row.name: row.curve for row in self.rows if row.curve is not None}

    @property
    def columns(self) -> dict[str, Column]:
        """The columns in which at least one row has a score, in order."""
        return {key: column for key, column in self.known.items() if any(key in row.scores for row in self.rows)}

    @property
    def table(self) -> list[dict[str, str]]:
        """The table as text, one dict for each row: {heading: cell}."""
        headings = ["posterior", *(column.heading for column in self.columns.values())]
        cells = ([row.name, *(self.cell(row, key) for key in self.columns)] for row in self.rows)
        return [dict(zip(headings, each, strict=True)) for each in cells]

    def cell(self, row: Row, key: str) -> str:
        """Return one cell as text."""
        if key in row.scores:
            column = self.known[key]
            return row.scores[key].text(column.digits, tiny=column.better == "less")  # errors, in small units
        return "failed" if not row.scores else "–"

    def best(self, key: str) -> str | None:
        """Return the name of the best guide in a column, without the reference; None if neither direction is better."""
        column = self.known[key]
        known = {name: cell.mean for name, cell in self._cells(key).items() if math.isfinite(cell.mean)}
        if not column.better or len(known) < 2:
            return None
        return min(known, key=lambda name: column.badness(known[name]))

    def leaders(self, key: str) -> list[str]:
        """Return the best guide in a column, and then those that are within error of it.

        A score that is no mean over held-back points has no error with one seed, and so no leader.
        """
        name, cells, column = self.best(key), self._cells(key), self.known[key]
        if name is None or (cells[name].error is None and not cells[name].points):
            return []
        first = cells.pop(name)
        return [name, *(other for other, cell in cells.items() if first.within_error(cell, column))]

    def _cells(self, key: str) -> dict[str, Score]:
        """Return the cells of a column that have a value, by guide."""
        rows = [row for row in self.rows if key in row.scores and row.name != REFERENCE]
        return {row.name: row.scores[key] for row in rows if row.scores[key].values}

    @property
    def ranking(self) -> list[str]:
        """The guides by distance to the reference, nearest first; without a reference, by test log-likelihood."""
        key, sign = ("d_w1", 1) if any("d_w1" in row.scores for row in self.rows) else ("log_lik", -1)
        scored = [row for row in self.rows if row.name != REFERENCE and key in row.scores]
        return [row.name for row in sorted(scored, key=lambda row: sign * row.scores[key].mean)]
