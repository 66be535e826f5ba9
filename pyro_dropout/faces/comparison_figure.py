"""The figures of a comparison: bands along one input, calibration curves, and scores with their errors."""

from typing import Any

import torch

from pyro_dropout.answers.calibration import coverage_curve
from pyro_dropout.answers.class_calibration import reliability
from pyro_dropout.answers.streams import is_class, is_normal
from pyro_dropout.faces.columns import COLUMNS
from pyro_dropout.faces.scores import targets_of

_COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
_LEVELS = torch.linspace(0.1, 0.95, 18)


def _colour(k: int) -> str:
    return _COLOURS[k % len(_COLOURS)]


def draw_bands(comparison: Any) -> Any:
    """Draw the predictive mean of every posterior with two bands, on axes that all share."""
    import matplotlib.pyplot as plt

    rows = [row for row in comparison.rows if row.curve is not None]
    # Below one another, for a long series needs the width.
    down = len(rows)
    figure, axes = plt.subplots(
        down, 1, figsize=(10, 1.7 * down + 0.8), sharex=True, sharey=True, squeeze=False, layout="constrained"
    )
    for k, (ax, row) in enumerate(zip(axes.flat, rows, strict=False)):
        x, mean, low, high, std = (part.double() for part in row.curve)
        colour = _colour(k)
        ax.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0, label="95 % of y")
        ax.fill_between(
            x, mean - 2 * std, mean + 2 * std, color=colour, alpha=0.4, linewidth=0, label="mean ± 2 epistemic"
        )
        ax.plot(x, mean, color=colour, linewidth=1.2, label="mean")
        train, test = ([part.squeeze(-1) for part in pair] for pair in (comparison.train, comparison.test))
        ax.plot(*train, ".", color="#444444", markersize=2.5, label="training")
        ax.plot(*test, "o", color="black", markersize=3, fillstyle="none", markeredgewidth=0.6, label="held back")
        ax.set_title(row.name, fontsize=10, loc="left", pad=3)
    y = comparison.train[1]
    spread = float(y.max() - y.min())
    axes[0, 0].set_ylim(float(y.min()) - 0.35 * spread, float(y.max()) + 0.35 * spread)
    axes[-1, 0].set_xlabel(comparison.settings.get("x", "x"))
    figure.supylabel(comparison.settings.get("y", "y"), fontsize=10)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False, fontsize=8)
    return figure


def draw_scores(comparison: Any) -> Any:
    """Draw calibration curves beside the main scores, with standard errors over seeds."""
    import matplotlib.pyplot as plt

    rows = [row for row in comparison.rows if row.answer is not None]
    keys = [key for key in ("log_lik", "rmse", "accuracy", "crps", "d_w1") if key in comparison.columns][:3]
    wide = [1.5, *[1.0] * len(keys)]
    figure, axes = plt.subplots(
        1, 1 + len(keys), figsize=(4 + 2.3 * len(keys), 1.8 + 0.35 * len(rows)), width_ratios=wide, squeeze=False,
        layout="constrained",
    )  # fmt: skip
    _calibration(axes[0, 0], rows, comparison.test[1])
    for place, key in enumerate(keys, 1):
        ax = axes[0, place]
        for k, row in enumerate(rows):
            if key in row.scores and row.scores[key].values:
                ax.errorbar(
                    row.scores[key].mean, k, xerr=row.scores[key].error or 0, fmt="o", color=_colour(k), capsize=3
                )
        ax.set_ylim(len(rows) - 0.5, -0.5)
        ax.set_yticks(range(len(rows)), [row.name for row in rows] if place == 1 else [""] * len(rows))
        better = {"more": " (more is better)", "less": " (less is better)"}[COLUMNS[key].better]
        ax.set_xlabel(COLUMNS[key].heading + better, fontsize=8)
        ax.grid(axis="x", alpha=0.25)
        ax.tick_params(labelsize=8)
    return figure


def _calibration(ax: Any, rows: list[Any], y: Any) -> None:
    ax.plot([0, 1], [0, 1], "--", color="#888888", linewidth=1, label="calibrated")
    regression = bool(rows) and is_normal(targets_of(rows[0].answer))
    for k, row in enumerate(rows):
        if not regression and not is_class(targets_of(row.answer)):
            continue  # counts have neither intervals nor confidences here
        if regression:
            curve = coverage_curve(row.answer, y, _LEVELS)
            across, up = curve.levels, curve.coverage
        else:
            bins = reliability(row.answer, y)
            kept = bins.count > 0
            across, up = bins.confidence[kept], bins.accuracy[kept]
        ax.plot(across.cpu(), up.cpu(), color=_colour(k), marker="." if not regression else None, label=row.name)
    ax.set(xlim=(0, 1), ylim=(0, 1))
    ax.set_xlabel("level of the central interval" if regression else "confidence", fontsize=8)
    ax.set_ylabel("share of targets inside" if regression else "accuracy", fontsize=8)
    ax.tick_params(labelsize=8)
    ax.legend(frameon=False, fontsize=7)
