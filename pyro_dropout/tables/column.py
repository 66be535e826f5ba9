"""One column of a table as a network reads it: numbers as they are, dates with their cycles, or categories one-hot."""

import functools
import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pyro_dropout.errors import RangeError
from pyro_dropout.tables.cells import Bools, Cell, Cells, Floats, as_text, brief, is_blank
from pyro_dropout.tables.notation import PLAIN, Notation
from pyro_dropout.tables.precision import rounded
from pyro_dropout.tables.table import Table

Cycle = Literal["day", "week", "year"]
CYCLES: dict[Cycle, float] = {"day": 1.0, "week": 7.0, "year": 365.2425}  # in days

_MOST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Column:
    """One column of a table, as a network reads it.

    Attributes:
        name: the column's.
        categories: its values; None for numbers.
        notation: how its values are written.
        centre: subtracted from numbers before they are rounded to single precision.
        other: whether all further categories share one feature.
        gaps: whether the last feature says that the value is missing.
        cycles: of dates, "day", "week" or "year": two features each, a sine and a cosine.
    """

    name: str
    categories: tuple[str, ...] | None = None
    notation: Notation = PLAIN
    centre: float = 0.0
    other: bool = False
    gaps: bool = False
    cycles: tuple[Cycle, ...] = ()

    @property
    def features(self) -> list[str]:
        """The names of the features that the column becomes."""
        if self.categories is None:
            waves = [f"{self.name} ({wave} of the {cycle})" for cycle in self.cycles for wave in ("sine", "cosine")]
            names = [self.name, *waves]
        else:
            names = [f"{self.name}={label}" for label in self.categories] + [f"{self.name}=(other)"] * self.other
        return names + [f"{self.name} is missing"] * self.gaps

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

    def blank(self, cell: Cell) -> bool:
        """Return whether a cell among numbers, dates or truth values is a word for a missing value."""
        return (self.categories is None or self.notation.kind == "boolean") and is_blank(cell)

    def strange(self, cell: Cell) -> bool:
        """Return whether a cell is a category that has no feature of its own."""
        if self.categories is None or cell is None or self.blank(cell):
            return False
        return self.notation.label(cell) not in self._known

    def strangers(self, cells: Cells) -> Bools:
        """Return which cells of a column are such categories."""
        if self.categories is None:
            return np.zeros(len(cells), np.bool_)
        distinct = cells.distinct
        return distinct.spread([self.strange(cell) for cell in distinct.cells])

    @functools.cached_property
    def _known(self) -> frozenset[str]:
        return frozenset(self.categories or ())

    def measured(self, table: Table) -> Floats:
        """Return the column's numbers before centring; NaN for missing values."""
        cells = table.column(self.name)
        numbers = cells.numbers if self.notation.plain else None
        if numbers is None:
            distinct = cells.distinct
            values = [self.notation.value(cell) for cell in distinct.cells]
            for row, cell, value in zip(distinct.rows.tolist(), distinct.cells, values, strict=True):
                if value is None:
                    what = "date" if self.notation.kind == "date" else "number"
                    like = f"is not a {what} such as {self.notation.example}; write it like that."
                    raise RangeError(f"{table.where(row, self.name)}: {brief(cell)} {like}")
            numbers = np.array([*values, math.nan], np.float64)[distinct.codes]
        large = np.abs(numbers) > _MOST
        if large.any():
            row = int(large.argmax())
            what = "is too large; change the unit" if np.isfinite(numbers[row]) else "is not finite; a number is needed"
            raise RangeError(f"{table.where(row, self.name)}: {brief(as_text(cells[row]))} {what}.")
        return numbers

    def numbers(self, table: Table) -> Tensor:
        """Return the column's numbers after centring, (N,); NaN for missing values."""
        return rounded(self.measured(table), self.centre)

    def places(self, table: Table) -> NDArray[np.int64]:
        """Return the index of each cell among the categories, -1 for missing values; one more for all others."""
        known = self.categories or ()
        place = {label: k for k, label in enumerate(known)}
        distinct = table.column(self.name).distinct
        labels = [self.notation.label(cell) for cell in distinct.cells]
        for row, label in zip(distinct.rows.tolist(), labels, strict=True):
            if label not in place and not self.other:
                few = ", ".join(known[:8]) + (", ..." if len(known) > 8 else "")
                raise RangeError(
                    f"{table.where(row, self.name)}: {brief(label)} was not seen in training; known values are {few}."
                    " Leave the row out, or fit on a table that has the value."
                )
        return np.array([*(place.get(label, len(known)) for label in labels), -1])[distinct.codes]

    def encoded(self, table: Table) -> Tensor:
        """Return the column's features, (N, F); NaN for missing values that have no feature of their own."""
        x = self._waves(table) if self.categories is None else self._one_hot(table)
        if not self.gaps:
            return x
        missing = torch.from_numpy(table.column(self.name).missing).unsqueeze(-1)
        if self.categories is not None:
            x = x.masked_fill(missing, 0.0)
        return torch.cat([x, missing.to(x)], 1)

    def _waves(self, table: Table) -> Tensor:
        days = self.measured(table)
        turns = [math.tau * (days % CYCLES[cycle]) / CYCLES[cycle] for cycle in self.cycles]
        angles = [torch.from_numpy(turn).to(torch.get_default_dtype()) for turn in turns]
        waves = [wave(angle).float() for angle in angles for wave in (torch.sin, torch.cos)]
        return torch.stack([rounded(days, self.centre), *waves], 1)

    def _one_hot(self, table: Table) -> Tensor:
        places = torch.from_numpy(self.places(table)).unsqueeze(-1)
        x = (places == torch.arange(len(self.categories or ()) + self.other)).to(torch.get_default_dtype())
        return x.masked_fill_(places < 0, math.nan)
