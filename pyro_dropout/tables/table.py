"""A table in memory: named columns of numbers or texts, and where each row stands in its file.

A data frame has the cells that its CSV file would have, so that it is read as its file is.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date, datetime
from decimal import Decimal
from itertools import product
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
_GAPS = [*{"".join(case) for word in MISSING for case in product(*zip(word, word.upper(), strict=True))}]
EXACT = 2**53  # from here on, float64 skips whole numbers
_WHOLE = {kind.lower(): pandas.array([], kind).dtype for n in (8, 16, 32, 64) for kind in (f"Int{n}", f"UInt{n}")}
_FEW = 20  # texts that are looked at before all of them
_SHOWN = 30  # characters of a long cell in a message


@dataclass(frozen=True)
class Table:
    """Columns of equal length, by name.

    Attributes:
        file: the name of the file, for messages.
        columns: {name: series}, as ``cells_of`` returns them; other sequences are converted.
        rows: the number of each row in the file.
        unread: {name: type} of the columns whose types cannot be read; they are not in ``columns``.
        notes: what was noticed about the file, in words.
        separator: between the columns of a CSV file.
        kept: what was computed from columns, so that it is computed once.

    Example:
        >>> import pyro_dropout as pdrop
        >>> table = pdrop.tables.Table("trees", {"age": [12, 30], "kind": ["oak", None]}, rows=[2, 3])
        >>> len(table), table.where(1, "kind")
        (2, "trees, row 3, column 'kind'")
    """

    file: str
    columns: Mapping[str, Any]
    rows: Any  # numbers; an array of int64
    unread: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    separator: str = ","
    kept: dict[object, Any] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        columns = {k: each if isinstance(each, pandas.Series) else cells_of(each) for k, each in self.columns.items()}
        object.__setattr__(self, "columns", columns)
        object.__setattr__(self, "rows", np.asarray(self.rows, np.int64))

    @classmethod
    def of(cls, file: str, columns: Mapping[str, Any], rows: Sequence[int] | Ints, **more: Any) -> "Table":
        """Return a table of columns of any type; those that cannot be read are in ``unread``."""
        clean: dict[str, Series] = {}
        unread: dict[str, str] = {}
        for name, each in columns.items():
            try:
                clean[name] = cells_of(each)
            except TypeError as cause:
                unread[name] = str(cause)
            except UnicodeEncodeError:
                raise RangeError(f"{file}, column {brief(name)}: a text holds half of a character.") from None
        return cls(file, clean, rows, unread, **more)

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

    def numbers(self, name: str) -> Floats | None:
        """Return the numbers of a column, NaN where missing; None unless all its texts are plain numbers."""
        if name not in self.kept:
            numbers = cast(self.column(name))
            if numbers is None:
                rows, different = self.different(name)
                numbers = plain_numbers(different)
                numbers = None if numbers is None else np.append(numbers, np.nan)[rows]
            self.kept[name] = numbers
        found: Floats | None = self.kept[name]
        return found

    def different(self, name: str) -> tuple[Ints, Series]:
        """Return for each row the place of its cell among the different ones, -1 where it is missing, and these."""
        key = name, "different"
        if key not in self.kept:
            places, cells = self.column(name).factorize()
            self.kept[key] = places, pandas.Series(cells)
        found: tuple[Ints, Series] = self.kept[key]
        return found

    def only(self, kept: Sequence[int] | Ints) -> "Table":
        """Return the table with only these rows, counted from 0."""
        places = np.asarray(kept, np.int64)
        columns = {name: cells.iloc[places].reset_index(drop=True) for name, cells in self.columns.items()}
        some = {key: each[places] for key, each in self.kept.items() if isinstance(each, np.ndarray)}
        return replace(self, columns=columns, rows=np.asarray(self.rows)[places], kept=some)


def named(file: str, names: Iterable[object]) -> list[str]:
    """Return the names of columns; those that have none are called after their place, as an index often is."""
    found = [str(name).strip() or f"unnamed {place}" for place, name in enumerate(names, 1)]
    twice = next((name for name, count in Counter(found).items() if count > 1), None)
    if twice is not None:
        raise ShapeError(f"{file} has two columns called {twice!r}; column names must be unique.")
    return found


def table_of(frame: Any, name: str = "the table") -> Table:
    """Return a data frame of pandas or polars as a table, with the cells that its CSV file would have.

    Texts, numbers, truth values, dates and categories are read, and None, NaN, NaT and NA are missing. The index is
    ignored. Rows are counted from 0.
    """
    if not isinstance(frame, pandas.DataFrame) and hasattr(frame, "to_pandas"):
        frame = frame.to_pandas(use_pyarrow_extension_array=True)  # of polars
    if not isinstance(frame, pandas.DataFrame) or not len(frame.columns):
        raise PyroDropoutError(f"a data frame with named columns is needed; got {type(frame).__name__}.")
    names = named(name, frame.columns)
    if not len(frame):
        raise ShapeError(f"{name} has no rows.")
    return Table.of(name, {each: frame.iloc[:, place] for place, each in enumerate(names)}, range(len(frame)))


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
    elif isinstance(kind, pandas.StringDtype) or is_a.is_datetime64_any_dtype(kind):
        return texts_of(series)
    gaps = series.isna()
    return texts_of([None if gap else _as_text(each) for each, gap in zip(series, gaps, strict=True)])


def texts_of(texts: Any) -> Series:
    """Return texts without the spaces around them; those that mean a missing value are missing."""
    series = pandas.Series(texts).astype("str")
    series = series.str.strip()
    gaps = series.isin(_GAPS)
    return series.mask(gaps) if gaps.any() else series


def cast(texts: Any) -> Floats | None:
    """Return texts as Arrow casts them to float64; None if one is no number, or has spaces around it.

    Python knows more numbers, such as "１２".
    """
    try:
        import pyarrow

        given = pyarrow.array(texts)
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
    texts = cells.to_numpy(object, na_value=np.nan)
    try:
        found = texts.astype(np.float64)
    except ValueError:
        return None
    return None if "_" in "".join(map(str, texts)) else found  # 1_000 is a number only in Python


def from_arrow(found: Any) -> Any:
    """Return a table or an array of Arrow in types of pandas; whole numbers with gaps stay whole."""
    return found.to_pandas(types_mapper=lambda kind: _WHOLE.get(str(kind)))


def _as_text(value: object) -> str:
    """Return a value of Python or NumPy as the text that a CSV file would have; ``TypeError`` for others."""
    if isinstance(value, bool | np.bool_):
        return str(value).lower()
    if isinstance(value, Real) and not isinstance(value, Integral):
        return number_text(float(str(value)))
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


def brief(cell: object) -> str:
    """Return a cell for a message; a long one is truncated."""
    if isinstance(cell, str) and len(cell) > 2 * _SHOWN:
        return f"{cell[:_SHOWN] + '...'!r} ({len(cell)} characters)"
    return number_text(cell) if isinstance(cell, float) else repr(cell)
