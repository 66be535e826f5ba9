"""Predictive bands along one input: a line with shaded bands, from standard deviations or from draws.

``draw_std_bands`` draws a mean with bands of ± k standard deviations (or standard errors), ``draw_fan`` the quantiles
of draws; the other two put several posteriors, or several sets of curves, into panels, to which data can be added.
"""

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pyro_dropout.mathematics.checks import check_count
from pyro_dropout.mathematics.errors import RangeError, ShapeError
from pyro_dropout.prediction.plot_style import PALETTE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

_DARKEST = 0.6  # the opacity that stacked shades approach; a single one has half of it


def draw_std_bands(
    axes: "Axes",
    x: object,
    mean: object,
    std: object,
    *,
    multiples: Sequence[float] = (1.0, 2.0),
    color: str = PALETTE[0],
    label: str | None = "mean",
    band_label: str | None = None,
) -> None:
    """Draw a mean with a shaded band for each of several multiples of its standard deviation (or standard error).

    Args:
        axes: matplotlib's axes to draw on.
        x: positions, (N,), in order; a tensor, an array or a list, like the next two.
        mean: the predicted mean at each position, (N,).
        std: its standard deviation, (N,).
        multiples: how many standard deviations each band reaches, up and down.
        color: the colour of the line and the bands.
        label: the line's name in a legend; None to leave it out.
        band_label: the bands' name there, one for all of them.

    Example:
        >>> from matplotlib.figure import Figure
        >>> from experiments.band_plots import draw_std_bands
        >>> axes = Figure().subplots()
        >>> draw_std_bands(axes, [0, 1, 2], [0.0, 0.5, 1.0], [0.1, 0.2, 0.4], band_label="±1σ and ±2σ")
        >>> axes.get_legend_handles_labels()[1]
        ['±1σ and ±2σ', 'mean']
    """
    at, middle, half = (_vector(name, value) for name, value in (("x", x), ("mean", mean), ("std", std)))
    if not len(at) == len(middle) == len(half):
        raise ShapeError(f"x, mean and std must have the same length; got {len(at)}, {len(middle)} and {len(half)}.")
    if bool((half < 0).any()) or not multiples or min(multiples) <= 0:
        raise RangeError(f"std must not be negative, and multiples must be positive; got {list(multiples)!r}.")
    alpha = _DARKEST / (1 + len(multiples))
    for k, multiple in enumerate(sorted(multiples, reverse=True)):
        reach = multiple * half
        label_once = None if k else band_label
        axes.fill_between(at, middle - reach, middle + reach, color=color, alpha=alpha, lw=0, label=label_once)
    axes.plot(at, middle, color=color, lw=1.3, label=label)


def draw_fan(
    axes: "Axes",
    x: object,
    draws: object,
    *,
    levels: Sequence[float] = (0.5, 0.95),
    color: str = PALETTE[0],
    label: str | None = "mean",
) -> None:
    """Draw the mean of draws and, at every position, the central share of them: one shaded band for each level.

    Args:
        axes: matplotlib's axes to draw on.
        x: positions, (N,), in order.
        draws: draws of the predicted quantity there, (T, N).
        levels: the shares of draws between a band's edges, each between 0 and 1.
        color: the colour of the line and the bands.
        label: the line's name in a legend; None to leave it out.

    Example:
        >>> import torch
        >>> from matplotlib.figure import Figure
        >>> from experiments.band_plots import draw_fan
        >>> axes = Figure().subplots()
        >>> draw_fan(axes, range(4), torch.randn(100, 4))
        >>> axes.get_legend_handles_labels()[1]
        ['95% of the draws', '50% of the draws', 'mean']
    """
    at, drawn = _vector("x", x), _numbers(draws)
    if drawn.dim() != 2 or drawn.shape[1] != len(at) or len(drawn) == 0:
        raise ShapeError(f"draws must have shape (T, N) with N = {len(at)} positions; got {tuple(drawn.shape)}.")
    if not levels or not all(0 < level < 1 for level in levels):
        raise RangeError(f"levels are shares of the draws, each between 0 and 1; got {list(levels)!r}.")
    alpha = _DARKEST / (1 + len(levels))
    for k, level in enumerate(sorted(levels, reverse=True)):
        low, high = drawn.quantile(torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=drawn.dtype), dim=0)
        axes.fill_between(at, low, high, color=color, alpha=alpha, lw=0)
        seen = 1 - (1 - alpha) ** (k + 1)  # drawn over the wider bands; an empty one for the legend
        axes.fill_between([], [], color=color, alpha=seen, lw=0, label=f"{level:.0%} of the draws")
    axes.plot(at, drawn.mean(0), color=color, lw=1.3, label=label)


def band_panels(
    x: object,
    answers: Mapping[str, tuple[object, object]],
    *,
    columns: int = 2,
    size: tuple[float, float] = (4.5, 3.0),
    **style: Any,
) -> "Figure":
    """Draw one panel for each posterior, with its mean and bands, on shared axes.

    Args:
        x: positions, (N,), in order.
        answers: the mean and the standard deviation there, both (N,), by panel title.
        columns: at most this many panels side by side.
        size: width and height of a panel, in inches.
        style: options of ``draw_std_bands``: ``multiples``, ``color``, ``label``, ``band_label``.

    Returns:
        A figure; its ``axes`` are in the order of ``answers``, and data or limits can be added to them.

    Example:
        >>> from experiments.band_plots import band_panels
        >>> two = {"dropout": ([0.0, 1.0], [0.1, 0.1]), "mean field": ([0.0, 1.0], [0.1, 0.3])}
        >>> [axes.get_title() for axes in band_panels([0, 1], two).axes]
        ['dropout', 'mean field']
    """
    figure = _grid("answers", answers, columns, size, share=True)
    for axes, (mean, std) in zip(figure.axes, answers.values(), strict=True):
        draw_std_bands(axes, x, mean, std, **style)
    return figure


def curve_panels(
    panels: Mapping[str, Mapping[str, tuple[object, ...]]],
    *,
    xlabel: str,
    ylabel: str = "",
    columns: int = 2,
    size: tuple[float, float] = (4.5, 3.0),
    styles: Mapping[str, Mapping[str, Any]] | None = None,
    levels: Mapping[str, float] | None = None,
    share: bool = False,
) -> "Figure":
    """Draw one panel for each set of curves, with one legend below for all of them.

    Args:
        panels: curves by name, by panel title: (x, y), or (x, y, error) for a band of ± error around y.
        xlabel: what x is, in all panels.
        ylabel: what y is, in all panels.
        columns: at most this many panels side by side.
        size: width and height of a panel, in inches.
        styles: matplotlib options of curves, by name; each other curve gets its own colour.
        levels: reference values by name, each a black line across all panels.
        share: whether all panels have the same limits.

    Returns:
        A figure; its ``axes`` are in the order of ``panels``.

    Example:
        >>> from experiments.band_plots import curve_panels
        >>> curves = {"dropout": ([0, 1], [0.1, 0.4]), "NUTS": ([0, 1], [0.2, 0.9], [0.1, 0.1])}
        >>> figure = curve_panels({"one layer": curves}, xlabel="x", styles={"NUTS": {"color": "black"}})
        >>> [text.get_text() for text in figure.legends[0].get_texts()]
        ['dropout', 'NUTS']
    """
    figure = _grid("panels", panels, columns, size, share)
    names = list(dict.fromkeys(name for curves in panels.values() for name in curves))
    known = {name: {"color": PALETTE[k % len(PALETTE)]} for k, name in enumerate(names)}
    shown: dict[str, Line2D] = {}
    for axes, curves in zip(figure.axes, panels.values(), strict=True):
        for name, (x, y, *error) in curves.items():
            style: dict[str, Any] = {"lw": 1.3} | known[name] | dict((styles or {}).get(name, {}))
            place, height = _vector("x", x), _vector("y", y)
            (shown[name],) = axes.plot(place, height, label=name, **style)
            for half in (_vector("error", each) for each in error):
                axes.fill_between(place, height - half, height + half, color=style["color"], alpha=0.2, lw=0)
        for (name, level), dashes in zip((levels or {}).items(), cycle(("--", ":", "-", "-.")), strict=False):
            shown[name] = axes.axhline(level, color="black", lw=1, ls=dashes, label=name)
        axes.set(xlabel=xlabel, ylabel=ylabel)
    # As many names side by side as fit: about eleven letters per inch, and six letters for each name's line.
    beside = int(11 * figure.get_size_inches()[0] / (6 + max(map(len, shown))))
    columns = max(1, min(4, len(shown), beside))
    figure.legend(list(shown.values()), list(shown), loc="outside lower center", ncols=columns, frameon=False)
    return figure


def class_panels(x: object, f: object, *, xlabel: str, images: object = None, classes: int = 3) -> "Figure":
    """Draw the softmax inputs and outputs of every draw along a line, as in the paper's figure of a rotated 1.

    Args:
        x: positions, (N,), in order.
        f: the network's outputs there in every draw, (T, N, C).
        xlabel: what x is.
        images: what the network saw at each position, (N, height, width), shown below; None to leave them out.
        classes: how many to show: those with the highest mean probability.

    Returns:
        A figure with two panels, inputs and outputs, and the images below each.

    Example:
        >>> import torch
        >>> from experiments.band_plots import class_panels
        >>> figure = class_panels([0.0, 1.0], torch.randn(20, 2, 5), xlabel="x")
        >>> [axes.get_ylabel() for axes in figure.axes]
        ['softmax input', 'softmax output']
    """
    from matplotlib.figure import Figure

    at, outputs = _vector("x", x), _numbers(f)
    if outputs.dim() != 3 or outputs.shape[1] != len(at) or len(outputs) == 0:
        raise ShapeError(f"f must have shape (T, N, C) with N = {len(at)} positions; got {tuple(outputs.shape)}.")
    check_count("classes", classes)
    heights = [6] if images is None else [6, 1]
    figure = Figure(figsize=(11, 4 if images is None else 4.8), layout="constrained")
    rows = figure.subplots(len(heights), 2, squeeze=False, height_ratios=heights)
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
    for axes in [] if images is None else rows[1]:
        axes.imshow(torch.cat(list(torch.as_tensor(images).cpu()), 1).numpy(), cmap="Greys")
        axes.axis("off")
    rows[0, 1].legend(frameon=False, loc="center left")
    return figure


def _grid(name: str, panels: Mapping[str, object], columns: int, size: tuple[float, float], share: bool) -> "Figure":
    """Return a figure with one pair of axes for each title, and no empty ones."""
    from matplotlib.figure import Figure

    check_count("columns", columns)
    if not panels:
        raise ShapeError(f"{name} must hold at least one panel, by its title; it is empty.")
    across = min(columns, len(panels))
    down = -(-len(panels) // across)
    figure = Figure(figsize=(size[0] * across, size[1] * down), layout="constrained")
    every = figure.subplots(down, across, sharex=share, sharey=share, squeeze=False).flatten()
    for axes in every[len(panels) :]:
        axes.remove()
    for axes, title in zip(figure.axes, panels, strict=True):
        axes.set_title(title)
        axes.tick_params(labelbottom=True)  # a panel above an empty slot would have no numbers otherwise
    return figure


def _numbers(value: object) -> Tensor:
    return torch.as_tensor(value).detach().cpu().double()


def _vector(name: str, value: object) -> Tensor:
    found = _numbers(value)
    if found.dim() != 1 or len(found) == 0:
        raise ShapeError(f"{name} must have one number per position, (N,); got shape {tuple(found.shape)}.")
    return found
