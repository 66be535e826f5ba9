"""One cell of a table: what is missing, what is a plain number or a date, and the name of a category."""

import datetime
import functools
import math
import re
from fractions import Fraction

Number = int | float
Cell = str | Number | datetime.datetime | None  # True and False are whole numbers to Python

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


def cell_of(text: str) -> str | None:
    """Return a text without the spaces around it; None if it means that the value is missing."""
    text = text.strip()
    return None if text.lower() in MISSING else text


def is_blank(cell: Cell) -> bool:
    """Return whether a cell among numbers means that the value is missing, such as - or unknown.

    Example:
        >>> [is_blank(cell) for cell in ("-", "Unknown", "-5", "oak")]
        [True, True, False, False]
    """
    return isinstance(cell, str) and cell.lower() in _BLANKS


def as_number(cell: Cell) -> Number | None:
    """Return a cell that is a plain number, such as -2.5e3; a large whole number exactly. None for anything else.

    Example:
        >>> as_number("2.50"), as_number("9007199254740993"), as_number("1,5"), as_number("1_000")
        (2.5, 9007199254740993, None, None)
    """
    if not isinstance(cell, str):
        return cell if isinstance(cell, int | float) and not isinstance(cell, bool) else None
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
    if isinstance(cell, datetime.datetime):
        return cell
    if not isinstance(cell, str) or not _MOMENT.fullmatch(cell):
        return None
    try:
        return datetime.datetime.fromisoformat(cell)
    except ValueError:
        return None


def as_text(cell: Cell) -> str:
    """Return a cell as text: as it was written, or, of a type of Parquet, whole numbers without a decimal point."""
    if isinstance(cell, bool):
        return str(cell).lower()
    if isinstance(cell, float):
        return str(int(cell)) if math.isfinite(cell) and cell == int(cell) else repr(cell)
    if isinstance(cell, datetime.datetime):
        whole = cell.tzinfo is None and cell.time() == datetime.time()
        return cell.date().isoformat() if whole else cell.isoformat(" ")
    return str(cell)


def as_label(cell: Cell) -> str:
    """Return a cell as the name of a category, the same for all ways to write a number, a truth value or a date.

    Example:
        >>> [as_label(cell) for cell in ("1.0", 1, "True", True, "2024-01-31 00:00", "007", "oak")]
        ['1', '1', 'true', 'true', '2024-01-31', '007', 'oak']
    """
    return _label_of(cell) if isinstance(cell, str) else _label(cell)


def _label(cell: Cell) -> str:
    text = as_text(cell)
    if text.lower() in ("true", "false"):
        return text.lower()
    if _NUMERAL.fullmatch(text):
        text = text.rstrip("0").rstrip(".") if "." in text else text
        return "0" if text == "-0" else text
    moment = as_moment(cell)
    if moment is None:
        return text
    return as_text(moment if moment.tzinfo is None else moment.astimezone(datetime.UTC))


_label_of = functools.lru_cache(2**14)(_label)  # columns of categories have few of them


def brief(cell: Cell) -> str:
    """Return a cell for a message; a long one is truncated."""
    if isinstance(cell, str) and len(cell) > 2 * _SHOWN:
        return f"{cell[:_SHOWN] + '...'!r} ({len(cell)} characters)"
    return repr(cell) if cell is None or isinstance(cell, str) else as_text(cell)
