"""What is drawn of a fitted table: predictions beside their targets, and which columns they depend on.

How much a prediction depends on a column is how much it changes when the column is shuffled, as a whole, with all
features that it became. What is compared is the prediction, with no need of targets: its mean, and its doubt, the
standard deviation of y (for classes, the probabilities and their entropy).

Every shuffle is a prediction, and a prediction costs more the more inputs there are. In a wide table, only the columns
most related to the prediction are shuffled: those with the largest correlation, of their values or of their squares.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import pandas
import torch
from torch import Tensor

from pyro_dropout.errors import RangeError, ShapeError
from pyro_dropout.generative.likelihoods.moments import is_class
from pyro_dropout.judging.scores.calibration import LEVELS, CoverageCurve, shares_inside
from pyro_dropout.judging.scores.class_calibration import reliability
from pyro_dropout.mathematics.checks import check_count
from pyro_dropout.prediction.plot_style import PALETTE, categories_below, finish, literal_text, percent
from pyro_dropout.prediction.prediction import Prediction
from pyro_dropout.protocols import Axes, Figure, Record
from pyro_dropout.tables.encoding import Encoding

_DRAWN = 250  # rows with an interval of their own
_CONFUSED = 12  # classes with a cell of their own
_SHOWN = 15  # columns in a chart
_REPEATS = 3
_FEWEST, _MOST, _WORK = 30, 100, 100_000  # columns that are shuffled, and times how many inputs
_PARTS = ("mean", "mean_error", "doubt", "doubt_error")
_AXES = {
    False: ("change of the mean", "change of the standard deviation"),
    True: ("probability that moves to other classes", "change of the entropy (nats)"),
}


@literal_text()
def picture(
    prediction: Prediction,
    y: Tensor,
    encoding: Encoding,
    *,
    ends: tuple[Tensor, Tensor] | None = None,
    level: float = 0.95,
    unfamiliar: Tensor | None = None,
    rows: str = "rows",
    title: str = "",
) -> Figure:
    """Draw how predictions compare with targets; return matplotlib's figure."""
    import matplotlib.figure

    if len(y) < 2:
        raise ShapeError(f"a picture needs at least 2 rows with a target; got {len(y)}.")
    figure = matplotlib.figure.Figure(figsize=(11, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    if encoding.classes:
        _confusion(left, prediction, y, encoding, rows)
        reliability(prediction, y, bins=10).plot(right)
        right.set_title(f"How often the most probable class is right, {len(y)} {rows}", fontsize=10)
    else:
        far = torch.zeros(len(y), dtype=torch.bool) if unfamiliar is None else unfamiliar.cpu()
        inside = _compared(left, prediction, ends or prediction.interval(level), y, encoding, level, far, rows)
        share = shares_inside(prediction, y, LEVELS)  # of whole numbers, more than the level: intervals reach to them
        CoverageCurve(LEVELS, share, torch.full_like(LEVELS, torch.nan), y.numel()).plot(right)
        right.lines[-1].set_label("the posterior's own intervals")
        if ends is not None:
            label = f"calibrated {percent(level)} interval: {percent(inside, 1)}"
            right.plot([level], [inside], "D", color=PALETTE[3], ms=7, label=label)
        right.legend(frameon=False, fontsize=8, loc="upper left")
        right.set_title(f"How often intervals hold, {len(y)} {rows}", fontsize=10)
    finish(right)
    figure.suptitle(title, fontsize=12)
    return figure


def _compared(
    ax: Axes,
    prediction: Prediction,
    ends: tuple[Tensor, Tensor],
    y: Tensor,
    encoding: Encoding,
    level: float,
    far: Tensor,
    rows: str,
) -> float:
    """Draw actual against predicted values, each with its interval; return how many are in theirs."""
    parts = (prediction.mean, *ends, y)
    mean, low, high, actual = (part.detach().cpu()[:, 0].double() + encoding.target_centre for part in parts)
    inside = ((low <= actual) & (actual <= high)).double().mean().item()
    some = torch.linspace(0, len(mean) - 1, min(len(mean), _DRAWN)).round().long()
    label = f"{percent(level)} interval"
    ax.vlines(mean[some], low[some], high[some], color=PALETTE[0], alpha=0.25, lw=1.2, label=label)
    reach = [min(mean.min(), actual.min()).item(), max(mean.max(), actual.max()).item()]
    ax.plot(reach, reach, color="0.4", lw=0.8, label="actual = predicted")
    for which, colour, label in ((~far[some], "k", ""), (far[some], PALETTE[3], "unlike the training rows")):
        if which.any():
            ax.plot(mean[some][which], actual[some][which], "o", color=colour, ms=2.5, label=label or None)
    if actual.min() > 0 and mean.min() > 0 and actual.max() > 20 * actual.min():
        ax.set(yscale="log", xscale="log")
    # All but the farthest ends of intervals: of a few rows they may be a thousand times as far away.
    known = torch.cat([low[some], high[some]])
    known = known[known.isfinite() & ((known > 0) | (ax.get_yscale() == "linear"))]
    ends_shown = [torch.quantile(known, share) for share in (0.01, 0.99)] if len(known) else []
    shown = torch.stack([actual.min(), actual.max(), mean.min(), mean.max(), *ends_shown])
    shown = shown[shown.isfinite()]
    ax.set_ylim(shown.min().item(), shown.max().item())
    finish(ax)
    ax.set(xlabel=f"predicted {encoding.target}", ylabel=f"actual {encoding.target}")
    held = f"{percent(inside, 0)} of {len(mean)} {rows} in their {percent(level)} interval"
    ax.set_title(held + (f", {len(some)} shown" if len(some) < len(mean) else ""), fontsize=10)
    ax.legend(frameon=False, fontsize=8, loc="upper left")
    return inside


def _confusion(ax: Axes, prediction: Prediction, y: Tensor, encoding: Encoding, rows: str) -> None:
    """Draw how often each class was taken for each other one."""
    from sklearn.metrics import ConfusionMatrixDisplay

    best, actual = prediction.probs.argmax(-1).cpu(), y.cpu()
    common = actual.bincount(minlength=len(encoding.classes)).argsort(descending=True, stable=True)[:_CONFUSED]
    labels = common.sort().values.tolist()
    names = [encoding.classes[k] for k in labels]
    how = {"labels": labels, "display_labels": names, "cmap": "Blues", "colorbar": False, "ax": ax}
    ConfusionMatrixDisplay.from_predictions(actual.numpy(), best.numpy(), **how)
    categories_below(ax, range(len(names)), names)
    ax.set(xlabel=f"most probable {encoding.target}", ylabel=f"actual {encoding.target}")
    more = "" if len(names) == len(encoding.classes) else f", the {len(names)} most common classes"
    right = percent((best == actual).double().mean().item(), 0)
    ax.set_title(f"{right} of {len(y)} {rows} right{more}", fontsize=10)


# --- which columns matter ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Importance:
    """How much predictions depend on each column; made by ``FittedTable.explain``.

    Attributes:
        table: a row for each column, the most important for the mean first. ``mean`` is the mean absolute change of
            E[y] when the column is shuffled, in the units of y; for classes the share of probability that moves to
            other classes. ``doubt`` is the same of the standard deviation of y; for classes, of the entropy in nats.
            ``mean_error`` and ``doubt_error`` are their standard errors.
        classes: whether targets are classes.
        about: what it is based on, in words.
    """

    table: pandas.DataFrame
    classes: bool
    about: str

    @property
    def names(self) -> list[str]:
        """The columns, the most important first."""
        return list(self.table.index)

    def as_json(self) -> list[Record]:
        """Return a record for each column."""
        return [{"column": name} | row for name, row in zip(self.names, self.table.to_dict("records"), strict=True)]

    @literal_text()
    def plot(self) -> Figure:
        """Draw two bar charts with ±2 standard errors, of the mean and of the doubt; return matplotlib's figure."""
        import matplotlib.figure
        from matplotlib.ticker import MaxNLocator

        shown = self.table.head(_SHOWN)
        names = [name if len(name) <= 24 else f"{name[:23]}…" for name in shown.index]
        figure = matplotlib.figure.Figure(figsize=(9, 2.0 + 0.32 * len(shown)), layout="constrained")
        for k, (ax, label) in enumerate(zip(figure.subplots(1, 2), _AXES[self.classes], strict=True)):
            heights, errors, places = shown[_PARTS[2 * k]], 2 * shown[_PARTS[2 * k + 1]], range(len(shown))
            ax.barh(places, heights, color=PALETTE[k], alpha=0.85, height=0.7)
            ax.errorbar(heights, places, xerr=errors, fmt="none", ecolor="0.3", label="±2 standard errors")
            ax.set_yticks(places, names)
            ax.invert_yaxis()
            ax.set(xlabel=label, xlim=(0, None))
            ax.xaxis.set_major_locator(MaxNLocator(5))
            ax.legend(frameon=False, fontsize=8)
            finish(ax)
        more = f"; {len(shown)} of {len(self.table)} columns" if len(shown) < len(self.table) else ""
        figure.suptitle(f"Change of the prediction when a column is shuffled\n{self.about}{more}", fontsize=11)
        return figure


def explain(
    predict: Callable[[Tensor], Prediction],
    x: Tensor,
    columns: Mapping[str, Sequence[int]],
    *,
    rows: int = 500,
    seed: int = 0,
    where: str = "",
) -> Importance:
    """Return how much predictions change when each column, of several places in x, is shuffled among the rows.

    Columns that go together share what they are worth: if one is shuffled, the other still tells. Shuffled rows may be
    unlike any real row. Of more than a hundred columns, fewer if inputs are thousands, only those most related to the
    prediction are shuffled; a column that matters only together with others may then be left out.
    """
    check_count("rows", rows, 2)
    if len(x) < 2:
        raise RangeError(f"at least 2 rows are needed to shuffle them; got {len(x)}.")
    given, wide, generator = len(x), len(columns), torch.Generator().manual_seed(seed)
    x = x[torch.randperm(len(x), generator=generator, device="cpu")[:rows]]
    first = predict(x)
    base, classes = _said(first), is_class(first.target_distribution)
    columns = _most_related(x.to("cpu", torch.float64), torch.cat(base, 1), columns)
    found = []
    for places in map(list, columns.values()):
        changes = torch.zeros(2, len(x), dtype=torch.float64)
        for _ in range(_REPEATS):
            other = x.clone()
            other[:, places] = x[torch.randperm(len(x), generator=generator, device="cpu")][:, places]
            now = _said(predict(other))
            changes += torch.stack([(new - old).abs().sum(-1) for new, old in zip(now, base, strict=True)])
        found.append(changes / _REPEATS)
    each = torch.stack(found, 1)  # (mean and doubt, columns, rows)
    each[0] /= 2 if classes else 1  # what one class loses another gains
    parts = torch.stack([each.mean(-1), each.std(-1) / len(x) ** 0.5], 1).flatten(0, 1)
    table = pandas.DataFrame(parts.T.numpy(), list(columns), _PARTS).sort_values("mean", ascending=False, kind="stable")
    count = f"{len(x)} rows" if len(x) == given else f"{len(x)} of {given} rows"
    related = f"the {len(columns)} of {wide} columns most related to the prediction"
    some = "each column" if len(columns) == wide else related
    return Importance(table, classes, f"{count}{where}, {some} shuffled {_REPEATS} times")


def _most_related(x: Tensor, said: Tensor, columns: Mapping[str, Sequence[int]]) -> Mapping[str, Sequence[int]]:
    """Return the columns to shuffle: those whose values, or squares, correlate most with what is said of rows."""
    most = max(_FEWEST, min(_MOST, _WORK // x.shape[1]))
    if len(columns) <= most:
        return columns

    def standardised(values: Tensor) -> Tensor:
        apart = values - values.mean(0)
        return apart / apart.square().sum(0).sqrt().clamp_min(1e-12)

    said = standardised(said)
    related = torch.stack([standardised(part).T @ said for part in (x, x.square())]).abs().amax((0, 2))  # (Q,)
    strength = torch.stack([related[list(places)].max() for places in columns.values()])
    chosen = set(strength.topk(most).indices.tolist())
    return {name: places for k, (name, places) in enumerate(columns.items()) if k in chosen}


def _said(prediction: Prediction) -> tuple[Tensor, Tensor]:
    """Return the mean and the doubt of each row, (N, D), on the CPU in float64."""
    classes = is_class(prediction.target_distribution)
    doubt = prediction.entropy.reshape(len(prediction.mean), -1) if classes else prediction.std
    return prediction.mean.to("cpu", torch.float64), doubt.to("cpu", torch.float64)
