"""A table in memory: named columns, and where each row stands in its file."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from pyro_dropout.mathematics.checks import did_you_mean
from pyro_dropout.mathematics.errors import PyroDropoutError, RangeError, ShapeError
from pyro_dropout.tables.cell_columns import Cells, Ints
from pyro_dropout.tables.cells import Cell, brief


@dataclass(frozen=True)
class Table:
    """Columns of equal length, by name.

    Attributes:
        file: the name of the file, for messages.
        columns: {name: cells}; a cell is text, a number, a date, or None if it is missing.
        rows: the number of each row in the file.
        unread: {name: type} of the columns whose types cannot be read; they are not in ``columns``.
        notes: what was noticed about the file, in words.
        separator: between the columns of a CSV file.

    Example:
        >>> import pyro_dropout as pd
        >>> table = pd.Table("trees", {"age": [12, 30], "kind": ["oak", None]}, rows=[2, 3])
        >>> len(table), table.where(1, "kind")
        (2, "trees, row 3, column 'kind'")
    """

    file: str
    columns: Mapping[str, Sequence[Cell]]
    rows: list[int]
    unread: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    separator: str = ","

    def __post_init__(self) -> None:
        whole: dict[str, Cells] = {}
        for name, each in self.columns.items():
            try:
                whole[name] = each if isinstance(each, Cells) else Cells.of(each)
            except TypeError as cause:
                self.unread[name] = str(cause)
        object.__setattr__(self, "columns", whole)

    def __len__(self) -> int:
        return len(self.rows)

    def where(self, row: int, column: str) -> str:
        """Return the location of a cell, for messages."""
        return f"{self.file}, row {self.rows[row]}, column {brief(column)}"

    def column(self, name: str) -> Cells:
        """Return a column; raise if there is no such column."""
        if name in self.unread:
            raise RangeError(
                f"{self.file}, column {name!r}: its type is {self.unread[name]}; numbers, text, booleans and dates can"
                " be read. Convert it, or leave it out (--drop)."
            )
        if name not in self.columns:
            known = f"its columns are {', '.join(self.columns)}.{did_you_mean(name, self.columns)}"
            raise PyroDropoutError(f"{self.file} has no column {name!r}; {known}")
        found = self.columns[name]
        assert isinstance(found, Cells)
        return found

    def only(self, kept: Sequence[int] | Ints) -> "Table":
        """Return the table with only these rows, counted from 0."""
        places = np.asarray(kept, np.int64)
        columns = {name: self.column(name).take(places) for name in self.columns}
        return replace(self, columns=columns, rows=np.asarray(self.rows)[places].tolist())


def named(file: str, names: Iterable[object], strict: bool) -> list[str]:
    """Return the names of columns; those that have none are called after their place, as an index often is.

    Args:
        file: for messages.
        names: of the columns.
        strict: whether each column must have a name.

    Example:
        >>> named("t.csv", ["", " price", ""], strict=False)
        ['unnamed 1', 'price', 'unnamed 3']
    """
    found = [str(name).strip() for name in names]
    found = found if strict else [name or f"unnamed {place}" for place, name in enumerate(found, 1)]
    met: set[str] = set()
    for place, name in enumerate(found, 1):
        if not name:
            raise ShapeError(f"{file}: column {place} of {len(found)} has no name in the header.")
        if name in met:
            raise ShapeError(f"{file} has two columns called {name!r}; column names must be unique.")
        met.add(name)
    return found
