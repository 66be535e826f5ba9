"""The columns of a comparison (heading, meaning, which direction is better) and the cells."""

import math
from dataclasses import dataclass, field

from pyro_dropout.registry import scores

REFERENCE = "reference"  # name of the row that the others are compared with
_DIRECTIONS = {
    "more": "more is better",
    "less": "less is better",
    "one": "the nearer to 1 the better",
    "level": "the nearer to 0.95 the better",
    "": "",
}


@dataclass(frozen=True)
class Column:
    """One column of the table.

    Attributes:
        heading: its title.
        meaning: a description in one or two sentences.
        better: "more", "less", "one" (closer to 1), "level" (closer to 0.95), or "" if neither direction is better.
        digits: after the decimal point.
    """

    heading: str
    meaning: str
    better: str = ""
    digits: int = 2

    @property
    def direction(self) -> str:
        """Which values are better, in words; "" if neither direction is."""
        return _DIRECTIONS[self.better]

    def badness(self, value: float) -> float:
        """Return a number that is smaller the better the value is."""
        goal = {"one": 1.0, "level": 0.95}.get(self.better)
        return abs(value - goal) if goal is not None else -value if self.better == "more" else value


_BETWEEN = "Epistemic standard deviation in the widest gaps of the data, divided by that at the data; should exceed 1."
_OBJECTIVE = "The training loss: nll + KL in the paper's form. Not a bound, and at σ = 0 defined only up to a constant."
_MEAN = "Distance of the predictive mean from the reference's, in the reference's standard deviations."
_STD = "Distance of the logarithm of the predictive standard deviation from the reference's."
_W1 = "1-Wasserstein distance of the predictive distribution from the reference's, in the units of y."
_OTHERS: dict[str, Column] = {
    "between": Column("in-between", _BETWEEN),
    "outside": Column("outside", "The same at three times the data's distance from their centre."),
    "elbo": Column("ELBO", "Evidence lower bound with the exact KL, in nats over the training data.", "more", 1),
    "objective": Column("large-K objective", _OBJECTIVE, digits=1),
    "gap": Column("gap", "What the large-K form leaves out of the KL, E[H(z|w)], in nats."),
    "khat": Column("k̂", "Pareto shape of the importance ratios to the true posterior: usable below 0.7."),
    "d_mean": Column("mean off", _MEAN, "less", 3),
    "d_std": Column("std. off", _STD, "less", 3),
    "d_w1": Column("W₁", _W1, "less", 3),
    "parameters": Column("parameters", "Number of trained parameters.", digits=0),
    "us": Column("µs a step", "Time of one training step of one network, without compilation.", "less", 0),
    "seconds": Column("seconds", "Time of all training and compilation, all seeds together.", "less", 1),
}


def columns() -> dict[str, Column]:
    """Return every column by name: the registered scores, those registered since included, and then the others."""
    scored = scores().values()
    return {entry.name: Column(entry.heading, entry.meaning, entry.better, entry.digits) for entry in scored} | _OTHERS


_SHOWN = 6  # digits of a number
_LARGE = 1e7  # from here on, numbers are printed with an exponent


@dataclass
class Score:
    """One cell: a mean over seeds with its standard error, or the reason why it is missing."""

    values: list[float] = field(default_factory=list)
    note: str = ""

    @property
    def mean(self) -> float:
        """The mean over seeds; NaN if there is no value."""
        return sum(self.values) / len(self.values) if self.values else math.nan

    @property
    def error(self) -> float | None:
        """The standard error of that mean; None for fewer than two seeds."""
        if len(self.values) < 2:
            return None
        mean = self.mean
        return math.sqrt(sum((v - mean) ** 2 for v in self.values) / (len(self.values) - 1) / len(self.values))

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


def best(column: Column, cells: dict[str, Score]) -> str | None:
    """Return the name of the best row in a column; None if neither direction is better."""
    known = {name: cell.mean for name, cell in cells.items() if cell.values and math.isfinite(cell.mean)}
    if not column.better or len(known) < 2:
        return None
    return min(known, key=lambda name: column.badness(known[name]))
