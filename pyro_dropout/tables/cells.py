"""One cell of a table: a text as a CSV file has it, or a plain number; None where the value is missing.

Values of other types become the text that a CSV file would have, so that the same table means the same in all formats.
"""

import datetime
import functools
import math
import re
from decimal import Decimal
from fractions import Fraction
from numbers import Integral, Real
from typing import overload

Number = int | float
Cell = str | float | None

MISSING = frozenset({"", "na", "n/a", "n.a.", "#n/a", "nan", "<na>", "null", "none", "?"})
# Among numbers, dates and truth values, these mean the same; among other texts, they may be names.
_BLANKS = frozenset(
    {"-", "--", "---", "–", "—", ".", "..", "...", "(null)", "nil", "missing", "unknown", "n.d.", "tbd"}
)
_BLANKS |= {"not available", "not applicable", "no data", "not known", "#value!", "#div/0!", "#ref!", "#name?", "#num!"}
EXACT = 2**53  # from here on, float64 skips whole numbers
_SHOWN = 30  # characters of a long cell in a message
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


@overload
def as_number(cell: float) -> float: ...


@overload
def as_number(cell: Cell) -> Number | None: ...


def as_number(cell: Cell) -> Number | None:
    """Return a cell that is a plain number, such as -2.5e3; a large whole number exactly. None for anything else.

    Example:
        >>> as_number("2.50"), as_number("9007199254740993"), as_number("1,5"), as_number("1_000")
        (2.5, 9007199254740993, None, None)
    """
    if not isinstance(cell, str):
        return cell
    try:
        number = None if "_" in cell else float(cell)  # 1_000 is a number only in Python
    except ValueError:
        return None
    if number is None or abs(number) < EXACT or not math.isfinite(number):
        return number
    exact = Fraction(cell.strip())
    return int(exact) if exact.denominator == 1 else number


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
    if type(value).__name__ in ("bool", "bool_"):  # NumPy's too, which is not imported here
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
