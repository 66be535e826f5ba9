"""What is said of scores: standard errors, gains over a baseline, distances between predictions, learning curves."""

import math
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from pyro_dropout.mathematics.shapes import Float


def standard_error(values: Tensor, dim: int = 0) -> Tensor:
    """Return the standard error of the mean of independent values: their standard deviation over √n."""
    found: Tensor = values.std(dim) / values.shape[dim] ** 0.5
    return found


Scores = Mapping[tuple[str, str], Sequence[float]]  # (data set, method) -> a score for each split


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean over splits and its standard error, which is NaN for a single split."""
    found = torch.tensor(list(values), dtype=torch.float64)
    return found.mean().item(), standard_error(found).item() if len(found) > 1 else math.nan


def said(values: Sequence[float]) -> str:
    """Return the mean and its error as text, with more digits for small numbers."""
    middle, error = mean_and_error(values)
    digits = 2 if abs(middle) > 0.1 or error > 0.005 else 5
    return f"{middle:.{digits}f} ± {error:.{digits}f}"


def gain(scores: Scores, name: str, method: str, baseline: str) -> tuple[float, float]:
    """Return by how much a method is better than another on one data set, with its standard error.

    Splits are paired, because a hard split is hard for both methods.
    """
    mine, theirs = scores[name, method], scores[name, baseline]
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


def rms(values: Tensor) -> float:
    """Return the root of the mean square."""
    return values.square().mean().sqrt().item()


def apart(one: SimpleNamespace, other: SimpleNamespace, where: Tensor) -> tuple[float, float]:
    """Return the distance of two predictions: of means in units of their spread, and of spreads as a factor."""
    pooled = ((one.spread**2 + other.spread**2) / 2).sqrt()
    return rms(((one.mean - other.mean) / pooled)[where]), 2 ** rms((one.spread / other.spread)[where].log2())


def few_draws(f: Float[Tensor, "T N"], count: int = 10) -> tuple[float, float]:
    """Return how far the mean and the standard deviation of ``count`` draws are from those of all of them.

    The first is in units of the standard deviation of all draws, the second is relative. The draws are split into
    groups of ``count``, and errors are averaged over groups and points. For normal draws the mean of T is off by 1/√T
    standard deviations, and their standard deviation by about 1/√(2T) of itself.
    """
    groups = f[: len(f) // count * count].reshape(-1, count, f.shape[1])
    return rms((groups.mean(1) - f.mean(0)) / f.std(0)), rms(groups.std(1) / f.std(0) - 1)


def running_mean(scores: Any, window: int) -> NDArray[np.float64]:
    """Return the mean of the last ``window`` scores at every time, or of all scores so far if there are fewer."""
    found = np.asarray(scores, dtype=np.float64)
    return np.stack([found[max(0, k + 1 - window) : k + 1].mean(0) for k in range(len(found))])


def first_reach(scores: Any, level: float) -> NDArray[np.float64]:
    """Return the first time at which a score is at least ``level``; infinity if it never is."""
    there = np.asarray(scores, dtype=np.float64) >= level
    return np.where(there.any(0), there.argmax(0) + 1.0, np.inf)
