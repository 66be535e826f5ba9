"""Read CSV and Parquet files into named columns.

Nothing is guessed here. Errors name the file, the row (the line of a CSV file, header included) and the column.
"""

import codecs
import csv
import importlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from pyro_dropout.mathematics.errors import PyroDropoutError, RangeError, ShapeError

Cell = str | float | None

MISSING = frozenset({"", "na", "n/a", "nan", "null", "none", "?"})
_PARQUET = b"PAR1"
_BLOCK = 2**20  # bytes
_SHOWN = 30  # characters of a long cell in a message


@dataclass(frozen=True)
class Table:
    """Columns of equal length, by name.

    Attributes:
        file: the name of the file, for messages.
        columns: {name: cells}; a cell is text, a number, or None if it is missing.
        rows: the number of each row in the file.
        unread: {name: type} of the columns whose types cannot be read; they are not in ``columns``.
    """

    file: str
    columns: dict[str, list[Cell]]
    rows: list[int]
    unread: dict[str, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.rows)

    def where(self, row: int, column: str) -> str:
        """Return the location of a cell, for messages."""
        return f"{self.file}, row {self.rows[row]}, column {brief(column)}"

    def column(self, name: str) -> list[Cell]:
        """Return a column; raise if there is no such column."""
        if name in self.unread:
            raise RangeError(
                f"{self.file}, column {name!r}: its type is {self.unread[name]}; numbers, text and booleans can be"
                " read. Convert it, or leave it out (--drop)."
            )
        if name not in self.columns:
            raise PyroDropoutError(f"{self.file} has no column {name!r}; its columns are {', '.join(self.columns)}.")
        return self.columns[name]

    def only(self, kept: list[int]) -> "Table":
        """Return the table with only these rows, counted from 0."""
        columns = {name: [cells[row] for row in kept] for name, cells in self.columns.items()}
        return Table(self.file, columns, [self.rows[row] for row in kept], self.unread)


def as_number(cell: Cell) -> float | None:
    """Return a cell as a number; None if it is text."""
    if cell is None or isinstance(cell, float):
        return cell
    try:
        return None if "_" in cell else float(cell)  # 1_000 is a number only in Python
    except ValueError:
        return None


def as_label(cell: Cell) -> str:
    """Return a cell as the name of a category, whole numbers without a decimal point: 3.0 is "3"."""
    if isinstance(cell, float):
        return str(int(cell)) if math.isfinite(cell) and cell == int(cell) else repr(cell)
    return str(cell)


def brief(cell: Cell) -> str:
    """Return a cell for a message; a long one is truncated."""
    if isinstance(cell, str) and len(cell) > 2 * _SHOWN:
        return f"{cell[:_SHOWN] + '...'!r} ({len(cell)} characters)"
    return repr(cell)


def read_file(path: str | Path) -> Table:
    """Return the table in a CSV file with a header, or in a Parquet file.

    Lines of a CSV file that start with # are skipped. Missing values are an empty cell, NA, N/A, NaN, null, None and ?,
    in upper or lower case.
    """
    (table,) = read_pieces(path)
    return table


def read_pieces(path: str | Path, size: int | None = None) -> Iterator[Table]:
    """Yield tables of ``size`` rows each, for files larger than memory; with None, one table of all rows."""
    path = Path(path)
    if path.is_dir():
        raise PyroDropoutError(f"{str(path)!r} is a folder; give a CSV or Parquet file.")
    if not path.is_file():
        raise PyroDropoutError(f"there is no file {str(path)!r}.")
    with path.open("rb") as file:
        begins = file.read(len(_PARQUET))
    if not begins:
        raise ShapeError(f"{path.name} is empty; a header and rows are needed.")
    binary = begins == _PARQUET or path.suffix.lower() in (".parquet", ".pq")
    rows = 0
    for table in _parquet(path, size) if binary else _csv(path, size):
        rows += len(table)
        if len(table):
            yield table
    if not rows:
        raise ShapeError(f"{path.name} has a header and no rows.")


def _check_names(path: Path, names: list[str]) -> None:
    for place, name in enumerate(names, 1):
        if not name:
            raise ShapeError(f"{path.name}: column {place} of {len(names)} has no name in the header.")
        if name in names[: place - 1]:
            raise ShapeError(f"{path.name} has two columns called {name!r}; column names must be unique.")
    if len(names) < 2:
        raise ShapeError(
            f"{path.name} must have at least two columns, one to predict and one to predict from; its header is"
            f" {', '.join(map(repr, names)) or 'empty'}. The columns of a CSV file are separated by commas."
        )


# --- CSV --------------------------------------------------------------------------------------------------------------


class _Lines:
    """Lines without comments, and the number of the last line read."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._lines, self.number, self.between = lines, 0, True

    def __iter__(self) -> Iterator[str]:
        for line in self._lines:
            self.number += 1
            # Within a record, a line that starts with # is part of a quoted text.
            if not (self.between and line.startswith("#")):
                self.between = False
                yield line


def _csv(path: Path, size: int | None) -> Iterator[Table]:
    records = _records(path)
    _, first = next(records, (0, None))
    if first is None:
        raise ShapeError(f"{path.name} has no header; its lines are empty or comments.")
    names = [name.strip() for name in first]
    if all(as_number(name) is not None for name in names):
        raise ShapeError(
            f"{path.name} has no header: its first line is {','.join(first)[:60]!r}. Write the columns' names there."
        )
    _check_names(path, names)
    while True:
        rows: list[int] = []
        columns: dict[str, list[Cell]] = {name: [] for name in names}
        for number, row in itertools.islice(records, size):
            if len(row) != len(names):
                raise ShapeError(f"{path.name}, row {number}: {len(row)} values for {len(names)} columns.")
            rows.append(number)
            for name, value in zip(names, row, strict=True):
                columns[name].append(_cell(value))
        yield Table(path.name, columns, rows)
        if size is None or len(rows) < size:
            return


def _records(path: Path) -> Iterator[tuple[int, list[str]]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        lines = _Lines(file)
        reader = csv.reader(lines, strict=True)
        while True:
            lines.between = True
            try:
                row = next(reader)
            except StopIteration:
                return
            except csv.Error as cause:
                _check_text(path)
                raise ShapeError(f"{path.name}, row {lines.number}: {cause}.") from None
            except UnicodeDecodeError:
                _check_text(path)
                raise
            if any("\0" in value for value in row):
                _check_text(path)
            if row:
                yield lines.number, row


def _check_text(path: Path) -> None:
    """Raise an error with the byte position if a file is not text; a line reader knows only the place in its buffer."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    done = 0
    with path.open("rb") as file:
        while True:
            block = file.read(_BLOCK)
            held = len(decoder.getstate()[0])
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as cause:
                raise PyroDropoutError(
                    f"{path.name} is neither Parquet nor UTF-8 text: byte {done - held + cause.start + 1} cannot be"
                    " decoded. Save it as a CSV file in UTF-8."
                ) from None
            if "\0" in text:
                raise PyroDropoutError(
                    f"{path.name} is not a table: it holds binary data. Give a CSV or a Parquet file."
                )
            if not block:
                return
            done += len(block)


def _cell(text: str) -> Cell:
    text = text.strip()
    return None if text.lower() in MISSING else text


# --- Parquet ----------------------------------------------------------------------------------------------------------


def _parquet(path: Path, size: int | None) -> Iterator[Table]:
    try:
        pyarrow = importlib.import_module("pyarrow")
        parquet = importlib.import_module("pyarrow.parquet")
    except ModuleNotFoundError:
        raise PyroDropoutError(
            f"{path.name}: reading Parquet needs the package pyarrow; pip install pyarrow."
        ) from None
    done = 0
    try:
        with parquet.ParquetFile(path) as file:  # not as a data set, which would also read columns from the path
            names = [str(name) for name in file.schema_arrow.names]
            _check_names(path, names)
            kinds = dict(zip(names, file.schema_arrow.types, strict=True))
            reading = {name: _reading(pyarrow.types, kind) for name, kind in kinds.items()}
            unread = {name: str(kind) for name, kind in kinds.items() if reading[name] is None}
            for found in [file.read()] if size is None else file.iter_batches(batch_size=size):
                columns: dict[str, list[Cell]] = {}
                for k, (name, read) in enumerate(reading.items()):
                    if read is not None:
                        columns[name] = [read(value) for value in found.column(k).to_pylist()]
                yield Table(path.name, columns, list(range(done + 1, done + found.num_rows + 1)), unread)
                done += found.num_rows
    except (pyarrow.ArrowException, OSError) as cause:
        raise PyroDropoutError(f"{path.name} is not a valid Parquet file: {str(cause).splitlines()[0]}") from None


def _reading(is_a: ModuleType, kind: Any) -> Callable[[Any], Cell] | None:
    """Return a function from values of a column of this type to cells; None for types that cannot be read."""
    kind = kind.value_type if is_a.is_dictionary(kind) else kind
    if is_a.is_boolean(kind):
        return lambda value: None if value is None else str(value).lower()
    if is_a.is_integer(kind) or is_a.is_floating(kind) or is_a.is_decimal(kind):
        return lambda value: None if value is None or math.isnan(value) else float(value)
    if is_a.is_string(kind) or is_a.is_large_string(kind):
        return lambda value: None if value is None else _cell(value)
    return (lambda value: None) if is_a.is_null(kind) else None
