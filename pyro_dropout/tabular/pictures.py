"""One figure about a fitted table: whether predictions hold, how sure they are, and what they depend on.

With targets, the first panel compares predictions with them, and the second says how often intervals hold, or how often
the class is right. Without, one panel says which columns matter. Then come the two columns that matter most.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from pyro_dropout.errors import PyroDropoutError, ShapeError
from pyro_dropout.judging.scores.calibration import least_level
from pyro_dropout.judging.scores.class_calibration import reliability
from pyro_dropout.mathematics.checks import check_level
from pyro_dropout.mathematics.shapes import Bool, Float
from pyro_dropout.prediction.plot_style import PALETTE, categories_below, finish, literal_text, percent
from pyro_dropout.prediction.prediction import Prediction
from pyro_dropout.protocols import Axes, Figure
from pyro_dropout.tables.encoding import Encoding
from pyro_dropout.tabular.explain import Importance, Predict, draw_importance, explain
from pyro_dropout.tabular.partial_dependence import Dependence, Interval, dependence

_DRAWN = 250  # rows with an interval of their own
_CLASSES = 6  # with a line of their own
_CONFUSED = 12  # classes with a cell of their own
_BAND = 1.959963984540054  # for a 95 % band of counts


@literal_text()
def picture(
    predict: Predict,
    encoding: Encoding,
    x: Float[Tensor, "N Q"],
    y: Tensor | None = None,
    *,
    level: float = 0.95,
    interval: Interval | None = None,
    importance: Importance | None = None,
    unfamiliar: Bool[Tensor, " N"] | None = None,
    rows: str = "held-back rows",
    title: str = "",
) -> Figure:
    """Draw what predictions for some rows of a table are worth, and what they depend on.

    Args:
        predict: predicts inputs, (N, Q), samples kept, with the same draws at each call.
        encoding: how the columns became inputs, and the target a number or a class.
        x: inputs of the rows.
        y: their targets, (N, 1), as the encoding centres them, or class indices, (N,); None if they are not known.
        level: of the intervals.
        interval: gives the ends of the intervals of a prediction, such as a ``Conformal``'s; by default the
            posterior's own. With y, it must not be calibrated on these rows: it would hold on them by construction.
        importance: of the columns; computed if it is not given.
        unfamiliar: which rows are unlike the training rows; they are drawn in another colour.
        rows: what the rows are, for titles.
        title: of the figure.

    Example:
        >>> import torch, pyro_dropout as pd
        >>> from pyro_dropout.tables.encoding import Column, Encoding
        >>> from pyro_dropout.tabular.pictures import picture
        >>> model = pd.BayesianNet(torch.nn.Linear(2, 1))
        >>> guide = pd.AutoMeanField(model)
        >>> numbers = Column("age", fill=(0.0,)), Column("size", fill=(0.0,))
        >>> x, encoding = torch.randn(40, 2), Encoding(numbers, target="price")
        >>> def ask(x):
        ...     return pd.predict(model, guide, x, samples=20, seed=0)
        >>> [axes.get_xlabel() for axes in picture(ask, encoding, x, torch.randn(40, 1)).axes][:2]
        ['predicted price', 'level of the interval']
    """
    import matplotlib.figure

    check_level("level", level)
    if len(x) < 2 or (y is not None and len(y) != len(x)):
        given = "" if y is None else f" and {len(y)} targets"
        raise ShapeError(f"x must have at least 2 rows, and y as many; got {len(x)} rows{given}.")
    prediction, ends = predict(x), interval or (lambda found: found.interval(level))
    if not encoding.classes and prediction.one_of_several:
        raise PyroDropoutError(f"encoding has no classes, but predict gives {prediction.family}.")
    if importance is None:
        importance = explain(predict, x, encoding.places, repeats=2, rows=200)
    panels: list[Callable[[Axes], None]] = []
    if y is None:
        panels.append(lambda ax: _matters(ax, importance, encoding))
    elif encoding.classes:
        panels.append(lambda ax: _confusion(ax, prediction, y, encoding, rows))
        panels.append(lambda ax: _right(ax, prediction, y, rows))
    else:
        far = torch.zeros(len(x), dtype=torch.bool) if unfamiliar is None else unfamiliar.cpu()
        panels.append(lambda ax: _compared(ax, prediction, ends(prediction), y, encoding, level, far, rows))
        panels.append(lambda ax: _covered(ax, prediction, ends, y, level, interval is not None, rows))
    for name in importance.names[:2]:
        found = dependence(predict, encoding, x, name, None if encoding.classes else ends)
        panels.append(lambda ax, found=found: _depends(ax, found, encoding, level, x, y))  # type: ignore[misc]
    shape = (2, 2) if len(panels) == 4 else (1, len(panels))
    figure = matplotlib.figure.Figure(figsize=(5.5 * shape[1], 4.3 * shape[0]), layout="constrained")
    for ax, draw in zip(figure.subplots(*shape, squeeze=False).flat, panels, strict=True):
        draw(ax)
        finish(ax)
    figure.suptitle(title, fontsize=12)
    return figure


# --- predictions and targets ------------------------------------------------------------------------------------------


def _compared(
    ax: Axes,
    prediction: Prediction,
    ends: tuple[Tensor, Tensor],
    y: Tensor,
    encoding: Encoding,
    level: float,
    far: Tensor,
    rows: str,
) -> None:
    """Draw actual against predicted values, each with its interval."""
    centre = float(encoding.target_centre)
    mean, low, high, actual = (part.detach().cpu()[:, 0].double() + centre for part in (prediction.mean, *ends, y))
    inside = ((low <= actual) & (actual <= high)).double().mean().item()
    some = _some(len(mean))
    ax.vlines(
        mean[some], low[some], high[some], color=PALETTE[0], alpha=0.25, lw=1.2, label=f"{percent(level)} interval"
    )
    reach = [min(mean.min(), actual.min()).item(), max(mean.max(), actual.max()).item()]
    ax.plot(reach, reach, color="0.4", lw=0.8, label="actual = predicted")
    ax.plot(mean[some][~far[some]], actual[some][~far[some]], "o", color="k", ms=2.5)
    if bool(far[some].any()):
        strange = mean[some][far[some]], actual[some][far[some]]
        ax.plot(*strange, "o", color=PALETTE[3], ms=4, label="unlike the training rows")
    _scale(ax, torch.cat([actual, mean]), torch.cat([low[some], high[some]]))
    ax.set(xlabel=f"predicted {encoding.target}", ylabel=f"actual {encoding.target}")
    held = f"{percent(inside, 0)} of {len(mean)} {rows} in their {percent(level)} interval"
    ax.set_title(held + (f", {len(some)} shown" if len(some) < len(mean) else ""), fontsize=10)
    ax.legend(frameon=False, fontsize=8, loc="upper left")


def _scale(ax: Axes, values: Tensor, ends: Tensor) -> None:
    """Take logarithms where values are positive and wide; limit the y axis to them and all but the farthest ends."""
    positive = bool(values.min() > 0) and bool(values.max() > 20 * values.min())
    if positive:
        ax.set(yscale="log", xscale="log")
    ends = ends[ends.isfinite() & ((ends > 0) if positive else True)]
    far = torch.quantile(ends, torch.tensor([0.01, 0.99], dtype=ends.dtype)) if len(ends) else ends
    low, high = (edge(torch.cat([values, far])).item() for edge in (torch.min, torch.max))
    ax.set_ylim((low / 1.1, high * 1.1) if positive else (1.04 * low - 0.04 * high, 1.04 * high - 0.04 * low))


def _covered(
    ax: Axes, prediction: Prediction, ends: Interval, y: Tensor, level: float, changed: bool, rows: str
) -> None:
    """Draw the coverage of the posterior's central intervals at all levels, and that of the intervals in use."""
    least = least_level(prediction, y).flatten().cpu()
    levels = torch.linspace(0.02, 0.98, 49, dtype=torch.float64)
    shares = [(least <= each).double().mean().item() for each in levels.tolist()]
    diagonal = torch.linspace(0, 1, 101, dtype=torch.float64)
    reach = _BAND * (diagonal * (1 - diagonal) / len(least)).sqrt()
    band = (diagonal - reach).clamp_min(0), (diagonal + reach).clamp_max(1)
    ax.fill_between(diagonal, *band, color="0.8", alpha=0.6, lw=0, label="where calibrated ones lie, 95 % of the time")
    ax.plot([0, 1], [0, 1], color="0.4", lw=0.8)
    ax.plot(levels, shares, color=PALETTE[0], lw=1.6, label="the posterior's own intervals")
    if changed:
        low, high = ends(prediction)
        target = prediction.checked_targets(y)
        share = ((low <= target) & (target <= high)).double().mean().item()
        label = f"calibrated {percent(level)} interval: {percent(share, 1)}"
        ax.plot([level], [share], "D", color=PALETTE[3], ms=7, label=label)
    ax.set(xlabel="level of the interval", ylabel="share of rows inside", xlim=(0, 1), ylim=(0, 1))
    ax.set_title(f"How often intervals hold, {len(least)} {rows}", fontsize=10)
    ax.legend(frameon=False, fontsize=8, loc="upper left")


def _confusion(ax: Axes, prediction: Prediction, y: Tensor, encoding: Encoding, rows: str) -> None:
    """Draw how often each class was taken for each other one."""
    count, best = len(encoding.classes), prediction.probs.argmax(-1).cpu()
    table = torch.bincount(y.cpu().long() * count + best, minlength=count**2).reshape(count, count)
    right = table.diag().sum().item() / len(y)
    common = table.sum(1).argsort(descending=True, stable=True)[:_CONFUSED].sort().values
    shown = table[common][:, common]
    shares = shown / shown.sum(1, keepdim=True).clamp_min(1)
    ax.imshow(shares.numpy(), cmap="Blues", vmin=0, vmax=1)
    for row, column in ((a, b) for a in range(len(shown)) for b in range(len(shown))):
        style = {"ha": "center", "va": "center", "color": "w" if shares[row, column] > 0.5 else "k"}
        told = f"{shown[row, column].item():,}\n{100 * shares[row, column]:.0f} %"  # the colour is the share
        ax.text(column, row, told, fontsize=9 if len(shown) <= _CLASSES else 6, **style)
    names = [encoding.classes[k] for k in common.tolist()]
    categories_below(ax, range(len(names)), names)
    ax.set_yticks(range(len(names)), names)
    ax.set(xlabel=f"most probable {encoding.target}", ylabel=f"actual {encoding.target}")
    more = "" if len(names) == count else f", the {len(names)} most common classes"
    ax.set_title(f"{percent(right, 0)} of {len(y)} {rows} right{more}\ncolour: share of the actual class", fontsize=10)


def _right(ax: Axes, prediction: Prediction, y: Tensor, rows: str) -> None:
    reliability(prediction, y, bins=10).plot(ax)
    ax.set_title(f"How often the most probable class is right, {len(y)} {rows}", fontsize=10)


# --- columns ----------------------------------------------------------------------------------------------------------


def _matters(ax: Axes, importance: Importance, encoding: Encoding) -> None:
    draw_importance(ax, importance, "mean", encoding.target)
    ax.set_title(importance.title, fontsize=10)
    ax.legend(frameon=False, fontsize=8)


def _depends(ax: Axes, found: Dependence, encoding: Encoding, level: float, x: Tensor, y: Tensor | None) -> None:
    """Draw how predictions vary with one column, with the mean band of intervals; for classes, a line for each."""
    named, at, several = bool(found.names), list(found.values), ""
    if encoding.classes:
        common = found.mean.mean(0).argsort(descending=True, stable=True)[:_CLASSES].sort().values.tolist()
        for k in common:
            mean, doubt = found.mean[:, k], 2 * found.doubt[:, k]
            colour = PALETTE[k % len(PALETTE)]
            line = ("-", "--", ":")[k // len(PALETTE) % 3]  # from the eighth class on, colours are there twice
            _band(ax, at, (mean - doubt).clamp_min(0), (mean + doubt).clamp_max(1), named, colour, 0.15)
            ax.plot(at, mean, f"o{line}" if named else line, color=colour, ms=4, label=encoding.classes[k])
        every = "each" if len(common) == len(encoding.classes) else f"the {len(common)} likeliest"
        ax.set(ylabel=f"probability of {every} {encoding.target}, ±2 epistemic std", ylim=(0, 1.02))
    else:
        centre = float(encoding.target_centre)
        mean, low, high = (part[:, 0].double() + centre for part in (found.mean, found.low, found.high))
        doubt = 2 * found.doubt[:, 0].double()
        several = "" if found.rows == 1 else "mean "
        _band(ax, at, low, high, named, PALETTE[5], 0.3, f"{several}{percent(level)} interval of a row")
        inner = (mean - doubt).clamp(low, high), (mean + doubt).clamp(low, high)  # a skewed posterior's may stick out
        _band(ax, at, *inner, named, PALETTE[0], 0.35, "±2 epistemic std: doubt about the mean")
        ax.plot(at, mean, "o" if named or len(at) == 1 else "-", color="k", lw=1.4, ms=4, label=f"{several}prediction")
        ax.set_ylabel(encoding.target)
    if not named:
        inputs = x[:, encoding.places[found.column.name][0]].double().cpu() + float(found.column.centre)
        if found.rows == 1 and y is not None and not encoding.classes:
            actual = y[:, 0].double().cpu() + float(encoding.target_centre)
            ax.plot(inputs, actual, ".", color="0.4", ms=3, label="actual", zorder=0)
        few = inputs[_some(len(inputs))]
        ax.plot(few, [0] * len(few), "|", color="0.3", ms=7, alpha=0.5,
                transform=ax.get_xaxis_transform(), clip_on=False)  # fmt: skip
    unit = f" ({found.column.notation.unit})" if found.column.notation.unit else ""
    ax.set_xlabel(f"{found.column.name}{unit}")
    _ticks(ax, found)
    averaged = "" if found.rows == 1 else f", averaged over {found.rows} rows"
    left = f", the {len(found.names)} most common of {found.categories}" if found.categories > len(found.names) else ""
    # Between axes and title: below the axes, names at an angle would push the label into the legend.
    across = 4 if encoding.classes else 2
    shown = ax.legend(frameon=False, fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=across)
    lines = -(-len(shown.get_texts()) // across)
    ax.set_title(f"Prediction by {found.column.name}{left}{averaged}", fontsize=10, pad=8 + 13 * lines)


def _ticks(ax: Axes, found: Dependence) -> None:
    """Write the values of a category or a date."""
    import matplotlib.dates

    if found.names:
        categories_below(ax, found.values, found.names)
    elif found.column.notation.kind == "date":
        places = matplotlib.dates.AutoDateLocator()  # type: ignore[no-untyped-call]
        written = matplotlib.dates.ConciseDateFormatter(places)  # type: ignore[no-untyped-call]
        ax.xaxis.set(major_locator=places, major_formatter=written)


def _band(
    ax: Axes, at: list[float], low: Tensor, high: Tensor, named: bool, colour: str, alpha: float, label: str = ""
) -> None:
    """Draw a band over numbers, or bars over categories."""
    if named:
        ax.vlines(at, low, high, color=colour, alpha=alpha, lw=9, label=label)
    else:
        ax.fill_between(at, low, high, color=colour, alpha=alpha, lw=0, label=label)


def _some(rows: int) -> Tensor:
    """Return places of rows to draw, evenly chosen."""
    return torch.linspace(0, rows - 1, min(rows, _DRAWN)).round().long()
