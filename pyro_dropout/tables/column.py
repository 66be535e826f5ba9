"""One column of a table as a network reads it: numbers as they are, or categories one-hot."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_dropout.mathematics.errors import RangeError
from pyro_dropout.protocols import Record
from pyro_dropout.tables.cells import Cell, Number, as_text, brief
from pyro_dropout.tables.notation import PLAIN, Notation
from pyro_dropout.tables.precision import rounded
from pyro_dropout.tables.table import Table

_MOST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Column:
    """One column of a table, as a network reads it.

    Attributes:
        name: the column's.
        categories: its values; None for numbers.
        notation: how its values are written.
        centre: subtracted from numbers before they are rounded to single precision.
    """

    name: str
    categories: tuple[str, ...] | None = None
    notation: Notation = PLAIN
    centre: Number = 0

    @property
    def features(self) -> list[str]:
        """The names of the features that the column becomes."""
        return [self.name] if self.categories is None else [f"{self.name}={label}" for label in self.categories]

    @property
    def axis(self) -> str:
        """The name of the column's numbers after centring, with their unit."""
        if self.notation.kind == "date":
            return f"{self.name} (days since {self.origin})"
        unit = f" ({self.notation.unit})" if self.notation.unit else ""
        return f"{self.name} - {self.origin}{unit}" if self.centre else f"{self.name}{unit}"

    @property
    def origin(self) -> str:
        """What a centred number is counted from, in words."""
        return as_text(self.notation.moment(self.centre) if self.notation.kind == "date" else self.centre)

    def values(self, table: Table) -> list[Number | None]:
        """Return the column's numbers, exactly, before centring; None for missing values."""
        cells = table.column(self.name)
        found = [self.notation.value(cell) for cell in cells]
        for row, (cell, value) in enumerate(zip(cells, found, strict=True)):
            if cell is not None and (value is None or not -_MOST <= value <= _MOST):
                raise RangeError(f"{table.where(row, self.name)}: {self._mistake(cell, value)}")
        return found

    def _mistake(self, cell: Cell, value: Number | None) -> str:
        """Return what is wrong with a cell that is not a number of single precision."""
        if value is None:
            what = "date" if self.notation.kind == "date" else "number"
            return f"{brief(cell)} is not a {what} such as {self.notation.example}. Write it in this way."
        if not math.isfinite(value):
            return f"{brief(as_text(cell))} is not finite; a number is needed."
        return f"{as_text(cell)} is too large; change the unit."

    def numbers(self, table: Table) -> Tensor:
        """Return the column's numbers after centring, (N,); NaN for missing values."""
        return rounded(self.values(table), self.centre)

    def places(self, table: Table) -> list[int | None]:
        """Return the index of each cell among the categories, None for missing values."""
        known = self.categories or ()
        place: dict[str | None, int | None] = {None: None} | {label: k for k, label in enumerate(known)}
        labels = [None if cell is None else self.notation.label(cell) for cell in table.column(self.name)]
        for row, label in enumerate(labels):
            if label not in place:
                few = ", ".join(known[:8]) + (", ..." if len(known) > 8 else "")
                raise RangeError(
                    f"{table.where(row, self.name)}: {brief(label)} was not seen in training; known values are {few}."
                    " Leave the row out, or fit on a table that has the value."
                )
        return [place[label] for label in labels]

    def encoded(self, table: Table) -> Tensor:
        """Return the column's features, (N, 1) or one-hot; NaN for missing values."""
        if self.categories is None:
            return self.numbers(table).unsqueeze(-1)
        x = torch.zeros(len(table), len(self.categories))
        for row, place in enumerate(self.places(table)):
            if place is None:
                x[row] = math.nan
            else:
                x[row, place] = 1.0
        return x

    def plotted(self, cells: Sequence[Cell]) -> list[Cell]:
        """Return cells for a plot: numbers in their own units, dates as days since 1970-01-01, or names."""
        if self.categories is not None:
            return [None if cell is None else self.notation.label(cell) for cell in cells]
        return [self.notation.value(cell) for cell in cells]

    @classmethod
    def from_json(cls, found: Record) -> "Column":
        """Return the column in a record; raise ``KeyError`` or ``TypeError`` if it is invalid."""
        categories = found["categories"]
        # Older runs have no notation: their numbers are plain.
        notation = Notation.from_json(found["notation"]) if "notation" in found else PLAIN
        labels = None if categories is None else labels_of(categories, notation)
        return cls(name_of(found["name"]), labels, notation, finite(found.get("centre", 0), "the centre of a column"))


def name_of(found: object) -> str:
    """Return the name of a column in a record; raise ``TypeError`` if it is none."""
    if not isinstance(found, str):
        raise TypeError(f"the name of a column, {found!r},")
    return found


def labels_of(found: object, notation: Notation) -> tuple[str, ...]:
    """Return the labels in a record; older runs wrote some of them differently, and kept 1 and 1.0 apart."""
    if not isinstance(found, list | tuple) or not all(isinstance(each, str) for each in found):
        raise TypeError("a list of categories")
    labels = tuple(notation.label(each) for each in found)
    if len(set(labels)) < len(labels):
        raise TypeError(f"the list of categories {list(found)!r}, in which one is written in two ways,")
    return labels


def finite(value: object, what: str) -> Number:
    """Return a number in a record; raise ``TypeError`` if it is none, or not finite."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise TypeError(f"{what}, {value!r},")
    return value
