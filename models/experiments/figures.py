"""The pictures of the experiments: bands along one input, curves in panels, draws of a softmax."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from types import SimpleNamespace
from typing import Any

import matplotlib.figure
import torch
from torch import Tensor

from experiments.two_clusters import CLUSTERS, GRID, MIDDLE
from pyro_dropout.prediction.plot_style import PALETTE as PALETTE
from pyro_dropout.protocols import Axes, Figure

_DARKEST = 0.6  # the opacity that stacked shades approach; a single one has half of it


def draw_std_bands(
    axes: Axes, x: Any, mean: Any, std: Any, multiples: Sequence[float] = (1.0, 2.0), band_label: str = "", **style: Any
) -> None:
    """Draw a mean, (N,), with a shaded band for each of several multiples of its standard deviation (or error)."""
    at, middle, half = map(_numbers, (x, mean, std))
    style = {"color": PALETTE[0], "label": "mean", **style}
    alpha = _DARKEST / (1 + len(multiples))
    for k, multiple in enumerate(sorted(multiples, reverse=True)):
        ends = middle - multiple * half, middle + multiple * half
        axes.fill_between(at, *ends, color=style["color"], alpha=alpha, lw=0, label=None if k else band_label or None)
    axes.plot(at, middle, lw=1.3, **style)


def band_panels(x: Any, answers: Mapping[str, tuple[Any, Any]], columns: int, size: Any, **style: Any) -> Figure:
    """Draw one panel for each posterior, with its mean and bands, on shared axes; its title is the posterior's name."""
    figure = _grid(answers, columns, size, share=True)
    for axes, (mean, std) in zip(figure.axes, answers.values(), strict=True):
        draw_std_bands(axes, x, mean, std, **style)
    return figure


def curve_panels(
    panels: Mapping[str, Mapping[str, tuple[Any, ...]]],
    *,
    xlabel: str,
    ylabel: str = "",
    columns: int = 2,
    size: tuple[float, float] = (4.5, 3.0),
    styles: Mapping[str, Mapping[str, Any]] | None = None,
    levels: Mapping[str, float] | None = None,
    share: bool = False,
) -> Figure:
    """Draw one panel for each set of curves, with one legend below for all of them."""
    figure = _grid(panels, columns, size, share)
    names = list(dict.fromkeys(name for curves in panels.values() for name in curves))
    known = {name: {"color": PALETTE[k % len(PALETTE)]} for k, name in enumerate(names)}
    shown: dict[str, Any] = {}
    for axes, curves in zip(figure.axes, panels.values(), strict=True):
        for name, (x, y, *error) in curves.items():
            style: dict[str, Any] = {"lw": 1.3} | known[name] | dict((styles or {}).get(name, {}))
            place, height = _numbers(x), _numbers(y)
            (shown[name],) = axes.plot(place, height, label=name, **style)
            for half in map(_numbers, error):
                axes.fill_between(place, height - half, height + half, color=style["color"], alpha=0.2, lw=0)
        for (name, level), dashes in zip((levels or {}).items(), cycle(("--", ":", "-", "-.")), strict=False):
            shown[name] = axes.axhline(level, color="black", lw=1, ls=dashes, label=name)
        axes.set(xlabel=xlabel, ylabel=ylabel)
    # As many names side by side as fit: about eleven letters per inch, and six letters for each name's line.
    beside = int(11 * figure.get_size_inches()[0] / (6 + max(map(len, shown))))
    across = max(1, min(4, len(shown), beside))
    figure.legend(list(shown.values()), list(shown), loc="outside lower center", ncols=across, frameon=False)
    return figure


def class_panels(x: Tensor, f: Tensor, images: Tensor, *, xlabel: str, classes: int = 3) -> Figure:
    """Draw the softmax inputs and outputs of every draw along a line, as in the paper's figure of a rotated 1."""
    at, outputs = _numbers(x), _numbers(f)
    figure = matplotlib.figure.Figure(figsize=(11, 4.8), layout="constrained")
    rows = figure.subplots(2, 2, squeeze=False, height_ratios=[6, 1])
    probs = outputs.softmax(-1)
    shown = probs.mean((0, 1)).topk(min(classes, outputs.shape[-1])).indices.tolist()
    step = float(at[-1] - at[0]) / max(1, len(at) - 1)
    for axes, values, label in zip(rows[0], (outputs, probs), ("softmax input", "softmax output"), strict=True):
        for k, one in enumerate(shown):
            style: dict[str, Any] = {"color": PALETTE[k % len(PALETTE)], "marker": "_", "ls": "", "mew": 1.5, "ms": 7}
            aside = step * 0.27 * (k - (len(shown) - 1) / 2)  # classes side by side, without overlap
            axes.plot(at + aside, values[..., one].T, alpha=0.3, **style)
            axes.plot([], [], label=f"class {one}", **style)
        ends = (float(at[0]) - step / 2, float(at[-1]) + step / 2)
        axes.set(xlabel=xlabel, ylabel=label, xlim=ends, xticks=at.round())
    for axes in rows[1]:
        axes.imshow(torch.cat(list(images.cpu()), 1).numpy(), cmap="Greys")
        axes.axis("off")
    rows[0, 1].legend(frameon=False, loc="center left")
    return figure


def _grid(panels: Mapping[str, object], columns: int, size: tuple[float, float], share: bool) -> Figure:
    """Return a figure with one pair of axes for each title, and no empty ones."""
    across = min(columns, len(panels))
    down = -(-len(panels) // across)
    figure = matplotlib.figure.Figure(figsize=(size[0] * across, size[1] * down), layout="constrained")
    every = figure.subplots(down, across, sharex=share, sharey=share, squeeze=False).flatten()
    for axes in every[len(panels) :]:
        axes.remove()
    for axes, title in zip(figure.axes, panels, strict=True):
        axes.set_title(title)
        axes.tick_params(labelbottom=True)  # a panel above an empty slot would have no numbers otherwise
    return figure


def _numbers(value: Any) -> Tensor:
    return torch.as_tensor(value).detach().cpu().double()


# --- CO₂ beyond the data ----------------------------------------------------------------------------------------------


def co2_panels(answers: Mapping[str, Any], questions: Any, data: Any, columns: int, dashed: float) -> Figure:
    """Draw mean and ±½σ to ±2σ of each posterior, with the data, what came after them, and a dashed line."""
    shown = {title: (answer.mean[questions.grid], answer.std[questions.grid]) for title, answer in answers.items()}
    style: dict[str, Any] = {"multiples": (0.5, 1, 1.5, 2), "band_label": "±½σ to ±2σ"}  # the paper's shades
    figure = band_panels(questions.x[questions.grid, 0], shown, columns, (4.5, 3.0), **style)
    for axes in figure.axes:
        axes.plot(data.x, data.y, color="black", lw=0.7, label="data")
        axes.plot(data.test_x, data.test_y, ".", color="0.45", ms=2, label="what came")
        axes.vlines([data.x.max(), dashed], -6, 10, ["black", PALETTE[3]], "dashed", lw=0.8)
        axes.set(xlabel=data.x_name, ylabel="CO₂ (standardised)", xlim=(-1.8, 4), ylim=(-6, 10))
    figure.axes[0].legend(frameon=False, fontsize=8, loc="upper left")
    return figure


def spreads(mc: Mapping[tuple[int, str, float], Any], questions: Any) -> Figure:
    """Draw the std of f along x for networks by (depth, kind, dropped), a panel for each kind."""
    curves: dict[str, dict[str, tuple[Any, ...]]] = {}
    for (depth, kind, dropped), answer in mc.items():
        own = questions.x[questions.grid, 0], answer.spread[questions.grid]
        curves.setdefault(kind, {})[f"{depth} layers, dropout {dropped}"] = own
    figure = curve_panels(curves, xlabel="x (dashed: the data's end)", ylabel="std of f", size=(4.5, 3.8), share=True)
    for axes in figure.axes:
        axes.axvline(questions.x[questions.data].max(), color="black", ls="--", lw=0.8)
        axes.set(yscale="log")
    return figure


# --- in between two clusters ------------------------------------------------------------------------------------------


def gap_bands(posteriors: dict[str, tuple[Tensor, Tensor]], problem: SimpleNamespace) -> Figure:
    """Draw mean and ±1, ±2 std of f for each posterior, with NUTS' ±2 std dashed in every panel."""
    shown = {name: (mean[-len(GRID) :], std[-len(GRID) :]) for name, (mean, std) in posteriors.items()}
    figure = band_panels(GRID, shown, columns=4, size=(3.1, 2.7))
    mean, std = shown["NUTS"]
    for axes in figure.axes:
        axes.axvspan(*MIDDLE, color="0.93", lw=0, zorder=0)
        axes.plot(GRID, torch.stack([mean - 2 * std, mean + 2 * std], 1), color="black", lw=0.8, ls="--")
        axes.plot(problem.t, problem.y, "o", color=PALETTE[3], ms=3.5, mec="white", mew=0.3)
        axes.set(xlim=(-4, 4), ylim=(-2.6, 2.6))
    figure.supxlabel("t, the place on the line (grey: the middle of the gap; dashed: NUTS, ±2 std)", fontsize=10)
    figure.supylabel("f, its mean and ±1, ±2 std", fontsize=10)
    return figure


def gap_widths(stds: dict[tuple[int, int], dict[str, Tensor]]) -> Figure:
    """Draw the std of f along the line for each problem, {(depth, inputs): {name: std}}."""
    panels = {f"hidden layers: {depth}, inputs: {inputs}": found for (depth, inputs), found in stds.items()}
    curves = {title: {name: (GRID, found[name][-len(GRID) :]) for name in found} for title, found in panels.items()}
    figure = curve_panels(curves, xlabel="t (grey: data)", ylabel="std of f", styles={"NUTS": {"color": "black"}})
    for axes, found in zip(figure.axes, panels.values(), strict=True):
        for span in CLUSTERS:
            axes.axvspan(*span, color="0.9", lw=0, zorder=0)
        axes.set(xlim=(-3, 3), ylim=(0, 2 * float(found["NUTS"].max()) / 3))
    return figure
