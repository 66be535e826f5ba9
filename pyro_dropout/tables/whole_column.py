"""A whole column in a pandas Series, so that texts are parsed and counted at once.

A cell becomes a value of Python when it is asked for.
"""

import datetime
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import product
from typing import Any, overload

import numpy as np
import pandas
from numpy.typing import NDArray

from pyro_dropout.mathematics.errors import RangeError
from pyro_dropout.tables.cells import EXACT, MISSING, Cell, as_number, cell_of

try:
    import pyarrow
    from pyarrow import compute
except ImportError:  # pandas has all that is needed, in more time
    pyarrow = None

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

_FEW = 20  # texts that are looked at one by one before all of them
_GAPS = [*{"".join(case) for word in MISSING for case in product(*zip(word, word.upper(), strict=True))}]


def cell_from(value: object) -> Cell:
    """Return a value of Python, NumPy or pandas as the cell that a CSV file would have; raise ``TypeError`` for others.

    Example:
        >>> import datetime, numpy as np
        >>> [cell_from(value) for value in (" NA ", np.float32(0.1), np.int64(3), float("nan"))]
        [None, 0.1, 3, None]
        >>> cell_from(datetime.date(2024, 1, 31))
        datetime.datetime(2024, 1, 31, 0, 0)
    """
    if value is None or type(value).__name__ in ("NaTType", "NAType"):
        return None
    if isinstance(value, str):
        return cell_of(str(value))
    if isinstance(value, bool | np.bool_):
        return bool(value)
    if isinstance(value, int | np.integer):
        return int(value)
    if isinstance(value, float | np.floating):
        # The shortest decimal number that rounds to it: the 0.1 of a CSV file, not the 0.10000000149 of float32.
        return None if math.isnan(value) else float(str(value)) if isinstance(value, np.floating) else value
    if isinstance(value, Decimal):
        return None if value.is_nan() else format(value, "f")
    if isinstance(value, datetime.datetime):
        if getattr(value, "nanosecond", 0):  # pandas has them, a cell has not
            raise RangeError(f"the date {value} is finer than a microsecond; round it.")
        zone = None if value.tzinfo is None else datetime.UTC
        value = value if zone is None else value.astimezone(zone)
        parts = value.year, value.month, value.day, value.hour, value.minute, value.second, value.microsecond
        return datetime.datetime(*parts, tzinfo=zone)
    if isinstance(value, datetime.date):
        return datetime.datetime(value.year, value.month, value.day)
    raise TypeError(type(value).__name__)


@dataclass(frozen=True)
class Distinct:
    """The different cells of a column that are not missing, in the order in which they appear.

    Attributes:
        cells: one of each.
        rows: where each appears first.
        counts: how often each appears.
        codes: of each row of the column, the place of its cell among ``cells``; -1 if it is missing.
    """

    cells: Sequence[Cell]
    rows: Ints
    counts: Ints
    codes: Ints

    @classmethod
    def of(cls, cells: Sequence[Cell], codes: Ints) -> "Distinct":
        """Return those of some cells that codes refer to, in the order in which they appear."""
        rows = np.full(len(cells) + 1, len(codes))  # one more for missing cells, whose code is -1
        rows[codes[::-1]] = np.arange(len(codes))[::-1]  # the last that is written stays: the first row
        order = np.argsort(rows[:-1], kind="stable")[: np.count_nonzero(rows[:-1] < len(codes))]
        place = np.full(len(cells) + 1, -1)
        place[order] = np.arange(len(order))
        counts = np.bincount(codes + 1, minlength=len(cells) + 1)[1:]
        return cls([cells[k] for k in order.tolist()], rows[order], counts[order], place[codes])

    def spread(self, chosen: Sequence[bool] | Bools) -> Bools:
        """Return for each row whether its cell is one of the chosen; a missing cell is not."""
        return np.append(np.asarray(chosen, np.bool_), False)[self.codes]


class Cells(Sequence[Cell]):
    """The cells of a column, None where the value is missing.

    Args:
        values: a Series of texts (``str``), of ``float64`` numbers below 2^53, or of any cells (``object``); or a
            function that returns it.
        array: texts of Arrow, instead of it; they are parsed and stripped when they are asked for.

    Example:
        >>> cells = Cells.of([" oak", "n/a", "elm", "oak"])
        >>> cells, cells.distinct.cells, cells.distinct.codes.tolist()
        (['oak', None, 'elm', 'oak'], ['oak', 'elm'], [0, -1, 1, 0])
    """

    def __init__(self, values: Any, array: Any = None) -> None:
        self._values, self._array = values, array

    @functools.cached_property
    def values(self) -> Any:
        """The Series."""
        if self._array is not None:
            return (_stripped(self._array) if self._plain is None else self._array).to_pandas().astype("str")
        return self._values() if callable(self._values) else self._values

    @functools.cached_property
    def _plain(self) -> Floats | None:
        """The numbers of texts of Arrow that are all plain numbers; then none is missing, and none has spaces."""
        found = None if self._array is None else _cast(self._array)
        return None if found is None or not bool((np.abs(found) < EXACT).all()) else found

    @classmethod
    def of(cls, values: Iterable[object], where: Callable[[int], str] = "row {}".format) -> "Cells":
        """Return values of Python as a column; raise ``TypeError`` with the name of a type that is not read."""
        found: list[Cell] = []
        try:
            for value in values:
                found.append(cell_from(value))
        except RangeError as cause:
            raise RangeError(f"{where(len(found))}: {cause}") from None
        kinds = {type(cell) for cell in found} - {type(None)}
        if kinds == {str}:
            return texts_of(found)
        if kinds and kinds <= {int, float} and all(cell is None or abs(cell) < EXACT for cell in found):  # type: ignore[arg-type]
            return cls(pandas.Series(found, dtype=np.float64))
        return cls(pandas.Series(found, dtype=object))

    def __len__(self) -> int:
        return len(self.missing)

    @overload
    def __getitem__(self, row: int) -> Cell: ...

    @overload
    def __getitem__(self, row: slice) -> list[Cell]: ...

    def __getitem__(self, row: int | slice) -> Cell | list[Cell]:
        if isinstance(row, slice):
            return list(Cells(self.values.iloc[row]))
        cell: Cell = self.values.iloc[row : row + 1 or None].tolist()[0]
        return None if self.missing[row] else cell

    def __iter__(self) -> Iterator[Cell]:
        for cell, gap in zip(self.values.tolist(), self.missing.tolist(), strict=True):
            yield None if gap else cell

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Cells | list) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))

    def take(self, rows: Ints) -> "Cells":
        """Return the column with only these rows; what is known of it is not computed again."""
        some = Cells(lambda: self.values.iloc[rows])
        some.__dict__["missing"] = self.missing[rows]
        if self.numbers is not None:
            some.__dict__["numbers"] = self.numbers[rows]
        elif "distinct" in self.__dict__:
            some.__dict__["distinct"] = Distinct.of(self.distinct.cells, self.distinct.codes[rows])
        return some

    def without(self, gone: Bools) -> "Cells":
        """Return the column with more missing cells."""
        return Cells(self.values.mask(gone, None)) if gone.any() else self

    @functools.cached_property
    def missing(self) -> Bools:
        """Which cells are missing."""
        return np.array(self.values.isna()) if self._plain is None else np.zeros(len(self._plain), np.bool_)

    @property
    def texts(self) -> Any:
        """The Series, if all its cells are texts; else None."""
        return self.values if isinstance(self.values.dtype, pandas.StringDtype) else None

    @functools.cached_property
    def numbers(self) -> Floats | None:
        """The column's numbers, NaN where missing; None unless all are plain numbers that float64 holds."""
        if self._plain is not None:
            return self._plain
        if self.values.dtype == np.float64:
            return np.array(self.values)
        texts = self.texts
        if texts is None or any(cell is not None and as_number(cell) is None for cell in self[:_FEW]):
            return None
        values = _parsed(texts)
        if values is None or not bool(((np.abs(values) < EXACT) | self.missing).all()):
            return None
        return values

    @functools.cached_property
    def distinct(self) -> Distinct:
        """The different cells; in a column of many types, where 1, 1.0 and True are equal, each counts as different."""
        if self.values.dtype == object:
            rows = np.flatnonzero(~self.missing)
            codes = np.full(len(self), -1)
            codes[rows] = np.arange(len(rows))
            return Distinct(self.values.iloc[rows].tolist(), rows, np.ones_like(rows), codes)
        codes, cells = self.values.factorize()
        return Distinct.of(cells.tolist(), codes)


def texts_of(texts: Any) -> Cells:
    """Return texts as cells, without the spaces around them, and None for those that mean a missing value.

    Args:
        texts: a list, a Series or an array of Arrow.
    """
    try:
        if pyarrow is None:
            series = pandas.Series(texts, dtype="str").str.strip()
            return Cells(series.mask(series.isin(_GAPS)))
        array = texts if isinstance(texts, pyarrow.ChunkedArray) else pyarrow.array(texts, "large_string")
    except UnicodeEncodeError:  # half of a pair of UTF-16, which some encodings allow
        return Cells(pandas.Series(list(map(cell_from, texts)), dtype=object))
    return Cells(None, array)


def _stripped(array: Any) -> Any:
    """Return texts of Arrow without the spaces around them, null for those that mean a missing value."""
    array = compute.utf8_trim_whitespace(array)
    gaps = compute.is_in(array, value_set=pyarrow.array(_GAPS, array.type))
    return compute.if_else(gaps, None, array) if compute.any(gaps).as_py() else array


def _cast(array: Any) -> Floats | None:
    """Return texts of Arrow as the float64 nearest to each, NaN where missing; None if one is not a plain number."""
    try:
        # A cast that fails is slow: Arrow writes a message for each text.
        few = array.slice(0, _FEW).cast("float64")
        return np.array(array.cast(few.type).to_numpy(zero_copy_only=False))
    except ValueError:
        return None


def _parsed(texts: Any) -> Floats | None:
    """Return the same of a Series; Python knows more numbers than Arrow, such as "１２"."""
    found = None if pyarrow is None else _cast(pyarrow.array(texts))
    if found is not None or texts.str.contains("_", regex=False).any():  # 1_000 is a number only in Python
        return found
    try:
        return np.array(texts.to_numpy(object, na_value=np.nan).astype(np.float64))
    except ValueError:
        return None
