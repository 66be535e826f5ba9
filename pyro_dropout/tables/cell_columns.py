"""A column of cells in a pandas Series, whose texts are parsed and counted at once."""

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
from pyro_dropout.tables.cells import EXACT, MISSING, Cell, as_number, as_text

try:
    import pyarrow
except ImportError:  # pandas has all that is needed, in more time
    pyarrow = None

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

_FEW = 20  # texts that are looked at one by one before all of them
_GAPS = [*{"".join(case) for word in MISSING for case in product(*zip(word, word.upper(), strict=True))}]


@dataclass(frozen=True)
class Distinct:
    """The different cells of a column that are not missing, in the order in which they appear.

    Attributes:
        cells: one of each.
        rows: where each appears first.
        counts: how often each appears.
        codes: of each row of the column, the place of its cell among ``cells``; -1 if it is missing.
    """

    cells: list[Cell]
    rows: Ints
    counts: Ints
    codes: Ints

    def spread(self, chosen: Sequence[bool] | Bools) -> Bools:
        """Return for each row whether its cell is one of the chosen; a missing cell is not."""
        return np.append(np.asarray(chosen, np.bool_), False)[self.codes]


class Cells(Sequence[Cell]):
    """The cells of a column, None where the value is missing.

    Args:
        values: a Series of stripped texts, or of ``float64`` numbers below 2^53; or a function that returns it.

    Example:
        >>> cells = Cells.of([" oak", "n/a", "elm", "oak"])
        >>> cells, cells.distinct.cells, cells.distinct.codes.tolist()
        (['oak', None, 'elm', 'oak'], ['oak', 'elm'], [0, -1, 1, 0])
    """

    def __init__(self, values: Any) -> None:
        self._values = values

    @functools.cached_property
    def values(self) -> Any:
        """The Series."""
        return self._values() if callable(self._values) else self._values

    @classmethod
    def of(cls, values: Iterable[object], where: Callable[[int], str] = "row {}".format) -> "Cells":
        """Return values of Python as a column; raise ``TypeError`` with the name of a type that is not read."""
        found = [None if _is_missing(value) else value for value in values]
        known = [value for value in found if value is not None]
        if known and all(map(_is_plain, known)):
            return cls(pandas.Series([None if value is None else float(str(value)) for value in found], dtype=float))
        for row, value in enumerate(found):
            if getattr(value, "nanosecond", 0):  # pandas has them, a cell has not
                raise RangeError(f"{where(row)}: the date {value} is finer than a microsecond; round it.")
        return cls.of_texts([None if value is None else as_text(value) for value in found])

    @classmethod
    def of_texts(cls, texts: Any) -> "Cells":
        """Return texts, a list or a Series, without the spaces around them, as a column."""
        try:
            series = pandas.Series(texts, dtype="str")
        except UnicodeEncodeError:  # half of a pair of UTF-16, which some encodings allow
            series = pandas.Series(texts, dtype=pandas.StringDtype("python", na_value=np.nan))
        plain = cls(series)
        if plain._cast is not None and not np.isnan(plain._cast).any():
            return plain  # Arrow takes no spaces around numbers
        series = series.str.strip()
        gaps = series.isin(_GAPS)
        return cls(series.mask(gaps) if gaps.any() else series)

    def __len__(self) -> int:
        return len(self.missing)

    @overload
    def __getitem__(self, row: int) -> Cell: ...

    @overload
    def __getitem__(self, row: slice) -> list[Cell]: ...

    def __getitem__(self, row: int | slice) -> Cell | list[Cell]:
        if isinstance(row, slice):
            some = self.values.iloc[row].tolist()
            return [None if gap else cell for cell, gap in zip(some, self.missing[row].tolist(), strict=True)]
        return self[row : row + 1 or None][0]

    def __iter__(self) -> Iterator[Cell]:
        for cell, gap in zip(self.values.tolist(), self.missing.tolist(), strict=True):
            yield None if gap else cell

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Cells | list) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))

    def take(self, rows: Ints) -> "Cells":
        """Return the column with only these rows; numbers are not parsed again."""
        some = Cells(lambda: self.values.iloc[rows])
        some.__dict__["missing"] = self.missing[rows]
        if self.numbers is not None:
            some.__dict__["numbers"] = self.numbers[rows]
        return some

    def without(self, gone: Bools) -> "Cells":
        """Return the column with more missing cells."""
        return Cells(self.values.mask(gone)) if gone.any() else self

    @functools.cached_property
    def missing(self) -> Bools:
        """Which cells are missing."""
        return np.array(self.values.isna())

    @property
    def texts(self) -> Any:
        """The Series, if its cells are texts; else None."""
        return None if self.values.dtype == np.float64 else self.values

    @functools.cached_property
    def numbers(self) -> Floats | None:
        """The column's numbers, NaN where missing; None unless all are plain numbers that float64 holds."""
        if self.texts is None:
            return np.array(self.values)
        found = self._cast
        if found is None and all(cell is None or as_number(cell) is not None for cell in self[:_FEW]):
            found = _python_numbers(self.values)
        return found if found is not None and bool(((np.abs(found) < EXACT) | self.missing).all()) else None

    @functools.cached_property
    def _cast(self) -> Floats | None:
        """The texts as the float64 nearest to each, by Arrow; None if one is not a plain number."""
        try:
            # A cast that fails is slow: Arrow writes a message for each text.
            few = pyarrow.array(self.values.iloc[:_FEW]).cast("float64")
            return np.array(pyarrow.array(self.values).cast(few.type).to_numpy(zero_copy_only=False))
        except (ValueError, AttributeError):  # AttributeError: without pyarrow
            return None

    @functools.cached_property
    def distinct(self) -> Distinct:
        """The different cells."""
        codes, cells = self.values.factorize()
        known = np.flatnonzero(codes >= 0)
        rows = known[np.unique(codes[known], return_index=True)[1]]
        return Distinct(cells.tolist(), rows, np.bincount(codes[known], minlength=len(cells)), codes)


def _is_plain(value: object) -> bool:
    """Return whether a value is a number that float64 holds."""
    number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    return number and abs(value) < EXACT  # type: ignore[arg-type]


def _is_missing(value: object) -> bool:
    if isinstance(value, Decimal):
        return value.is_nan()
    nan = isinstance(value, float | np.floating) and math.isnan(value)
    return nan or value is None or value is pandas.NaT or value is pandas.NA


def _python_numbers(texts: Any) -> Floats | None:
    """Return texts as numbers; Python knows more of them than Arrow, such as "１２"."""
    if texts.str.contains("_", regex=False).any():  # 1_000 is a number only in Python
        return None
    try:
        return np.array(texts.to_numpy(object, na_value=np.nan).astype(np.float64))
    except ValueError:
        return None
