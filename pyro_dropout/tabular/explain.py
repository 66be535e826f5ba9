"""Which columns of a table a prediction depends on: how much it changes when a column is shuffled.

A column is shuffled as a whole, with all features that it became. What is compared is the prediction, with no need of
targets: its mean, and its doubt, the standard deviation of y (for classes, the probabilities and their entropy).

Every shuffle is a prediction, and a prediction costs more the more inputs there are. In a wide table, only the columns
most related to the prediction are shuffled: those with the largest correlation, of their values or of their squares.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import pandas
import torch
from torch import Tensor

from pyro_dropout.errors import RangeError
from pyro_dropout.generative.likelihoods.moments import is_class
from pyro_dropout.mathematics.checks import check_count
from pyro_dropout.prediction.plot_style import PALETTE, finish, literal_text
from pyro_dropout.prediction.prediction import Prediction
from pyro_dropout.protocols import Figure, Record

_SHOWN = 15  # columns in a chart
_REPEATS = 3
_FEWEST, _MOST, _WORK = 30, 100, 100_000  # columns that are shuffled, and times how many inputs
_PARTS = ("mean", "mean_error", "doubt", "doubt_error")
_AXES = {
    False: ("change of the mean", "change of the standard deviation"),
    True: ("probability that moves to other classes", "change of the entropy (nats)"),
}


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
