"""A table in memory: named columns, and where each row stands in its file; data frames become one.

A data frame has the cells that its CSV file would have, so that it is read as its file is.
"""

import datetime
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas

from pyro_dropout.errors import PyroDropoutError, RangeError, ShapeError
from pyro_dropout.mathematics.checks import did_you_mean
from pyro_dropout.tables.cells import EXACT, Cells, Ints, brief

_FIRST, _LAST = np.datetime64("0001-01-01", "us"), np.datetime64("9999-12-31T23:59:59.999999", "us")
_WHOLE = {kind.lower(): pandas.array([], kind).dtype for n in (8, 16, 32, 64) for kind in (f"Int{n}", f"UInt{n}")}


@dataclass(frozen=True)
class Table:
    """Columns of equal length, by name.

    Attributes:
        file: the name of the file, for messages.
        columns: {name: cells}, of series or sequences; a cell is text, a number, a date, or None if it is missing.
        rows: the number of each row in the file.
        unread: {name: type} of the columns whose types cannot be read; they are not in ``columns``.
        notes: what was noticed about the file, in words.
        separator: between the columns of a CSV file.

    Example:
        >>> import pyro_dropout as pdrop
        >>> table = pdrop.tables.Table("trees", {"age": [12, 30], "kind": ["oak", None]}, rows=[2, 3])
        >>> len(table), table.where(1, "kind")
        (2, "trees, row 3, column 'kind'")
    """

    file: str
    columns: Mapping[str, Any]
    rows: list[int]
    unread: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    separator: str = ","

    def __post_init__(self) -> None:
        whole: dict[str, Cells] = {}
        for name, each in self.columns.items():
            try:
                whole[name] = column_of(each, functools.partial(self.where, column=name))
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


def named(file: str, names: Iterable[object]) -> list[str]:
    """Return the names of columns; those that have none are called after their place, as an index often is.

    Example:
        >>> named("t.csv", ["", " price", ""])
        ['unnamed 1', 'price', 'unnamed 3']
    """
    found = [str(name).strip() or f"unnamed {place}" for place, name in enumerate(names, 1)]
    twice = next((name for name, count in Counter(found).items() if count > 1), None)
    if twice is not None:
        raise ShapeError(f"{file} has two columns called {twice!r}; column names must be unique.")
    return found


# --- data frames ------------------------------------------------------------------------------------------------------


def table_of(frame: Any, name: str = "the table") -> Table:
    """Return a data frame of pandas or polars as a table, with the cells that its CSV file would have.

    Texts, numbers, truth values, dates and categories are read, and None, NaN, NaT and NA are missing. The index is
    ignored. Rows are counted from 0.

    Args:
        frame: the data frame.
        name: of the table, for messages.

    Example:
        >>> import pandas
        >>> table_of(pandas.DataFrame({"age": [12, None], "kind": ["oak", "NA"]})).columns
        {'age': [12.0, None], 'kind': ['oak', None]}
    """
    given = list(getattr(frame, "columns", ()))
    if not given or not hasattr(frame, "__getitem__"):
        raise PyroDropoutError(f"a data frame with named columns is needed; got {type(frame).__name__}.")
    names = named(name, given)
    if not len(frame):
        raise ShapeError(f"{name} has no rows.")
    columns = {each: frame[key] for each, key in zip(names, given, strict=True)}
    return Table(name, columns, list(range(len(frame))))


def from_arrow(found: Any) -> Any:
    """Return a table or an array of Arrow in types of pandas; whole numbers with gaps stay whole."""
    return found.to_pandas(types_mapper=lambda kind: _WHOLE.get(str(kind)))


def column_of(series: Any, where: Callable[[int], str]) -> Cells:
    """Return a column as cells; raise ``TypeError`` with the name of a type that is not read.

    Args:
        series: of pandas, or values of Python, or of a library with ``to_list`` and ``to_numpy``.
        where: the place of a row, for messages.
    """
    if isinstance(series, Cells):
        return series
    if not isinstance(series, pandas.Series):
        short = str(getattr(series, "dtype", "")).lower() in ("float16", "float32")
        listed = series.to_list() if hasattr(series, "to_list") else series
        return Cells.of(series.to_numpy() if short and hasattr(series, "to_numpy") else listed, where)
    series = series.reset_index(drop=True)
    if isinstance(series.dtype, pandas.ArrowDtype):
        series = from_arrow(series.array.__arrow_array__())
    if isinstance(series.dtype, pandas.CategoricalDtype):
        kind = series.cat.categories.dtype
        series = series.astype(object if series.hasnans and not isinstance(kind, pandas.StringDtype) else kind)
    is_a, kind = pandas.api.types, series.dtype
    if isinstance(kind, pandas.StringDtype):
        return Cells.of_texts(series)
    if is_a.is_datetime64_any_dtype(kind):
        return _moments(series, where)
    if is_a.is_float_dtype(kind):
        values = series.to_numpy(getattr(kind, "numpy_dtype", kind), na_value=np.nan)
        if values.dtype != np.float64:
            values = values.astype(str).astype(np.float64)  # the 0.1 that was written, not that of float32
        return Cells(pandas.Series(values))
    if not is_a.is_integer_dtype(kind):
        return Cells.of(series.tolist(), where)
    values = series.to_numpy(float, na_value=np.nan)
    return Cells.of(series) if bool((np.abs(values) >= EXACT).any()) else Cells(pandas.Series(values))


def _moments(series: Any, where: Callable[[int], str]) -> Cells:
    zoned = series.dt.tz is not None
    values = (series.dt.tz_convert("UTC").dt.tz_localize(None) if zoned else series).to_numpy()
    coarse = values.astype("M8[us]")
    if values.dtype == "M8[ns]":
        odd = coarse != values
    else:  # of which years are compared before they are converted, which may overflow
        odd = (values < _FIRST.astype(values.dtype)) | (values > _LAST.astype(values.dtype))
    odd &= ~np.isnat(values)
    if odd.any():
        raise RangeError(
            f"{where(int(odd.argmax()))}: the date is finer than a microsecond, or not in the years 1 to 9999. Round or"
            " remove it."
        )
    return Cells.of(each and each.replace(tzinfo=datetime.UTC if zoned else None) for each in coarse.tolist())
