"""A table in memory: named columns of numbers or texts, and where each row stands in its file.

A data frame has the cells that its CSV file would have, so that it is read as its file is.
"""

import copy
import csv
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime
from decimal import Decimal
from fractions import Fraction
from numbers import Integral, Real
from typing import Any

import numpy as np
import pandas
from numpy.typing import NDArray

from pyro_dropout.errors import PyroDropoutError, RangeError, ShapeError
from pyro_dropout.mathematics.checks import did_you_mean

Series = Any  # of pandas: float64 numbers, or texts; NaN where a value is missing
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

MISSING = frozenset({"", "na", "n/a", "n.a.", "#n/a", "nan", "<na>", "null", "none", "?"})
EXACT = 2**53  # from here on, float64 skips whole numbers
_WHOLE = {kind.lower(): pandas.array([], kind).dtype for n in (8, 16, 32, 64) for kind in (f"Int{n}", f"UInt{n}")}
_FEW = 20  # texts that are looked at before all of them
_SHOWN = 30  # characters of a long cell in a message


@dataclass(eq=False)
class Table:
    """Columns of equal length, by name.

    Attributes:
        file: the name of the file, for messages.
        columns: {name: series}, as ``cells_of`` returns them; other sequences are converted.
        rows: the number of each row in the file.
        notes: what was noticed about the file, in words.
        separator: between the columns of a CSV file.
        unread: {name: type} of the columns whose types cannot be read; they are taken out of ``columns``.

    Example:
        >>> import pyro_dropout as pdrop
        >>> table = pdrop.tables.Table("trees", {"age": [12, 30], "kind": ["oak", None]}, rows=[2, 3])
        >>> len(table), table.where(1, "kind")
        (2, "trees, row 3, column 'kind'")
    """

    file: str
    columns: Mapping[str, Any]
    rows: Any  # numbers; an array of int64
    notes: tuple[str, ...] = ()
    separator: str = ","
    unread: dict[str, str] = field(default_factory=dict)
    _kept: dict[object, Any] = field(default_factory=dict, init=False, repr=False)  # what was computed from columns

    def __post_init__(self) -> None:
        self.rows = np.asarray(self.rows, np.int64)
        columns: dict[str, Series] = {}
        for name, each in self.columns.items():
            try:
                columns[name] = cells_of(each)
            except TypeError as cause:
                self.unread[name] = str(cause)
            except UnicodeEncodeError:
                raise RangeError(f"{self.file}, column {brief(name)}: a text holds half of a character.") from None
        self.columns = columns

    def __len__(self) -> int:
        return len(self.rows)

    def where(self, row: int, column: str) -> str:
        """Return the location of a cell, for messages."""
        return f"{self.file}, row {self.rows[row]}, column {brief(column)}"

    def column(self, name: str) -> Series:
        """Return a column; raise if there is no such column."""
        if name in self.unread:
            raise RangeError(
                f"{self.file}, column {name!r}: its type is {self.unread[name]}; numbers, text, booleans and dates can"
                " be read. Convert it, or leave it out (--drop)."
            )
        if name not in self.columns:
            known = f"its columns are {', '.join(self.columns)}.{did_you_mean(name, self.columns)}"
            raise PyroDropoutError(f"{self.file} has no column {name!r}; {known}")
        return self.columns[name]

    def once(self, key: object, compute: Callable[[], Any]) -> Any:
        """Return what a function computes from the columns, and keep it."""
        if key not in self._kept:
            self._kept[key] = compute()
        return self._kept[key]

    def numbers(self, name: str) -> Floats | None:
        """Return the numbers of a column, NaN where missing; None unless all its texts are plain numbers."""
        found: Floats | None = self.once(name, lambda: plain_numbers(self.column(name)))
        return found

    def different(self, name: str) -> tuple[Ints, Series]:
        """Return for each row the place of its cell among the different ones, -1 where it is missing, and these."""
        places, cells = self.once((name, "different"), lambda: self.column(name).factorize())
        return places, pandas.Series(cells)

    def only(self, kept: Sequence[int] | Ints) -> "Table":
        """Return the table with only these rows, counted from 0."""
        found, places = copy.copy(self), np.asarray(kept, np.int64)
        found.columns = {name: cells.iloc[places].reset_index(drop=True) for name, cells in self.columns.items()}
        found.rows, found._kept = self.rows[places], {}
        return found


def named(file: str, names: Iterable[object]) -> list[str]:
    """Return the names of columns; those that have none are called after their place, as an index often is."""
    found = [str(name).strip() or f"unnamed {place}" for place, name in enumerate(names, 1)]
    twice = next((name for name, count in Counter(found).items() if count > 1), None)
    if twice is not None:
        raise ShapeError(f"{file} has two columns called {twice!r}; column names must be unique.")
    return found


def table_of(frame: Any, name: str = "the table", rows: Any = None, notes: tuple[str, ...] = ()) -> Table:
    """Return a data frame of pandas or polars as a table, with the cells that its CSV file would have.

    Texts, numbers, truth values, dates and categories are read, and None, NaN, NaT and NA are missing. The index is
    ignored. Without ``rows``, their numbers, rows are counted from 0.
    """
    if not isinstance(frame, pandas.DataFrame) and hasattr(frame, "to_pandas"):
        frame = frame.to_pandas(use_pyarrow_extension_array=True)  # of polars
    if not isinstance(frame, pandas.DataFrame) or not len(frame.columns):
        raise PyroDropoutError(f"a data frame with named columns is needed; got {type(frame).__name__}.")
    names = named(name, frame.columns)
    if not len(frame):
        raise ShapeError(f"{name} has no rows.")
    columns = {each: frame.iloc[:, place] for place, each in enumerate(names)}
    return Table(name, columns, range(len(frame)) if rows is None else rows, notes)


# --- cells ------------------------------------------------------------------------------------------------------------


def cells_of(values: Any) -> Series:
    """Return values as float64 numbers, or as the texts that a CSV file would have, without the spaces around them.

    Raise ``TypeError`` with the name of a type that is not read.
    """
    given = values if hasattr(values, "dtype") else pandas.Series(list(values), dtype=object)
    series = pandas.Series(given).reset_index(drop=True)
    if isinstance(series.dtype, pandas.ArrowDtype):
        series = from_arrow(series.array.__arrow_array__())
    if isinstance(series.dtype, pandas.CategoricalDtype):
        series = series.astype(object)
    elif isinstance(series.dtype, pandas.SparseDtype):
        series = series.sparse.to_dense()
    kind, is_a = series.dtype, pandas.api.types
    if is_a.is_float_dtype(kind):
        found = series.to_numpy(getattr(kind, "numpy_dtype", kind), na_value=np.nan)
        # str is the shortest number that rounds to it: the 0.1 of a CSV file, not the 0.10000000149 of float32.
        return pandas.Series(found if found.dtype == np.float64 else found.astype(str).astype(np.float64))
    if is_a.is_integer_dtype(kind):
        found = series.to_numpy(np.float64, na_value=np.nan)
        if not (np.abs(found) >= EXACT).any():
            return pandas.Series(found)
    elif isinstance(kind, pandas.DatetimeTZDtype):
        return texts_of(series.dt.tz_convert("UTC"))
    elif is_a.is_datetime64_any_dtype(kind) or is_a.infer_dtype(series) == "string":
        return texts_of(series)
    gaps = series.isna()
    return texts_of([None if gap else _as_text(each) for each, gap in zip(series, gaps, strict=True)])


def texts_of(texts: Any) -> Series:
    """Return texts without the spaces around them; those that mean a missing value are missing."""
    series = pandas.Series(texts).astype("str")
    if cast(series) is not None:  # numbers, and no spaces around them
        return series
    series = series.str.strip()
    return series.mask(series.str.lower().isin(MISSING))


def cast(texts: Series) -> Floats | None:
    """Return texts as Arrow casts them to float64; None if one is no number, or has spaces around it."""
    try:
        import pyarrow

        given = pyarrow.array(texts, from_pandas=True)
        for text in given[:_FEW].to_pylist():
            float(text or 0)  # a cast that fails takes long
        numbers = given.cast("float64")
    except (ImportError, ValueError):
        return None
    found = np.asarray(numbers.to_numpy(zero_copy_only=False))
    # It takes nan(x) for a number.
    return found if np.count_nonzero(np.isnan(found)) == numbers.null_count else None


def plain_numbers(cells: Series) -> Floats | None:
    """Return texts as the nearest float64, NaN where missing; None unless all are plain numbers, such as -2.5e3."""
    if cells.dtype == np.float64:
        return np.asarray(cells.to_numpy())
    found = cast(cells)
    if found is not None:
        return found
    places, texts = cells.factorize()
    try:  # Python knows more numbers, such as "１２"
        numbers = np.append(np.asarray(texts, object).astype(np.float64), np.nan)
    except ValueError:
        return None
    return None if "_" in "".join(texts) else numbers[places]  # 1_000 is a number only in Python


def from_arrow(found: Any) -> Any:
    """Return a table or an array of Arrow in types of pandas; whole numbers with gaps stay whole."""
    how = {"ignore_metadata": True} if hasattr(found, "column_names") else {}
    return found.to_pandas(types_mapper=lambda kind: _WHOLE.get(str(kind)), **how)


def _as_text(value: object) -> str:
    """Return a value of Python or NumPy as the text that a CSV file would have; ``TypeError`` for others."""
    if isinstance(value, bool | np.bool_):
        return str(value).lower()
    if isinstance(value, Real) and not isinstance(value, Integral):
        return number_text(float(value if isinstance(value, Fraction) else str(value)))
    if isinstance(value, Decimal):
        return format(value, "f")
    if isinstance(value, datetime) and value.tzinfo is not None:
        return str(pandas.Timestamp(value).tz_convert("UTC"))
    if isinstance(value, str | Integral | date):
        return str(value)
    raise TypeError(type(value).__name__)


def number_text(value: float) -> str:
    """Return a number as text; whole numbers have no point."""
    whole = math.isfinite(value) and abs(value) < EXACT and value.is_integer()
    return str(int(value)) if whole else str(value)


def listed(names: Iterable[str]) -> str:
    """Return names in one cell, with "; " between them; one with a semicolon or a quote in it is quoted, as in CSV."""
    return "; ".join('"{}"'.format(name.replace('"', '""')) if set(';"\n\r') & {*name} else name for name in names)


def unlisted(cell: str) -> list[str]:
    """Return the names in such a cell."""
    return next(csv.reader([cell], delimiter=";", skipinitialspace=True), [])


def brief(cell: object) -> str:
    """Return a cell for a message; a long one is truncated."""
    if isinstance(cell, str) and len(cell) > 2 * _SHOWN:
        return f"{cell[:_SHOWN] + '...'!r} ({len(cell)} characters)"
    return number_text(cell) if isinstance(cell, float) else repr(cell)
