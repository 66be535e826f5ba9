"""The figures of a comparison: bands along one input, calibration, and scores with their errors."""

from typing import cast

from torch import Tensor

from pyro_dropout.comparison.findings import REFERENCE, Findings, columns
from pyro_dropout.errors import PyroDropoutError
from pyro_dropout.generative.likelihoods.moments import is_class
from pyro_dropout.judging.scores.calibration import LEVELS, shares_inside
from pyro_dropout.judging.scores.calibration import draw_band as draw_coverage_band
from pyro_dropout.judging.scores.class_calibration import reliability
from pyro_dropout.prediction.plot_style import literal_text
from pyro_dropout.prediction.prediction import Prediction
from pyro_dropout.protocols import Axes, Figure

# Okabe and Ito's colour-blind-safe palette; from the seventh guide on, lines are dashed.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
GREY = "#6b6b6b"  # of the reference
_STYLES = ("-", "--", ":", "-.")
_MANY = 500  # points beyond which they are drawn as one image
_LONG = 24  # letters of a name in a legend


def looks(comparison: Findings) -> dict[str, tuple[str, str]]:
    """Return {name: (colour, line style)} for all figures: by position, and grey for the reference."""
    guides = [row.name for row in comparison.rows if row.name != REFERENCE]
    of = {name: (COLOURS[k % len(COLOURS)], _STYLES[k // len(COLOURS) % 4]) for k, name in enumerate(guides)}
    return {REFERENCE: (GREY, "-")} | of


def short(name: str) -> str:
    """Return a name short enough for a legend, without a leading _, which matplotlib would hide."""
    cut = name if len(name) <= _LONG else f"{name[: _LONG - 1]}…"
    return f" {cut}" if cut.startswith("_") else cut


# --- bands ------------------------------------------------------------------------------------------------------------


@literal_text()
def draw_bands(comparison: Findings) -> Figure:
    """Draw the predictive mean of every posterior with two bands, on shared axes."""
    import matplotlib.pyplot as plt

    curves = comparison.curves
    down = len(curves)  # one below the other: a long series needs the width
    figure, axes = plt.subplots(
        down, 1, figsize=(10, 1.7 * down + 0.8), sharex=True, sharey=True, squeeze=False, layout="constrained"
    )
    for ax, name in zip(axes.flat, curves, strict=True):
        draw_band(ax, comparison, name)
        ax.spines[["top", "right"]].set_visible(False)
    axes[-1, 0].set_xlabel(comparison.settings.get("x", "x"))
    figure.supylabel(comparison.settings.get("y", "y"), fontsize=10)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    shown = figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False, fontsize=8)
    for patch in shown.get_patches():  # grey: the legend is for all colours
        patch.set_facecolor((GREY, float(patch.get_facecolor()[-1])))
    shown.get_lines()[0].set_color(GREY)
    return figure


def draw_band(ax: Axes, comparison: Findings, name: str) -> None:
    """Draw one posterior's predictive mean, its two bands and the data, with limits common to all posteriors."""
    x, mean, low, high, std = (part.double() for part in comparison.curves[name])
    colour, _ = looks(comparison)[name]
    ax.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0, label="95 % of y")
    ax.fill_between(x, mean - 2 * std, mean + 2 * std, color=colour, alpha=0.4, linewidth=0, label="mean ± 2 epistemic")
    ax.plot(x, mean, color=colour, linewidth=1.2, label="mean")
    pairs = cast(list[tuple[Tensor, Tensor]], [comparison.train, comparison.test])  # a curve has one input
    train, test = ([part.cpu().squeeze(-1) for part in pair] for pair in pairs)
    many = len(train[0]) + len(test[0]) > _MANY
    ax.plot(*train, ".", color="#444444", markersize=2.5, label="training", rasterized=many)
    ax.plot(
        *test, "o", color="black", markersize=3, fillstyle="none", markeredgewidth=0.6, label="held back",
        rasterized=many,
    )  # fmt: skip
    ax.set_title(name, fontsize=10, loc="left", pad=3)
    spread = float(train[1].max() - train[1].min())
    ax.set_ylim(float(train[1].min()) - 0.35 * spread, float(train[1].max()) + 0.35 * spread)
    ax.margins(x=0)


# --- calibration ------------------------------------------------------------------------------------------------------


def calibration_curve(answer: Prediction, y: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return level and coverage, or confidence and accuracy; None where the noise has no distribution function."""
    if is_class(answer.target_distribution):
        bins = reliability(answer, y)
        kept = bins.count > 0
        return bins.confidence[kept].cpu(), bins.accuracy[kept].cpu()
    try:
        return LEVELS, shares_inside(answer, y, LEVELS)
    except PyroDropoutError:
        return None


def draw_calibration(ax: Axes, comparison: Findings) -> None:
    """Draw coverage against level, or accuracy against confidence, with bands that show what may be chance."""
    answers, y = comparison.answers, comparison.test[1]
    regression = not any(is_class(answer.target_distribution) for answer in answers.values())
    if regression:
        draw_coverage_band(ax, y.numel())
    ax.plot([0, 1], [0, 1], "--", color="#888888", linewidth=1, label="calibrated")
    for name, answer in answers.items():
        curve = calibration_curve(answer, y)
        if curve is not None:
            colour, style = looks(comparison)[name]
            if not regression:
                reliability(answer, y).draw_band(ax, colour, alpha=0.1)
            ax.plot(*curve, color=colour, linestyle=style, marker=None if regression else ".", label=short(name))
    ax.set(xlim=(0, 1), ylim=(0, 1))
    ax.set_xlabel("level of the central interval" if regression else "confidence")
    ax.set_ylabel("share of targets inside" if regression else "accuracy")


# --- scores -----------------------------------------------------------------------------------------------------------


@literal_text()
def draw_scores(comparison: Findings) -> Figure:
    """Draw calibration curves next to the main scores, with standard errors over seeds."""
    import matplotlib.pyplot as plt

    rows = [row for row in comparison.rows if row.answer is not None]
    keys = [key for key in ("log_lik", "rmse", "accuracy", "crps", "d_w1") if key in comparison.columns][:3]
    size = (4 + 2.3 * len(keys), 2.3 + 0.35 * len(rows))
    figure = plt.figure(figsize=size, layout="constrained")
    first, *others = figure.subplots(1, 1 + len(keys), width_ratios=[1.5, *[1.0] * len(keys)], squeeze=False)[0]
    draw_calibration(first, comparison)
    # Below the axes: inside them it would cover the band or a curve.
    handles, labels = first.get_legend_handles_labels()
    sizes = [0.6 + 0.08 * len(label) for label in labels]  # inches, slightly generous
    across = len(labels) if sum(sizes) < size[0] else max(1, int(size[0] / max(sizes)))
    figure.legend(handles, labels, loc="outside lower center", ncols=across, frameon=False, fontsize=8)
    for ax, key in zip(others, keys, strict=True):
        for k, row in enumerate(rows):
            if key in row.scores and row.scores[key].values:
                score, colour = row.scores[key], looks(comparison)[row.name][0]
                ax.errorbar(score.mean, k, xerr=score.error or 0, fmt="o", color=colour, capsize=3)
        ax.set_ylim(len(rows) - 0.5, -0.5)
        ax.set_yticks(range(len(rows)), [short(row.name) for row in rows] if ax is others[0] else [""] * len(rows))
        column = columns()[key]
        ax.set_xlabel(f"{column.heading} ({column.direction})" if column.direction else column.heading)
        ax.grid(axis="x", alpha=0.25)
    for ax in figure.axes:
        ax.tick_params(labelsize=8)
        ax.xaxis.label.set_fontsize(8)
        ax.yaxis.label.set_fontsize(8)
        ax.spines[["top", "right"]].set_visible(False)
    return figure
