"""One figure about a fitted table: whether predictions hold, how sure they are, and what they depend on.

With targets, the first panel compares predictions with them and the second says how often intervals hold, or how often
the class is right. Without, the first shows the predictions in order and the second which columns matter. Then come the
two columns that matter most. A table with one input has its curve instead.
"""

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
    over: str | None = None,
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
        over: a column to draw predictions over, whether or not it matters most.

    Example:
        >>> import torch, pyro_dropout as pd
        >>> from pyro_dropout.tables.column import Column
        >>> from pyro_dropout.tables.encoding import Encoding
        >>> from pyro_dropout.tabular.pictures import picture
        >>> model = pd.BayesianNet(torch.nn.Linear(2, 1))
        >>> guide = pd.AutoMeanField(model)
        >>> x, encoding = torch.randn(40, 2), Encoding((Column("age"), Column("size")), target="price")
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
    prediction, classes = predict(x), bool(encoding.classes)
    ends = None if classes else (interval or (lambda found: found.interval(level)))
    if not classes and prediction.one_of_several:
        raise PyroDropoutError(f"encoding has no classes, but predict gives {prediction.family}.")
    single = len(encoding.inputs) == 1
    if importance is None and not single:
        importance = explain(predict, x, encoding.places, repeats=2, rows=200)
    names = [encoding.inputs[0].name] if importance is None else list(importance.names[:2])
    names = names if over is None else [over, *(name for name in names if name != over)][: len(names)]
    shape = (1, 3) if single else (2, 2)
    figure = matplotlib.figure.Figure(figsize=(13, 4.6) if single else (11, 8.6), layout="constrained")
    panels = list(figure.subplots(*shape).flat)
    panels = panels[1:] + panels[:1] if single else panels  # the curve of a single input comes first
    far = torch.zeros(len(x), dtype=torch.bool) if unfamiliar is None else unfamiliar.cpu()
    if classes and y is not None:
        _confusion(panels[0], prediction, y, encoding, rows)
        reliability(prediction, y, bins=10).plot(panels[1])
        panels[1].set_title(f"How often the most probable class is right, {len(y)} {rows}", fontsize=10)
    elif classes:
        _sure(panels[0], prediction, encoding, far)
        _second(panels[1], prediction, importance, encoding)
    elif y is not None:
        assert ends is not None
        _compared(panels[0], prediction, ends(prediction), y, encoding, level, far, rows)
        _covered(panels[1], prediction, ends, y, level, interval is not None, rows)
    else:
        assert ends is not None
        _in_order(panels[0], prediction, ends(prediction), encoding, level, far)
        _second(panels[1], prediction, importance, encoding)
    for ax, name in zip(panels[2:], names, strict=False):
        found = dependence(predict, encoding, x, name, ends)
        _depends(ax, found, encoding, level, single, (x, y))
    for ax in panels[2 + len(names) :]:
        ax.set_visible(False)
    for ax in panels:
        finish(ax)
    figure.suptitle(title, fontsize=12)
    return figure


# --- numbers ----------------------------------------------------------------------------------------------------------


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
    _dots(ax, mean[some], actual[some], far[some])
    _scale(ax, torch.cat([actual, mean]), torch.cat([low[some], high[some]]), both=True)
    ax.set(xlabel=f"predicted {encoding.target}", ylabel=f"actual {encoding.target}")
    held = f"{percent(inside, 0)} of {len(mean)} {rows} in their {percent(level)} interval"
    ax.set_title(held + _rows(len(mean), len(some)), fontsize=10)
    ax.legend(frameon=False, fontsize=8, loc="upper left")


def _scale(ax: Axes, values: Tensor, ends: Tensor, both: bool) -> None:
    """Take logarithms where values are positive and wide; limit the y axis to them and all but the farthest ends."""
    positive = bool(values.min() > 0) and bool(values.max() > 20 * values.min())
    if positive:
        ax.set(yscale="log", **({"xscale": "log"} if both else {}))
    ends = ends[ends.isfinite() & ((ends > 0) if positive else True)]
    far = torch.quantile(ends, torch.tensor([0.01, 0.99], dtype=ends.dtype)) if len(ends) else ends
    low, high = (edge(torch.cat([values, far])).item() for edge in (torch.min, torch.max))
    ax.set_ylim((low / 1.1, high * 1.1) if positive else (1.04 * low - 0.04 * high, 1.04 * high - 0.04 * low))


def _rows(count: int, shown: int) -> str:
    """Return what a title says if not all rows are drawn."""
    return "" if shown == count else f", {shown} shown"


def _covered(
    ax: Axes, prediction: Prediction, ends: Interval, y: Tensor, level: float, changed: bool, rows: str
) -> None:
    """Draw the coverage of the posterior's central intervals at all levels, and that of the intervals in use."""
    least = least_level(prediction, y).flatten().cpu()
    levels = torch.linspace(0.02, 0.98, 49, dtype=torch.float64)
    shares = [(least <= each).double().mean().item() for each in levels.tolist()]
    _diagonal_band(ax, len(least))
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


def _in_order(
    ax: Axes, prediction: Prediction, ends: tuple[Tensor, Tensor], encoding: Encoding, level: float, far: Tensor
) -> None:
    """Draw predictions in ascending order, each with its interval."""
    centre = float(encoding.target_centre)
    mean, low, high = (part.detach().cpu()[:, 0].double() + centre for part in (prediction.mean, *ends))
    order = mean.argsort(stable=True)[_some(len(mean))]
    places = torch.linspace(1, len(mean), len(order))
    ax.vlines(places, low[order], high[order], color=PALETTE[0], alpha=0.3, lw=1.2, label=f"{percent(level)} interval")
    _dots(ax, places, mean[order], far[order])
    _scale(ax, mean, torch.cat([low[order], high[order]]), both=False)
    ax.set(xlabel="rows, in the order of their prediction", ylabel=f"predicted {encoding.target}")
    ax.set_title(f"Predictions of {len(mean)} rows{_rows(len(mean), len(order))}", fontsize=10)
    ax.legend(frameon=False, fontsize=8, loc="upper left")


# --- classes ----------------------------------------------------------------------------------------------------------


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


def _sure(ax: Axes, prediction: Prediction, encoding: Encoding, far: Tensor) -> None:
    """Draw the probability of the most probable class, by class."""
    best = prediction.probs.cpu().max(-1)
    order = best.values.argsort(stable=True)[_some(len(far))]
    places = torch.linspace(1, len(far), len(order))
    kept = torch.bincount(best.indices, minlength=len(encoding.classes)).argsort(descending=True, stable=True)[
        :_CLASSES
    ]
    for k in sorted(kept.tolist()):
        chosen = best.indices[order] == k
        if bool(chosen.any()):
            ax.plot(places[chosen], best.values[order][chosen], "o", ms=3, color=_colour(k), label=encoding.classes[k])
    if bool(far[order].any()):
        ax.plot(
            places[far[order]], best.values[order][far[order]], "x", color="k", ms=6, label="unlike the training rows"
        )
    ax.set(
        xlabel="rows, in the order of this probability", ylabel="probability of the most probable class", ylim=(0, 1.02)
    )
    cut = "" if len(kept) == len(encoding.classes) else f", {len(kept)} most common classes"
    shown = _rows(len(far), len(order)) + cut
    ax.set_title(f"How sure the predicted classes of {len(far)} rows are{shown}", fontsize=10)
    ax.legend(frameon=False, fontsize=8, loc="lower right", title=encoding.target)


# --- columns ----------------------------------------------------------------------------------------------------------


def _second(ax: Axes, prediction: Prediction, importance: Importance | None, encoding: Encoding) -> None:
    """Draw which columns matter; of a table with one input, how certain its rows are."""
    if importance is not None:
        draw_importance(ax, importance, "mean", encoding.target)
        ax.set_title(importance.title, fontsize=10)
        ax.legend(frameon=False, fontsize=8)
        return
    classes = bool(encoding.classes)
    doubt = prediction.entropy if classes else prediction.std
    ax.hist(doubt.flatten().cpu().tolist(), bins=30, color=PALETTE[5])
    ax.set(xlabel="entropy (nats)" if classes else f"standard deviation of {encoding.target}", ylabel="rows")
    ax.set_title("How uncertain the rows are", fontsize=10)


def _depends(
    ax: Axes, found: Dependence, encoding: Encoding, level: float, single: bool, data: tuple[Tensor, Tensor | None]
) -> None:
    """Draw how predictions vary with one column, with the mean band of intervals; for classes, a line for each."""
    centre = float(encoding.target_centre)
    named, at = bool(found.names), list(found.values)
    classes = bool(encoding.classes)
    if classes:
        common = found.mean.mean(0).argsort(descending=True, stable=True)[:_CLASSES].sort().values.tolist()
        for k in common:
            mean, doubt = found.mean[:, k], found.doubt[:, k]
            bounds = (mean - 2 * doubt).clamp_min(0), (mean + 2 * doubt).clamp_max(1)
            _band(ax, at, *bounds, named, _colour(k), 0.15, None)
            line = ("-", "--", ":")[k // len(PALETTE) % 3]  # from the eighth class on, colours are there twice
            ax.plot(at, mean, f"o{line}" if named else line, color=_colour(k), ms=4, label=encoding.classes[k])
        _band(ax, [at[0]], found.mean[:1, 0], found.mean[:1, 0], named, "k", 0.15, "±2 epistemic std")
        which = (
            "each"
            if len(common) == len(encoding.classes)
            else f"the {len(common)} likeliest of {len(encoding.classes)}"
        )
        ax.set(ylabel=f"probability of {which} {encoding.target}", ylim=(0, 1.02))
    else:
        mean, low, high = (part[:, 0].double() + centre for part in (found.mean, found.low, found.high))
        doubt = 2 * found.doubt[:, 0].double()
        every = "" if single else "mean "
        _band(ax, at, low, high, named, PALETTE[5], 0.3, f"{every}{percent(level)} interval of a row")
        inner = (mean - doubt).clamp(low, high), (mean + doubt).clamp(low, high)  # a skewed posterior's may stick out
        cut = bool(((inner[0] > mean - doubt) | (inner[1] < mean + doubt)).any())
        label = f"±2 epistemic std{', cut at the interval' if cut else ': doubt about the mean'}"
        _band(ax, at, *inner, named, PALETTE[0], 0.35, label)
        style = "o" if named or len(at) == 1 else "-"
        ax.plot(at, mean, style, color="k", lw=1.4, ms=4, label=f"{every}prediction")
        if single and data[1] is not None and not named:
            places = data[0][:, 0].double().cpu() + float(found.column.centre)
            ax.plot(places, data[1][:, 0].double().cpu() + centre, ".", color="0.4", ms=3, label="actual", zorder=0)
        ax.set_ylabel(encoding.target)
    if not named:
        inputs = data[0][:, encoding.places[found.column.name][0]].double().cpu() + float(found.column.centre)
        ax.plot(inputs[_some(len(inputs))], [0] * len(_some(len(inputs))), "|", color="0.3", ms=7, alpha=0.5,
                transform=ax.get_xaxis_transform(), clip_on=False)  # fmt: skip
    unit = f" ({found.column.notation.unit})" if found.column.notation.unit else ""
    ax.set_xlabel(f"{found.column.name}{unit}")
    _ticks(ax, found)
    averaged = "" if found.rows == 1 else f", averaged over {found.rows} rows"
    left = f", the {len(found.names)} most common of {found.categories}" if found.categories > len(found.names) else ""
    # Between axes and title: below the axes, names at an angle would push the label into the legend.
    shown = ax.legend(frameon=False, fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=4 if classes else 2)
    lines = -(-len(shown.get_texts()) // (4 if classes else 2))
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


def _colour(k: int) -> str:
    """Return the colour of a class, the same in all panels."""
    return PALETTE[k % len(PALETTE)]


def _band(
    ax: Axes, at: list[float], low: Tensor, high: Tensor, named: bool, colour: str, alpha: float, label: str | None
) -> None:
    """Draw a band over numbers, or bars over categories."""
    if named:
        ax.vlines(at, low, high, color=colour, alpha=alpha, lw=9, label=label)
    else:
        ax.fill_between(at, low, high, color=colour, alpha=alpha, lw=0, label=label)


def _dots(ax: Axes, at: Tensor, heights: Tensor, far: Tensor) -> None:
    """Draw rows as dots, those unlike the training rows in another colour."""
    ax.plot(at[~far], heights[~far], "o", color="k", ms=2.5)
    if bool(far.any()):
        ax.plot(at[far], heights[far], "o", color=PALETTE[3], ms=4, label="unlike the training rows")


def _some(rows: int) -> Tensor:
    """Return places of rows to draw, evenly chosen."""
    return torch.linspace(0, rows - 1, min(rows, _DRAWN)).round().long()


def _diagonal_band(ax: Axes, rows: int) -> None:
    """Draw where the shares of calibrated intervals lie, 95 % of the time."""
    level = torch.linspace(0, 1, 101, dtype=torch.float64)
    reach = _BAND * (level * (1 - level) / rows).sqrt()
    band = (level - reach).clamp_min(0), (level + reach).clamp_max(1)
    ax.fill_between(level, *band, color="0.8", alpha=0.6, lw=0, label="where calibrated ones lie, 95 % of the time")
    ax.plot([0, 1], [0, 1], color="0.4", lw=0.8)
