"""A plot of predictions for the rows of a table along one column, with their uncertainty.

Rows differ in their other columns too, so each is drawn with its own interval and no line joins them.
"""

import itertools
import math
import random
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from pyro_dropout.mathematics.errors import PyroDropoutError
from pyro_dropout.prediction.plot_style import PALETTE, categories_below, finish, literal_text, percent
from pyro_dropout.protocols import Axes, Figure
from pyro_dropout.tables.cells import Cell, as_label, as_number
from pyro_dropout.tables.encoding import Encoding
from pyro_dropout.tabular.explain import features_of

Answers = Mapping[str, Sequence[Cell]]  # columns of a table of predictions
Columns = Mapping[str, Sequence[Cell]]

_DOTS = 2000  # measurements in a plot, at most
_ENOUGH = 12  # number of values from which a gap between them is meaningful


def widest(columns: Mapping[str, Sequence[Cell]], names: Sequence[str]) -> str:
    """Return the column with the most distinct values: the best x axis for a plot.

    Example:
        >>> widest({"sex": ["f", "m", "f"], "age": ["3", "4", "5"]}, ["sex", "age"])
        'age'
    """
    return max(names, key=lambda name: len(set(columns[name])))


def holes(values: Sequence[float]) -> list[tuple[float, float]]:
    """Return the gaps between values that are longer than a twelfth of their range.

    Example:
        >>> holes([0.0, 1.0, 2.0, 3.0, 8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0, 16.0])
        [(3.0, 8.0)]
    """
    known = sorted(value for value in values if math.isfinite(value))
    if len(known) < _ENOUGH:
        return []
    least = (known[-1] - known[0]) / 12
    return [(a, b) for a, b in itertools.pairwise(known) if b - a > least]


def span_of(encoding: Encoding, name: str) -> tuple[float, float] | None:
    """Return the training range of a column of numbers, as they are written; None for categories.

    Example:
        >>> from pyro_dropout.tables.column import Column
        >>> span_of(Encoding((Column("age", centre=40),), "height", ranges=((-20.0, 30.0),)), "age")
        (20.0, 70.0)
    """
    column = next(each for each in encoding.inputs if each.name == name)
    if column.categories is not None or encoding.ranges is None:
        return None
    low, high = encoding.ranges[features_of(encoding)[name][0]]
    return low + float(column.centre), high + float(column.centre)


def far_rows(encoding: Encoding, cells: Columns) -> list[bool]:
    """Return which rows have a number that is farther outside its training range than the range is wide.

    Example:
        >>> from pyro_dropout.tables.column import Column
        >>> far_rows(Encoding((Column("age"),), "height", ranges=((20.0, 70.0),)), {"age": ["30", "110", "900"]})
        [False, False, True]
    """
    found = np.zeros(len(cells[encoding.inputs[0].name]), np.bool_)
    for column in encoding.inputs:
        span = span_of(encoding, column.name)
        if span is not None:
            values = np.array(_places(column.plotted(cells[column.name]), None))
            wide = (span[1] - span[0]) or abs(span[1]) or 1.0
            found |= (values < span[0] - wide) | (values > span[1] + wide)  # False for missing values
    return [bool(far) for far in found]


def draw_over(
    encoding: Encoding,
    over: str,
    cells: Columns,
    answers: Answers,
    *,
    guide: str,
    rows: int,
    level: float = 0.95,
    known: Columns | None = None,
) -> Figure:
    """Draw predictions of a table's rows over one of its columns, without the rows far outside the training range.

    Args:
        encoding: how the columns became inputs.
        over: the column.
        cells: the columns of the rows, as they are written.
        answers: their predictions, as in ``plot_predictions``.
        guide: what predicts, for the title.
        rows: how many rows the table has; those given may be a choice from them.
        level: of the interval.
        known: the columns of the training table, if they are known.

    Example:
        >>> from pyro_dropout.tables.column import Column
        >>> encoding = Encoding((Column("age"),), "pet", ("cat", "dog"), ranges=((20.0, 70.0),))
        >>> answers = {"class": ["cat", "dog"], "probability": [0.9, 0.6], "entropy": [0.3, 0.6],
        ...            "mutual_information": [0.1, 0.2]}
        >>> figure = draw_over(encoding, "age", {"age": ["30", "900"]}, answers, guide="dropout", rows=2)
        >>> print(figure.axes[0].get_title())
        pet by dropout: probability of the most probable class
        2 rows; 1 of them left out: far outside the training range
    """
    axis = next(column for column in encoding.inputs if column.name == over)
    outcome, far = encoding.outcome, far_rows(encoding, cells)
    left = 0 if all(far) else sum(far)
    kept = [row for row in range(len(far)) if not (left and far[row])]
    measured = (axis.plotted(known[over]), outcome.plotted(known[outcome.name])) if known else None
    what = ": probability of the most probable class" if encoding.classes else f", with {percent(level)} intervals"
    count = f"{rows} rows" if len(far) == rows else f"{len(far)} of {rows} rows"
    count += f"; {left} of them left out: far outside the training range" if left else ""
    placed = axis.plotted([cells[over][row] for row in kept])
    count += f"; {placed.count(None)} of them without {over}" if None in placed else ""
    what += "; rows differ in their other columns too" if len(encoding.inputs) > 1 else ""
    return plot_predictions(
        over,
        placed,
        {name: [values[row] for row in kept] for name, values in answers.items()},
        outcome.name,
        level,
        measured,
        f"{outcome.name} by {guide}{what}\n{count}",
        axis.notation.kind == "date",
        span_of(encoding, over),
    )


@literal_text()
def plot_predictions(
    over: str,
    cells: Sequence[Cell],
    answers: Answers,
    target: str,
    level: float = 0.95,
    measured: tuple[Sequence[Cell], Sequence[Cell]] | None = None,
    title: str = "",
    dates: bool = False,
    span: tuple[float, float] | None = None,
) -> Figure:
    """Draw predictions over one column of their table.

    Args:
        over: the column's name.
        cells: its cells, one for each prediction.
        answers: columns of ``pyro-dropout predict``: mean, std, epistemic_std, lower and upper; or class, probability,
            entropy and mutual_information. Rows with a text in the column beyond have a ring.
        target: what is predicted.
        level: of the interval.
        measured: the same column and the target in the training table, drawn in the background (a subset if there
            are many).
        title: of the plot.
        dates: whether the column holds dates, as days since 1970-01-01.
        span: the column's training range, by default that of ``measured``; what is outside is shaded, and so are
            gaps without data within.

    Example:
        >>> answers = {"mean": [1.0, 2.0], "std": [0.2, 0.4], "epistemic_std": [0.1, 0.3], "lower": [0.6, 1.2],
        ...            "upper": [1.4, 2.8]}
        >>> figure = plot_predictions("age", ["3", "5"], answers, "height")
        >>> [axes.get_ylabel() for axes in figure.axes]
        ['height', 'std']
    """
    import matplotlib.dates
    import matplotlib.figure

    if not cells or not ("mean" in answers or "class" in answers):
        raise PyroDropoutError("there are no predictions to plot.")
    figure = matplotlib.figure.Figure(figsize=(8, 6), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(2.2, 1))
    known = [] if measured is None else list(measured[0])
    labels = _labels([*cells, *known])
    at, behind = _places(cells, labels), _places(known, labels)
    upper.set_title(title, fontsize=10)
    if "mean" in answers:
        if measured is not None:
            some = sorted(random.Random(0).sample(range(len(behind)), min(_DOTS, len(behind))))
            places, heights = [behind[row] for row in some], [as_number(measured[1][row]) for row in some]
            upper.plot(places, heights, ".", color="0.75", ms=4, zorder=0, label=f"{target} in the training table")
        _numbers(upper, lower, at, answers, target, level)
    else:
        _classes(upper, lower, at, answers, target)
    lower.set(xlabel=over, ylim=(0, None))
    if labels is not None:
        categories_below(lower, range(len(labels)), labels)
    if dates:
        ticks = matplotlib.dates.AutoDateLocator()  # type: ignore[no-untyped-call]
        written = matplotlib.dates.ConciseDateFormatter(ticks)  # type: ignore[no-untyped-call]
        lower.xaxis.set(major_locator=ticks, major_formatter=written)
    finite = [place for place in behind if math.isfinite(place)]
    if labels is None and (span is not None or finite):
        _shade(upper, lower, span or (min(finite), max(finite)), holes(finite), "mean" in answers)
    for axes in (upper, lower):
        finish(axes)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return figure


def _shade(
    upper: Axes, lower: Axes, span: tuple[float, float], gaps: list[tuple[float, float]], intervals: bool
) -> None:
    """Shade the parts of the axis without data, up to its ends."""
    left, right = upper.get_xlim()
    parts = [(left, min(span[0], right)), *gaps, (max(span[1], left), right)]
    shown = [(max(low, left), min(high, right)) for low, high in parts]
    label = f"no data here: do not trust {'narrow intervals' if intervals else 'high probabilities'}"
    for k, (low, high) in enumerate(part for part in shown if part[0] < part[1]):
        for axes in (upper, lower):
            named = label if k == 0 and axes is upper else None
            axes.axvspan(low, high, color="0.93", lw=0, zorder=-1, label=named)
    upper.set_xlim(left, right)


def _ring(ax: Axes, at: list[float], heights: Sequence[Cell] | NDArray[np.float64], answers: Answers) -> None:
    """Draw a ring around the rows that are beyond the training rows."""
    rows = [row for row, names in enumerate(answers.get("beyond", ())) if names]
    if rows:
        label = "outside the training range, or a new category"
        places, chosen = [at[row] for row in rows], [heights[row] for row in rows]
        ax.plot(places, chosen, "o", mfc="none", mec="k", mew=0.8, ms=9, label=label)


def _numbers(upper: Axes, lower: Axes, at: list[float], answers: Answers, target: str, level: float) -> None:
    mean, doubt = np.asarray(answers["mean"]), np.asarray(answers["epistemic_std"])
    # Thinner for many rows, which would otherwise be a solid block.
    wide, dot = (min(most, max(least, 200 / len(mean))) for least, most in ((0.6, 2.0), (1.5, 3.0)))
    ends = np.asarray(answers["lower"]), np.asarray(answers["upper"])
    bar = {"color": PALETTE[0], "lw": wide}
    upper.vlines(at, *ends, alpha=0.3, label=f"{percent(level)} interval", **bar)
    # Two standard deviations of a skewed posterior, such as that of a price, may reach below all plausible values.
    low, high = (np.clip(end, *ends) for end in (mean - 2 * doubt, mean + 2 * doubt))
    cut = bool(((low > mean - 2 * doubt) | (high < mean + 2 * doubt)).any())
    known = f"±2 epistemic std{', cut at the interval' if cut else ''}: uncertainty of the mean"
    upper.vlines(at, low, high, alpha=0.8, label=known, **bar)
    upper.plot(at, mean, "o", color="black", ms=dot, label="prediction")
    _ring(upper, at, mean, answers)
    upper.set_ylabel(target)
    lower.plot(at, answers["std"], "o", color=PALETTE[5], ms=dot, label="std, noise included")
    lower.plot(at, doubt, "o", color=PALETTE[0], ms=dot, label="epistemic std")
    lower.set_ylabel("std")


def _classes(upper: Axes, lower: Axes, at: list[float], answers: Answers, target: str) -> None:
    said = set(map(str, answers["class"]))
    every = [name.removeprefix("p=") for name in answers if name.startswith("p=")]  # also those of no row
    for k, name in enumerate(every if said <= set(every) else sorted(said)):
        chosen = [row for row, each in enumerate(answers["class"]) if each == name]
        if not chosen:
            continue
        places, sure = [at[row] for row in chosen], [answers["probability"][row] for row in chosen]
        mark = "osD^vP*"[k // len(PALETTE) % 7]
        upper.plot(places, sure, mark, color=PALETTE[k % len(PALETTE)], ms=4, label=f"{target}: {name}")
    _ring(upper, at, answers["probability"], answers)
    upper.set(ylabel="probability of the class", ylim=(0, 1.02))
    lower.plot(at, answers["entropy"], "o", color="k", ms=3, label="entropy")
    lower.plot(at, answers["mutual_information"], "x", color="k", ms=4, label="mutual information")
    lower.set_ylabel("nats")


def _labels(cells: Sequence[Cell]) -> list[str] | None:
    """Return the categories of a column, in order; None if it holds numbers."""
    if all(cell is None or as_number(cell) is not None for cell in cells):
        return None
    return sorted({as_label(cell) for cell in cells if cell is not None})


def _places(cells: Sequence[Cell], labels: list[str] | None) -> list[float]:
    """Return the positions of cells on the axis; NaN for missing cells."""
    if labels is None:
        return [float("nan") if number is None else number for number in map(as_number, cells)]
    return [float("nan") if cell is None else labels.index(as_label(cell)) for cell in cells]
