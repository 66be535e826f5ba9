"""A plot of predictions for the rows of a table along one column, with their uncertainty.

Rows differ in their other columns too, so each is drawn with its own interval and no line joins them.
"""

import itertools
import math
import random
from collections.abc import Mapping, Sequence

import numpy as np

from pyro_dropout.mathematics.errors import PyroDropoutError
from pyro_dropout.prediction.plot_style import PALETTE, categories_below, finish, literal_text, percent
from pyro_dropout.protocols import Axes, Figure
from pyro_dropout.tables.cells import Cell, as_label, as_number

Answers = Mapping[str, Sequence[Cell]]  # columns of a table of predictions

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
) -> Figure:
    """Draw predictions over one column of their table.

    Args:
        over: the column's name.
        cells: its cells, one for each prediction.
        answers: columns of ``pyro-dropout predict``: mean, std, epistemic_std, lower and upper; or class, probability,
            entropy and mutual_information.
        target: what is predicted.
        level: of the interval.
        measured: the same column and the target in the training table, drawn in the background (a subset if there
            are many); gaps without data are shaded.
        title: of the plot.
        dates: whether the column holds dates, as days since 1970-01-01.

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
    for k, (low, high) in enumerate(holes(behind) if labels is None else ()):
        for axes in (upper, lower):
            label = "no data here: do not trust narrow intervals" if k == 0 and axes is upper else None
            axes.axvspan(low, high, color="0.93", lw=0, zorder=-1, label=label)
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
    for axes in (upper, lower):
        finish(axes)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return figure


def _numbers(upper: Axes, lower: Axes, at: list[float], answers: Answers, target: str, level: float) -> None:
    mean, doubt = np.asarray(answers["mean"]), np.asarray(answers["epistemic_std"])
    # Thinner for many rows, which would otherwise be a solid block.
    wide, dot = (min(most, max(least, 200 / len(mean))) for least, most in ((0.6, 2.0), (1.5, 3.0)))
    bar = {"color": PALETTE[0], "lw": wide}
    upper.vlines(at, answers["lower"], answers["upper"], alpha=0.3, label=f"{percent(level)} interval", **bar)
    known = "±2 epistemic std: uncertainty of the mean"
    upper.vlines(at, mean - 2 * doubt, mean + 2 * doubt, alpha=0.8, label=known, **bar)
    upper.plot(at, mean, "o", color="black", ms=dot, label="prediction")
    upper.set_ylabel(target)
    lower.plot(at, answers["std"], "o", color=PALETTE[5], ms=dot, label="std, noise included")
    lower.plot(at, doubt, "o", color=PALETTE[0], ms=dot, label="epistemic std")
    lower.set_ylabel("std")


def _classes(upper: Axes, lower: Axes, at: list[float], answers: Answers, target: str) -> None:
    for k, name in enumerate(sorted(set(map(str, answers["class"])))):
        chosen = [row for row, each in enumerate(answers["class"]) if each == name]
        places, sure = [at[row] for row in chosen], [answers["probability"][row] for row in chosen]
        upper.plot(places, sure, "o", color=PALETTE[k % len(PALETTE)], ms=4, label=f"{target}: {name}")
    upper.set(ylabel="probability of the class", ylim=(0, 1.02))
    lower.plot(at, answers["entropy"], "o", color=PALETTE[5], ms=3, label="entropy")
    lower.plot(at, answers["mutual_information"], "o", color=PALETTE[0], ms=3, label="mutual information")
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
