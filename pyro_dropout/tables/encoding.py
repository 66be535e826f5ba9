"""How the columns of a table become numbers: inputs as they are or one-hot, a target as a number or a class.

An encoding is learned from the training table and then applied to every other table.
"""

import math
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from pyro_dropout.mathematics.errors import PyroDropoutError, RangeError, ShapeError
from pyro_dropout.protocols import Record
from pyro_dropout.tables.files import Table, as_label, as_number, brief

Task = Literal["auto", "regression", "classification"]

_MOST = 50  # categories of a column; with more, it probably identifies rows


@dataclass(frozen=True)
class Input:
    """One column to predict from; ``categories`` is None for numbers."""

    name: str
    categories: tuple[str, ...] | None = None

    @property
    def features(self) -> list[str]:
        """The names of the features that the column becomes."""
        return [self.name] if self.categories is None else [f"{self.name}={label}" for label in self.categories]


@dataclass(frozen=True)
class Encoding:
    """How a network reads each column of a table.

    Attributes:
        inputs: the columns to predict from, in the network's order.
        target: the column to predict.
        classes: the target's values in the order of the network's outputs; () for a number.
        fill: the number that replaces a missing value, for each feature; None if missing values are an error.
        ranges: the least and the greatest value of each feature in training; None if unknown.
    """

    inputs: tuple[Input, ...]
    target: str
    classes: tuple[str, ...] = ()
    fill: tuple[float, ...] | None = None
    ranges: tuple[tuple[float, float], ...] | None = None

    @property
    def features(self) -> list[str]:
        """The names of the network's inputs."""
        return [name for column in self.inputs for name in column.features]

    @property
    def remarks(self) -> list[str]:
        """How the columns were interpreted, in words."""
        coded = [f"{column.name} ({len(column.categories)})" for column in self.inputs if column.categories is not None]
        said = [f"one-hot encoded: {', '.join(coded)}"] if coded else []
        kind = f"one of {len(self.classes)} classes" if self.classes else "a number"
        return [*said, f"{self.target!r} is read as {kind}"]

    def inputs_of(self, table: Table) -> Tensor:
        """Return the inputs of a table, (N, Q); missing values are filled, or NaN without ``fill``."""
        x = torch.cat([_encoded(table, column) for column in self.inputs], 1)
        return x if self.fill is None else torch.where(x.isnan(), torch.tensor(self.fill, dtype=x.dtype), x)

    def seen(self, x: Tensor) -> "Encoding":
        """Return the encoding with the ranges of the training inputs."""
        return replace(self, ranges=tuple(zip(x.amin(0).tolist(), x.amax(0).tolist(), strict=True)))

    def beyond(self, x: Tensor) -> list[list[str]]:
        """Return for each row of inputs the features outside their training range."""
        found: list[list[str]] = [[] for _ in range(len(x))]
        if self.ranges is not None:
            names, (low, high) = self.features, torch.tensor(self.ranges, dtype=x.dtype).T
            for row, feature in ((x < low) | (x > high)).nonzero().tolist():
                found[row].append(names[feature])
        return found

    def targets_of(self, table: Table) -> Tensor:
        """Return the targets of a table: class indices (N,), or numbers (N, 1)."""
        for row, cell in enumerate(table.column(self.target)):
            if cell is None:
                raise RangeError(f"{table.where(row, self.target)}: the value is missing.")
        if not self.classes:
            return _numbers(table, self.target).unsqueeze(-1)
        return torch.tensor(_places(table, self.target, self.classes))

    def as_json(self) -> Record:
        """Return the argument of ``from_json``."""
        return asdict(self)

    @classmethod
    def from_json(cls, found: Record) -> "Encoding":
        """Return the encoding in a record; raise ``KeyError`` or ``TypeError`` if it is invalid."""
        inputs = tuple(
            Input(str(each["name"]), None if each["categories"] is None else tuple(map(str, each["categories"])))
            for each in found["inputs"]
        )
        fill = None if found["fill"] is None else tuple(map(_number, found["fill"]))
        ranges = None if found.get("ranges") is None else tuple(map(_range, found["ranges"]))  # older runs have none
        made = cls(inputs, str(found["target"]), tuple(map(str, found["classes"])), fill, ranges)
        if not inputs or any(each is not None and len(each) != len(made.features) for each in (fill, ranges)):
            raise TypeError("inputs, and what fills and bounds them, do not fit together")
        return made


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise TypeError(f"what fills gaps, {value!r},")
    return float(value)


def _range(value: object) -> tuple[float, float]:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise TypeError(f"the range of an input, {value!r},")
    return _number(value[0]), _number(value[1])


def learn(
    table: Table, target: str, task: Task = "auto", categorical: Collection[str] = (), drop: Collection[str] = ()
) -> Encoding:
    """Return the encoding for a table: text is a category, and a target of text or of 0 and 1 is a class.

    Args:
        table: the training table; it must contain all categories.
        target: the column to predict.
        task: "regression" or "classification"; "auto" infers it from the target's values.
        categorical: numeric columns to treat as categories.
        drop: columns to leave out.
    """
    for name in (target, *categorical, *drop, *table.unread):
        if name not in drop or name not in table.unread:
            table.column(name)
    if target in drop:
        raise PyroDropoutError(f"the column {target!r} cannot be both the target and left out.")
    names = [name for name in table.columns if name != target and name not in drop]
    if not names:
        raise ShapeError(f"{table.file}: no column is left to predict {target!r} from.")
    inputs = tuple(_input(table, name, name in categorical) for name in names)
    return Encoding(inputs, target, _classes(table, target, task))


def _input(table: Table, name: str, forced: bool) -> Input:
    cells = [cell for cell in table.columns[name] if cell is not None]
    if not cells:
        raise ShapeError(f"{table.file}, column {name!r}: every value is missing; leave the column out (--drop).")
    texts = sum(as_number(cell) is None for cell in cells)
    if not texts and not forced:
        return Input(name)
    if texts < len(cells) and not forced:
        row = next(k for k, cell in enumerate(table.columns[name]) if cell is not None and as_number(cell) is None)
        raise RangeError(
            f"{table.where(row, name)}: {brief(table.columns[name][row])} is not a number, and {len(cells) - texts}"
            f" other values of the column are. Fix it, or declare the column as categories (--categorical {name})."
        )
    categories = sorted({as_label(cell) for cell in cells})
    if len(categories) > _MOST:
        raise RangeError(
            f"{table.file}, column {name!r}: {len(categories)} different texts are too many for categories (at most"
            f" {_MOST}); leave the column out (--drop {name})."
        )
    return Input(name, tuple(categories))


def _classes(table: Table, name: str, task: Task) -> tuple[str, ...]:
    cells = [cell for cell in table.columns[name] if cell is not None]
    labels = {as_label(cell) for cell in cells}
    if len(labels) < 2:
        only = f"only one value, {brief(cells[0])}" if cells else "no value"
        raise RangeError(f"{table.file}, column {name!r}: the target has {only}; there is nothing to predict.")
    numbers = [as_number(cell) for cell in cells]
    counts = task == "auto" and any(value is not None for value in numbers) and set(numbers) != {0.0, 1.0}
    if task == "regression" or counts:
        _numbers(table, name)
        return ()
    most = max(2, min(_MOST, len(cells) // 2))
    if len(labels) > most:
        raise RangeError(
            f"{table.file}, column {name!r}: {len(labels)} different values in {len(cells)} rows are too many for"
            f" classes (at most {most})."
        )
    return tuple(sorted(labels, key=lambda label: (as_number(label) is None, as_number(label) or 0.0, label)))


def _encoded(table: Table, column: Input) -> Tensor:
    if column.categories is None:
        return _numbers(table, column.name).unsqueeze(-1)
    x = torch.zeros(len(table), len(column.categories))
    for row, place in enumerate(_places(table, column.name, column.categories)):
        if place is None:
            x[row] = math.nan
        else:
            x[row, place] = 1.0
    return x


def _places(table: Table, name: str, known: tuple[str, ...]) -> list[int | None]:
    """Return the index of each cell of a column among the known labels, None for missing values."""
    place = {label: k for k, label in enumerate(known)}
    found: list[int | None] = []
    for row, cell in enumerate(table.column(name)):
        if cell is not None and as_label(cell) not in place:
            few = ", ".join(known[:8]) + (", ..." if len(known) > 8 else "")
            raise RangeError(
                f"{table.where(row, name)}: {brief(as_label(cell))} was not seen in training; known values are {few}."
            )
        found.append(None if cell is None else place[as_label(cell)])
    return found


def _numbers(table: Table, name: str) -> Tensor:
    """Return a column as numbers, NaN for missing values."""
    values = []
    for row, cell in enumerate(table.column(name)):
        value = as_number(cell)
        if cell is not None and value is None:
            raise RangeError(f"{table.where(row, name)}: {brief(cell)} is not a number.")
        if value is not None and not math.isfinite(value):
            raise RangeError(f"{table.where(row, name)}: {brief(as_label(cell))} is not finite; a number is needed.")
        if value is not None and abs(value) > torch.finfo(torch.float32).max:
            raise RangeError(f"{table.where(row, name)}: {as_label(cell)} is too large; change the unit.")
        values.append(math.nan if value is None else value)
    exact = torch.tensor(values, dtype=torch.float64)
    known = exact[~exact.isnan()]
    if 2 * len(known.float().unique()) < len(known.unique()):
        raise RangeError(
            f"{table.file}, column {name!r}: its values differ only after the seventh digit, beyond single precision;"
            " subtract a constant offset."
        )
    return exact.float()
