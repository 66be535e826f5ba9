"""Which columns of a table a prediction depends on: how much it changes when a column is shuffled.

A column is shuffled as a whole, with all features that it became. What is compared is the prediction, with no need of
targets: its mean, and its doubt, the standard deviation of y (for classes, the probabilities and their entropy).

Every shuffle is a prediction, and a prediction costs more the more inputs there are. In a wide table, only the columns
most related to the prediction are shuffled: those with the largest correlation, of their values or of their squares.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_dropout.errors import RangeError
from pyro_dropout.generative.likelihoods.moments import is_class
from pyro_dropout.mathematics.checks import check_count
from pyro_dropout.prediction.plot_style import PALETTE, finish, literal_text
from pyro_dropout.prediction.prediction import Prediction
from pyro_dropout.protocols import Axes, Figure, Record

_SHOWN = 15  # columns in a chart
_REPEATS = 3
_FEWEST, _MOST, _WORK = 30, 100, 100_000  # columns that are shuffled, and times how many inputs
_PARTS = ("mean", "mean_error", "doubt", "doubt_error")
_AXES = {
    (False, "mean"): "change of the mean",
    (False, "doubt"): "change of the standard deviation",
    (True, "mean"): "probability that moves to other classes",
    (True, "doubt"): "change of the entropy (nats)",
}


@dataclass(frozen=True, eq=False)
class Importance:
    """How much predictions depend on each column; made by ``FittedTable.explain``.

    Attributes:
        names: of the columns, the most important for the mean first.
        mean: the mean absolute change of E[y] when the column is shuffled, in the units of y; for classes the share of
            probability that moves to other classes.
        mean_error: its standard error.
        doubt: the same of the standard deviation of y; for classes, of the entropy in nats.
        doubt_error: its standard error.
        classes: whether targets are classes.
        about: what it is based on, in words.
    """

    names: tuple[str, ...]
    mean: tuple[float, ...]
    mean_error: tuple[float, ...]
    doubt: tuple[float, ...]
    doubt_error: tuple[float, ...]
    classes: bool
    about: str

    def __repr__(self) -> str:
        listed = ", ".join(f"{name} {value:.3g}" for name, value in zip(self.names, self.mean, strict=True))
        return f"Importance({listed})"

    @property
    def title(self) -> str:
        """The title of a chart: what it shows, and in a second line what it is based on."""
        return f"Change of the prediction when a column is shuffled\n{self.about}"

    def as_json(self) -> list[Record]:
        """Return a record for each column."""
        return [{"column": name} | {p: getattr(self, p)[k] for p in _PARTS} for k, name in enumerate(self.names)]

    def draw(self, ax: Axes, which: str = "mean") -> None:
        """Draw one bar chart on some axes, with ±2 standard errors: of the "mean" or of the "doubt"."""
        heights, errors = (getattr(self, part)[:_SHOWN] for part in (which, f"{which}_error"))
        names = [name if len(name) <= 24 else f"{name[:23]}…" for name in self.names[:_SHOWN]]
        places = range(len(names))
        ax.barh(places, heights, color=PALETTE[which == "doubt"], alpha=0.85, height=0.7)
        reach = [2 * error for error in errors]
        ax.errorbar(heights, places, xerr=reach, fmt="none", ecolor="0.3", label="±2 standard errors")
        ax.set_yticks(places, names)
        ax.invert_yaxis()
        ax.set(xlabel=_AXES[self.classes, which], xlim=(0, None))
        ax.xaxis.set_major_locator(_few_ticks())
        ax.legend(frameon=False, fontsize=8)
        finish(ax)

    @literal_text()
    def plot(self) -> Figure:
        """Draw two bar charts, of the mean and of the doubt; return matplotlib's figure."""
        import matplotlib.figure

        shown = min(len(self.names), _SHOWN)
        figure = matplotlib.figure.Figure(figsize=(9, 2.0 + 0.32 * shown), layout="constrained")
        for ax, which in zip(figure.subplots(1, 2), ("mean", "doubt"), strict=True):
            self.draw(ax, which)
        more = f"; {shown} of {len(self.names)} columns" if shown < len(self.names) else ""
        figure.suptitle(f"{self.title}{more}", fontsize=11)
        return figure


def _few_ticks() -> object:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(5)


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
    order = each[0].mean(-1).argsort(descending=True, stable=True)
    middle, error = (part[:, order] for part in (each.mean(-1), each.std(-1) / len(x) ** 0.5))
    parts: Any = (tuple(part[k].tolist()) for k in range(2) for part in (middle, error))
    names = list(columns)
    count = f"{len(x)} rows" if len(x) == given else f"{len(x)} of {given} rows"
    some = f"the {len(names)} of {wide} columns most related to the prediction"
    about = f"{count}{where}, {'each column' if len(names) == wide else some} shuffled {_REPEATS} times"
    mean, mean_error, doubt, doubt_error = parts
    ordered = tuple(names[k] for k in order.tolist())
    return Importance(ordered, mean, mean_error, doubt, doubt_error, classes, about)


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
