"""Methods side by side on several data sets: the gain of each over one of them, split by split."""

import math
from collections.abc import Mapping, Sequence

import torch
from matplotlib.figure import Figure

from experiments.standard_error import standard_error
from pyro_dropout.mathematics.errors import PyroDropoutError, ShapeError

Scores = Mapping[tuple[str, str], Sequence[float]]  # (data set, method) -> a score for each split


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean over splits and its standard error, which is NaN for a single split.

    Example:
        >>> from experiments.paired_gains import mean_and_error
        >>> mean_and_error([1.0, 2.0, 3.0, 2.0])[0]
        2.0
    """
    found = torch.tensor(list(values), dtype=torch.float64)
    return found.mean().item(), standard_error(found).item() if len(found) > 1 else math.nan


def said(values: Sequence[float]) -> str:
    """Return the mean and its error as text, with more digits for small numbers.

    Example:
        >>> from experiments.paired_gains import said
        >>> said([1.0, 2.0, 3.0, 2.0]), said([0.00026, 0.00028])
        ('2.00 ± 0.41', '0.00027 ± 0.00001')
    """
    middle, error = mean_and_error(values)
    digits = 2 if abs(middle) > 0.1 or error > 0.005 else 5
    return f"{middle:.{digits}f} ± {error:.{digits}f}"


def gain(scores: Scores, name: str, method: str, baseline: str) -> tuple[float, float]:
    """Return by how much a method is better than another on one data set, with its standard error.

    Splits are paired, because a hard split is hard for both methods.

    Example:
        >>> from experiments.paired_gains import gain
        >>> scores = {("boston", "a"): [1.0, 5.0], ("boston", "b"): [2.0, 6.0]}
        >>> gain(scores, "boston", "b", "a")
        (1.0, 0.0)
    """
    for each in (method, baseline):
        if (name, each) not in scores:
            raise PyroDropoutError(f"there is no score of {each!r} on {name!r}.")
    mine, theirs = scores[name, method], scores[name, baseline]
    if len(mine) != len(theirs):
        raise ShapeError(f"{method!r} and {baseline!r} must have the same splits of {name!r}.")
    return mean_and_error([a - b for a, b in zip(mine, theirs, strict=True)])


def wins(scores: Scores, method: str, baseline: str) -> list[str]:
    """Return the data sets on which a method's gain is more than its standard error."""
    both = [name for name, each in scores if each == method and (name, baseline) in scores]
    found = {name: gain(scores, name, method, baseline) for name in both}
    return [name for name, (more, error) in found.items() if more > error]  # never if the error is NaN


def plot_gains(scores: Scores, baseline: str, xlabel: str) -> Figure:
    """Plot the gain of every method on every data set, with its standard error; blue if it exceeds the error."""
    names, methods = (list(dict.fromkeys(key[k] for key in scores)) for k in (0, 1))
    shown = [method for method in methods if method != baseline]
    figure = Figure(figsize=(2.2 + 1.1 * len(names), 1.5 + 0.28 * len(shown)), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(names), sharey=True, squeeze=False)[0], names, strict=True):
        for k, method in enumerate(shown):
            if (name, method) in scores and (name, baseline) in scores:
                more, error = gain(scores, name, method, baseline)
                colour = "#0072B2" if more > error else "#999999"
                axes.errorbar(more, k, xerr=0.0 if math.isnan(error) else error, fmt="o", ms=4, color=colour)
        axes.axvline(0, color="black", lw=0.8)
        axes.set(title=name, yticks=range(len(shown)), yticklabels=shown)
        axes.tick_params(labelsize=7)
        axes.locator_params(axis="x", nbins=3)
    axes.invert_yaxis()  # in the order of a table; all panels share it
    figure.supxlabel(xlabel, fontsize="medium")
    return figure
