"""How predictions vary with one column of a table, the others being as they are in real rows.

The column takes values from the range of real rows, with all its features together, so that a category stays one and a
date keeps its day of the week. At each value the predictions of the same rows are averaged.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_dropout.mathematics.shapes import Float
from pyro_dropout.prediction.prediction import Prediction
from pyro_dropout.tables.encoding import Column, Encoding
from pyro_dropout.tabular.explain import Predict

Interval = Callable[[Prediction], tuple[Tensor, Tensor]]

_VALUES = 25  # of a number
_TAIL = 0.005  # of a number's values at each end, which are not drawn
_CATEGORIES = 10
_OTHERS = 60  # rows that are averaged over


@dataclass(frozen=True, eq=False)
class Dependence:
    """Averages of predictions at several values of a column.

    Attributes:
        column: the column.
        values: in the units of the table; of categories, 0, 1, ...
        names: of the categories, the ten most common; () for numbers.
        categories: how many there are in the rows; 0 for numbers.
        mean: E[y], or the probabilities of the classes, (V, D).
        doubt: the mean epistemic standard deviation, (V, D): the average itself is at least as certain.
        low: the mean lower end of the intervals, (V, D); for classes NaN.
        high: the mean upper end.
        rows: over how many rows the averages are.
    """

    column: Column
    values: tuple[float, ...]
    names: tuple[str, ...]
    categories: int
    mean: Float[Tensor, "V D"]
    doubt: Float[Tensor, "V D"]
    low: Float[Tensor, "V D"]
    high: Float[Tensor, "V D"]
    rows: int


def dependence(
    predict: Predict, encoding: Encoding, x: Float[Tensor, "N Q"], name: str, interval: Interval | None = None
) -> Dependence:
    """Return how predictions vary with one column.

    Args:
        predict: predicts inputs, (N, Q), with the same draws at each call.
        encoding: how the columns became inputs.
        x: inputs of real rows; sixty of them are used, evenly chosen.
        name: the column.
        interval: gives the ends of the intervals of a prediction; None for classes.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> from pyro_dropout.tables.encoding import Column, Encoding
        >>> from pyro_dropout.tabular.partial_dependence import dependence
        >>> model = pdrop.BayesianNet(torch.nn.Linear(2, 1, bias=False))
        >>> guide = pdrop.AutoDropout(model, keep=1.0, init=lambda name, shape: torch.tensor([[3.0, 0.0]]))
        >>> x = torch.linspace(0, 1, 11).unsqueeze(-1).repeat(1, 2)
        >>> encoding = Encoding((Column("a"), Column("b")), target="y")
        >>> found = dependence(lambda x: pdrop.predict(model, guide, x, samples=2), encoding, x, "a")
        >>> torch.allclose(found.mean[:, 0], 3 * torch.tensor(found.values))
        True
    """
    column = next(each for each in encoding.inputs if each.name == name)
    places = encoding.places[name]
    own = x[:, places]
    names: tuple[str, ...] = ()
    if column.categories is None:
        values, grid = _numbers(column, own)
    else:
        names, grid = _categories(column, own)
        values = tuple(map(float, range(len(names))))
    some = x[torch.linspace(0, len(x) - 1, min(_OTHERS, len(x))).round().long()]
    if len(places) == x.shape[1]:
        some = some[:1]  # no other column to average over
    asked = some.repeat(len(grid), 1)
    asked[:, places] = grid.repeat_interleave(len(some), 0)
    prediction = predict(asked)
    ends = interval(prediction) if interval is not None else (prediction.mean * torch.nan,) * 2
    parts = (prediction.mean, prediction.epistemic.sqrt(), *ends)
    averages = [part.detach().cpu().reshape(len(grid), len(some), -1).mean(1) for part in parts]
    several = int((own.sum(0) > 0).sum()) if names else 0
    return Dependence(column, values, names, several, averages[0], averages[1], averages[2], averages[3], len(some))


def _numbers(column: Column, own: Tensor) -> tuple[tuple[float, ...], Tensor]:
    """Return values of a number in ascending order, in the table's units, and their features.

    They are evenly far apart; few values, and dates with their cycles, are those of rows.
    """
    known = own[own[:, -1] == 0] if column.gaps else own
    known = known if len(known) else own
    known = known[known[:, 0].argsort(stable=True)]
    distinct = known[:, 0].unique()
    if column.cycles or len(distinct) <= _VALUES:
        near = torch.linspace(0, len(distinct) - 1, min(_VALUES, len(distinct))).round().long()
        grid = known[torch.searchsorted(known[:, 0].contiguous(), distinct[near])]
    else:
        low, high = (known[round(share * (len(known) - 1)), 0].item() for share in (_TAIL, 1 - _TAIL))
        grid = known[:1].repeat(_VALUES, 1)
        grid[:, 0] = torch.linspace(low, high, _VALUES)
    return tuple((grid[:, 0].double() + float(column.centre)).tolist()), grid


def _categories(column: Column, own: Tensor) -> tuple[tuple[str, ...], Tensor]:
    """Return the most common categories and their features."""
    names = [feature.removeprefix(f"{column.name}=") for feature in column.features]
    names[len(names) - 1 :] = ["(missing)"] if column.gaps else names[-1:]
    counts = own.sum(0)
    common = sorted(counts.argsort(descending=True, stable=True)[:_CATEGORIES].tolist())
    common = [k for k in common if counts[k] > 0]
    return tuple(names[k] for k in common), torch.eye(own.shape[1], dtype=own.dtype, device=own.device)[common]
