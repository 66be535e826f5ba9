"""Which columns of a table a prediction depends on: how much it changes when a column is shuffled.

A column is shuffled as a whole, with all features that it became. What is compared is the prediction, with no need of
targets: its mean, and its doubt, the standard deviation of y (for classes, the probabilities and their entropy).

Every shuffle is a prediction, and a prediction costs more the more inputs there are. In a wide table, only the columns
most related to the prediction are shuffled: those with the largest correlation, of their values or of their squares.
"""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_dropout.errors import PyroDropoutError, RangeError
from pyro_dropout.generative.likelihoods.moments import is_class
from pyro_dropout.mathematics.checks import check_count, check_finite
from pyro_dropout.mathematics.shapes import Float
from pyro_dropout.prediction.plot_style import PALETTE, finish, literal_text
from pyro_dropout.prediction.prediction import Prediction
from pyro_dropout.protocols import Axes, Figure, Record

Predict = Callable[[Tensor], Prediction]  # of inputs, (N, Q), always with the same draws

_SHOWN = 15  # columns in a chart
_FEWEST, _MOST, _WORK = 30, 100, 100_000  # columns that are shuffled, and times how many inputs


@dataclass(frozen=True, eq=False)
class Importance:
    """How much predictions depend on each column; made by ``explain``.

    Attributes:
        names: of the columns, the most important for the mean first.
        mean: the mean absolute change of E[y] when the column is shuffled, in the units of y; for classes the share of
            probability that moves to other classes.
        mean_error: its standard error.
        doubt: the same of the standard deviation of y; for classes, of the entropy in nats.
        doubt_error: its standard error.
        classes: whether targets are classes.
        rows: how many rows were used.
        given: from how many they were chosen.
        repeats: how often each column was shuffled.
        columns: from how many columns these were chosen, as the most related to the prediction.
        within: whether rows outside the training range were left out before.
    """

    names: tuple[str, ...]
    mean: Float[Tensor, " C"]
    mean_error: Float[Tensor, " C"]
    doubt: Float[Tensor, " C"]
    doubt_error: Float[Tensor, " C"]
    classes: bool
    rows: int
    given: int
    repeats: int
    columns: int
    within: bool = False

    @property
    def title(self) -> str:
        """The title of a chart: what it shows, and in a second line what it is based on."""
        count = f"{self.rows} rows" if self.rows == self.given else f"{self.rows} of {self.given} rows"
        where = " within the training range" if self.within else ""
        some = f"the {len(self.names)} of {self.columns} columns most related to the prediction"
        each = "each column" if len(self.names) == self.columns else some
        often = "once" if self.repeats == 1 else f"{self.repeats} times"
        return f"Change of the prediction when a column is shuffled\n{count}{where}, {each} shuffled {often}"

    def __repr__(self) -> str:
        listed = ", ".join(f"{name} {value:.3g}" for name, value in zip(self.names, self.mean.tolist(), strict=True))
        return f"Importance({listed})"

    def as_json(self) -> list[Record]:
        """Return a record for each column."""
        parts = {name: getattr(self, name).tolist() for name in ("mean", "mean_error", "doubt", "doubt_error")}
        return [
            {"column": name} | {key: values[k] for key, values in parts.items()} for k, name in enumerate(self.names)
        ]

    @literal_text()
    def plot(self, target: str = "y") -> Figure:
        """Draw two bar charts, of the mean and of the doubt, with ±2 standard errors; return matplotlib's figure."""
        import matplotlib.figure

        shown = min(len(self.names), _SHOWN)
        figure = matplotlib.figure.Figure(figsize=(9, 2.0 + 0.32 * shown), layout="constrained")
        left, right = figure.subplots(1, 2)
        draw_importance(left, self, "mean", target)
        draw_importance(right, self, "doubt", target)
        more = f"; {shown} of {len(self.names)} columns" if shown < len(self.names) else ""
        figure.suptitle(f"{self.title}{more}", fontsize=11)
        figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", frameon=False, fontsize=8)
        return figure


def draw_importance(ax: Axes, importance: Importance, which: str, target: str) -> None:
    """Draw one bar chart on some axes: of the "mean" or of the "doubt"."""
    from matplotlib.ticker import MaxNLocator

    shown = min(len(importance.names), _SHOWN)
    heights, errors = (getattr(importance, name)[:shown].tolist() for name in (which, f"{which}_error"))
    colour = PALETTE[0] if which == "mean" else PALETTE[1]
    places = range(shown)
    ax.barh(places, heights, color=colour, alpha=0.85, height=0.7)
    reach = [2 * error for error in errors]
    ax.errorbar(heights, places, xerr=reach, fmt="none", ecolor="0.3", label="±2 standard errors")
    ax.set_yticks(places, [textwrap.shorten(name, 24, placeholder="…") for name in importance.names[:shown]])
    ax.invert_yaxis()
    said = {
        (False, "mean"): f"change of the mean of {target}",
        (False, "doubt"): f"change of the standard deviation of {target}",
        (True, "mean"): "probability that moves to other classes",
        (True, "doubt"): "change of the entropy (nats)",
    }
    ax.set(xlabel=said[importance.classes, which], xlim=(0, None))
    ax.xaxis.set_major_locator(MaxNLocator(5))
    finish(ax)


def explain(
    predict: Predict,
    x: Float[Tensor, "N Q"],
    columns: Mapping[str, Sequence[int]],
    *,
    repeats: int = 3,
    rows: int = 500,
    seed: int = 0,
) -> Importance:
    """Return how much predictions change when each column is shuffled among the rows.

    Columns that go together share what they are worth: if one is shuffled, the other still tells. Shuffled rows may be
    unlike any real row. Of more than a hundred columns, fewer if inputs are thousands, only those most related to the
    prediction are shuffled; a column that matters only together with others may then be left out.

    Args:
        predict: predicts inputs, (N, Q), with the same draws at each call: ``pdrop.predict(..., shared=True, seed=0)``.
        x: inputs of real rows, at least two.
        columns: the places of each column's features, as ``encoding.places`` gives.
        repeats: how often each column is shuffled.
        rows: how many rows are used, at most; chosen at random.
        seed: of the choice of rows and of the shuffles.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> from pyro_dropout.tabular.explain import explain
        >>> model = pdrop.BayesianNet(torch.nn.Linear(2, 1, bias=False))
        >>> weights = lambda name, shape: torch.tensor([[3.0, 0.0]])
        >>> guide = pdrop.AutoDropout(model, keep=1.0, init=weights)
        >>> ask = lambda x: pdrop.predict(model, guide, x, samples=2)
        >>> found = explain(ask, torch.randn(50, 2), {"a": [0], "b": [1]})
        >>> found.names, found.mean[1].item()
        (('a', 'b'), 0.0)
    """
    check_finite("x", x)
    check_count("repeats", repeats)
    check_count("rows", rows, 2)
    if len(x) < 2:
        raise RangeError(f"x must have at least 2 rows to shuffle; got {len(x)}.")
    given, generator = len(x), torch.Generator().manual_seed(seed)
    x = x[torch.randperm(len(x), generator=generator, device="cpu")[:rows]]
    first = predict(x)
    base, classes = _said(first), is_class(first.target_distribution)
    if not all(
        torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
        for one, other in zip(base, _said(predict(x)), strict=True)
    ):
        raise PyroDropoutError("predict must use the same draws at each call; give it a seed, as in seed=0.")
    found, of = [], len(columns)
    columns = _most_related(x.to("cpu", torch.float64), torch.cat(base, 1), columns)
    for places in columns.values():
        changes = torch.zeros(2, len(x), dtype=torch.float64)
        for _ in range(repeats):
            other = x.clone()
            other[:, list(places)] = x[torch.randperm(len(x), generator=generator, device="cpu")][:, list(places)]
            now = _said(predict(other))
            changes += torch.stack([(new - old).abs().sum(-1) for new, old in zip(now, base, strict=True)])
        found.append(changes / repeats)
    each = torch.stack(found, 1)  # (mean and doubt, columns, rows)
    each[0] /= 2 if classes else 1  # what one class loses another gains
    middle, error = each.mean(-1), each.std(-1) / len(x) ** 0.5
    order = middle[0].argsort(descending=True, stable=True)
    names = tuple(columns)
    names = tuple(names[k] for k in order.tolist())
    mean, mean_error, doubt, doubt_error = (part[k][order] for k in range(2) for part in (middle, error))
    return Importance(names, mean, mean_error, doubt, doubt_error, classes, len(x), given, repeats, of)


def _most_related(x: Tensor, said: Tensor, columns: Mapping[str, Sequence[int]]) -> dict[str, Sequence[int]]:
    """Return the columns to shuffle: those whose values, or squares, correlate most with what is said of rows, (N, D).

    Example:
        >>> import torch
        >>> x = torch.randn(200, 500, generator=torch.Generator().manual_seed(0))
        >>> found = _most_related(x, x[:, 7:8] ** 2 + x[:, 9:10], {f"c{k}": [k] for k in range(500)})
        >>> len(found), "c7" in found, "c9" in found
        (100, True, True)
    """
    most = max(_FEWEST, min(_MOST, _WORK // x.shape[1]))
    if len(columns) <= most:
        return dict(columns)
    values, said = _standardised(x), _standardised(said)
    related = torch.stack([values.T @ said, _standardised(values.square()).T @ said]).abs().amax((0, 2))  # (Q,)
    strength = torch.stack([related[list(places)].max() for places in columns.values()])
    chosen = set(strength.topk(most).indices.tolist())
    return {name: places for k, (name, places) in enumerate(columns.items()) if k in chosen}


def _standardised(values: Tensor) -> Tensor:
    """Return columns of mean 0 and norm 1; a constant is 0."""
    apart = values - values.mean(0)
    return apart / apart.square().sum(0).sqrt().clamp_min(1e-12)


def _said(prediction: Prediction) -> tuple[Tensor, Tensor]:
    """Return the mean and the doubt of each row, (N, D), on the CPU in float64."""
    classes = is_class(prediction.target_distribution)
    doubt = prediction.entropy.reshape(len(prediction.mean), -1) if classes else prediction.std
    mean = prediction.mean
    if classes and not prediction.one_of_several:
        mean = torch.cat([1 - mean, mean], -1)
    return mean.to("cpu", torch.float64), doubt.to("cpu", torch.float64)
