"""Cells of a table, and columns of them: texts as a CSV file has them, or plain numbers; None where one is missing.

Values of other types become the text that a CSV file would have, so that the same table means the same in all formats.
"""

import datetime
import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import product
from numbers import Integral, Real
from typing import Any, overload

import numpy as np
import pandas
from numpy.typing import NDArray

from pyro_dropout.errors import RangeError

try:
    import pyarrow
except ImportError:  # pandas has all that is needed, in more time
    pyarrow = None

Cell = str | float | None
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

MISSING = frozenset({"", "na", "n/a", "n.a.", "#n/a", "nan", "<na>", "null", "none", "?"})
# Among numbers, dates and truth values, these mean the same; among other texts, they may be names.
_BLANKS = frozenset(
    {"-", "--", "---", "–", "—", ".", "..", "...", "(null)", "nil", "missing", "unknown", "n.d.", "tbd"}
)
_BLANKS |= {"not available", "not applicable", "no data", "not known", "#value!", "#div/0!", "#ref!", "#name?", "#num!"}
EXACT = 2**53  # from here on, float64 skips whole numbers
_FEW = 20  # texts that are looked at one by one before all of them
_GAPS = [*{"".join(case) for word in MISSING for case in product(*zip(word, word.upper(), strict=True))}]
_SHOWN = 30  # characters of a long cell in a message
_WHOLE = re.compile(r"[-+]?[0-9]+")
_NUMERAL = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]*)?")  # 007 is a code, not a number
_CLOCK = r"[0-9]{2}:[0-9]{2}(?::[0-9]{2}(?:\.[0-9]{1,6}0*)?)?(?:Z|[-+][0-9]{2}:?[0-9]{2})?"
_MOMENT = re.compile(rf"[0-9]{{4}}-[0-9]{{2}}-[0-9]{{2}}(?:[T ]{_CLOCK})?")


def is_blank(cell: Cell) -> bool:
    """Return whether a cell among numbers means that the value is missing, such as - or unknown.

    Example:
        >>> [is_blank(cell) for cell in ("-", "Unknown", "-5", "oak")]
        [True, True, False, False]
    """
    return isinstance(cell, str) and cell.lower() in _BLANKS


def as_number(cell: Cell) -> float | None:
    """Return a cell that is a plain number, such as -2.5e3; None for anything else.

    Example:
        >>> as_number("2.50"), as_number("1,5"), as_number("1_000")
        (2.5, None, None)
    """
    try:
        return None if cell is None or "_" in str(cell) else float(cell)  # 1_000 is a number only in Python
    except ValueError:
        return None


def as_moment(cell: Cell) -> datetime.datetime | None:
    """Return a cell that is a date in ISO 8601, with or without a time of day; None for anything else.

    Example:
        >>> as_moment("2024-01-31"), as_moment("31.01.2024"), as_moment("2024-02-31")
        (datetime.datetime(2024, 1, 31, 0, 0), None, None)
    """
    if not isinstance(cell, str) or not _MOMENT.fullmatch(cell):
        return None
    try:
        return datetime.datetime.fromisoformat(cell)
    except ValueError:
        return None


def as_text(value: object) -> str:
    """Return a value of Python, NumPy or pandas as the text that a CSV file would have; ``TypeError`` for others.

    Example:
        >>> import datetime, numpy as np
        >>> [as_text(value) for value in (np.float32(0.1), 3.0, True, datetime.date(2024, 1, 31))]
        ['0.1', '3', 'true', '2024-01-31']
    """
    if isinstance(value, bool | np.bool_):
        return str(value).lower()
    if isinstance(value, str | Integral):
        return str(value)
    if isinstance(value, Real):
        # str is the shortest number that rounds to it: the 0.1 of a CSV file, not the 0.10000000149 of float32.
        whole = abs(float(value)) < EXACT and float(value).is_integer()
        return str(int(float(value))) if whole else str(value)
    if isinstance(value, Decimal):
        return format(value, "f")
    if isinstance(value, datetime.datetime):
        value = value if value.tzinfo is None else value.astimezone(datetime.UTC)
        whole = value.tzinfo is None and value.time() == datetime.time()
        return value.date().isoformat() if whole else value.isoformat(" ")
    if isinstance(value, datetime.date):
        return value.isoformat()
    raise TypeError(type(value).__name__)


@functools.lru_cache(2**14)  # columns of categories have few of them
def as_label(cell: Cell) -> str:
    """Return a cell as the name of a category, the same for all ways to write a number, a truth value or a date.

    Example:
        >>> [as_label(cell) for cell in ("1.0", 1.0, "True", "2024-01-31 00:00", "007", "oak")]
        ['1', '1', 'true', '2024-01-31', '007', 'oak']
    """
    text = as_text(cell)
    if text.lower() in ("true", "false"):
        return text.lower()
    if _NUMERAL.fullmatch(text):
        text = text.rstrip("0").rstrip(".") if "." in text else text
        return "0" if text == "-0" else text
    moment = as_moment(text)
    return text if moment is None else as_text(moment)


def brief(cell: Cell) -> str:
    """Return a cell for a message; a long one is truncated."""
    if isinstance(cell, str) and len(cell) > 2 * _SHOWN:
        return f"{cell[:_SHOWN] + '...'!r} ({len(cell)} characters)"
    return repr(cell) if cell is None or isinstance(cell, str) else as_text(cell)


# --- columns ---------------------------------------------------------------------------------------------------------


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
        values: a Series of stripped texts, or of ``float64`` numbers; or a function that returns it.

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
        """The column's numbers, NaN where missing; None unless all are plain numbers."""
        if self.texts is None:
            return np.array(self.values)
        if self._cast is not None:
            return self._cast
        plain = all(cell is None or as_number(cell) is not None for cell in self[:_FEW])
        return _python_numbers(self.values) if plain else None

    def unheld(self) -> int | None:
        """Return the first row with a whole number that float64 cannot tell from its neighbours; None if all are."""
        if self.numbers is None or self.texts is None:
            return None
        large = (np.abs(self.numbers) >= EXACT) & np.isfinite(self.numbers)
        texts = ((row, str(self[row])) for row in np.flatnonzero(large).tolist())
        return next((row for row, text in texts if _WHOLE.fullmatch(text) and int(text) != int(float(text))), None)

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
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        return isinstance(value, float | np.floating)
    return abs(int(value)) < EXACT


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
