"""How the values of one column are written: plain numbers, marks of decimals and thousands, currency signs, dates.

A notation is recognised from the whole training column, stored with the run, and then required of every new value.
Where two readings are possible, the table is refused.
"""

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pandas

from pyro_dropout.tables.settings import Decimal
from pyro_dropout.tables.table import EXACT, Bools, Floats, Series, Table, brief, number_text, plain_numbers

Kind = Literal["number", "date", "truth"]

# (decimal mark, mark of thousands), the plain one first.
MARKS = ((".", ""), (".", ","), (",", ""), (",", "."), (".", " "), (",", " "), (".", "'"), (",", "'"))
# Among numbers, dates and truth values, these mean a missing value; among other texts, they may be names.
BLANKS = frozenset({"-", "--", "---", "–", "—", ".", "..", "...", "(null)", "nil", "missing", "unknown", "n.d.", "tbd"})
BLANKS |= {"not available", "not applicable", "no data", "not known", "#value!", "#div/0!", "#ref!", "#name?", "#num!"}

_NAMES = {".": "point", ",": "comma", " ": "space", "'": "apostrophe"}
_CURRENCY = "[A-Z]{0,3}[$¢£¤¥֏؋৳฿₠-₿]"
_SPACES = " \u00a0\u2009\u202f"
_SHAPE = re.compile(
    rf"(?P<sign>[-+]?)[{_SPACES}]?(?P<before>{_CURRENCY})?[{_SPACES}]?(?P<inner>[-+]?)"
    rf"(?P<digits>[0-9.,](?:[0-9.,'’{_SPACES}]*[0-9.,])?(?:[eE][-+]?[0-9]+)?)[{_SPACES}]?(?P<after>[%‰]|{_CURRENCY})?"
)
_MEASURE = re.compile(rf"(?P<number>[-+−]?[0-9][0-9.,]*)[{_SPACES}]?(?P<unit>[^\W\d_]\S*|°\S*)")
_PARTS = ("%", "‰")
_POWERS = frozenset({"k", "K", "m", "M", "B", "b", "bn", "G", "T", "Mio", "Mrd"})
_ONES = str.maketrans("23456789", "11111111")
_ALIKE = str.maketrans({**dict.fromkeys(_SPACES, " "), "’": "'"})
_CLOCK = r"[0-9]{2}:[0-9]{2}(?::[0-9]{2}(?:\.[0-9]{1,9})?)?"
_ZONE = r"(?:Z|[-+][0-9]{2}:?[0-9]{2})"
_MOMENT = rf"[0-9]{{4}}-[0-9]{{2}}-[0-9]{{2}}(?:[T ]{_CLOCK}{_ZONE}?)?"
# In nanoseconds, pandas cannot hold the years before 1678 and after 2261, such as 9999.
_EPOCH, _DAY = pandas.Timestamp(0, tz="UTC").as_unit("s"), pandas.Timedelta(days=1)
_POINTED = re.compile(r"\A(-?(?:0|[1-9][0-9]*))\.0*\Z")  # 3.0
_TEXTS = 0.1  # of the cells that are no numbers make a column of text; fewer are mistakes


@dataclass(frozen=True)
class Notation:
    """How the values of a column are written.

    Attributes:
        kind: "number", "date" (a number of days), or "truth" (true and false, or 1 and 0).
        decimal: the decimal mark of numbers.
        thousands: the mark between thousands; "" for none.
        unit: the currency or percent sign of every number; "" for none.
        zoned: whether dates have a time zone.

    Example:
        >>> price = Notation(decimal=",", thousands=".", unit="€")
        >>> price.value("1.234,50 €"), price.value("1234.5"), price.example
        (1234.5, None, '1.234,5 €')
    """

    kind: Kind = "number"
    decimal: str = "."
    thousands: str = ""
    unit: str = ""
    zoned: bool = False

    def values(self, cells: Series) -> Floats:
        """Return cells as numbers, dates as days since 1970; NaN where they are missing or written otherwise."""
        if cells.dtype == np.float64:
            usable = self.kind == "number" and self.unit not in _PARTS  # a program holds 12 % as 0.12
            return cells.to_numpy() if usable else np.full(len(cells), np.nan)
        found = plain_numbers(cells) if self == NUMBER else None
        if found is not None:
            return found
        places, texts = cells.factorize()
        if self.kind == "date":
            different = pandas.Series(texts, dtype="str")
            days = (_moments(different) - _EPOCH) / _DAY
            numbers = days.where(_zoned(different) == self.zoned).to_numpy(np.float64)
        else:
            numbers = np.array([self.value(text) for text in texts], np.float64)
        values: Floats = np.append(numbers, np.nan)[places]
        return values

    def value(self, text: str) -> float | None:
        """Return a text as a number; None if it is not written in this way."""
        if not self.unit and (self.decimal, self.thousands) == MARKS[0] and (number := _as_number(text)) is not None:
            return number
        unit, digits = _split(text)
        if unit != self.unit or not _fits(digits, self.decimal, self.thousands):
            return None
        return _as_number(digits.replace(self.thousands, "").replace(self.decimal, "."))

    def labels(self, cells: Iterable[str | float]) -> list[str]:
        """Return cells as names of categories: 1 and 1.0 are one, and True and true."""
        truth = {"0": "false", "1": "true"} if self.kind == "truth" else {}
        texts = (number_text(cell) if isinstance(cell, float) else cell for cell in cells)
        plain = (cell.lower() if cell.lower() in ("true", "false") else _POINTED.sub(r"\1", cell) for cell in texts)
        return [truth.get(label, label) for label in plain]

    @property
    def example(self) -> str:
        """A value that is written in this way."""
        if self.kind == "date":
            return "2024-01-31T12:00Z" if self.zoned else "2024-01-31"
        number = f"1{self.thousands}234{self.decimal}5"
        if self.unit.endswith("$"):
            return f"{self.unit}{number}"
        return f"{number} {self.unit}" if self.unit and self.unit not in "%‰" else f"{number}{self.unit}"

    @property
    def described(self) -> str:
        """The notation in words; "" for plain numbers."""
        if self.kind == "date":
            return "dates, in days" + (", UTC" if self.zoned else "")
        words = [f"decimal {_NAMES[self.decimal]}"] if self.decimal != "." else []
        words += [f"thousands {_NAMES[self.thousands]}"] if self.thousands else []
        words += [f"12{self.unit} is 12" if self.unit in "%‰" else self.unit] if self.unit else []
        return ", ".join(words)


NUMBER = Notation()


def is_number(text: str) -> bool:
    """Return whether a text is a number in some notation."""
    return _as_number(text) is not None or any(_layout(text.translate(_ONES))[1])


def are_dates(texts: Series) -> Series:
    """Return which texts are dates in ISO 8601, with or without a time of day."""
    return _moments(texts).notna()


def without_blanks(cells: Series) -> Series:
    """Return a column in which words for missing values, such as - and unknown, are missing."""
    return cells if cells.dtype == np.float64 else cells.mask(cells.str.lower().isin(BLANKS))


def _moments(cells: Series) -> Series:
    """Return dates in ISO 8601 as time stamps in UTC; NaT for anything else."""
    dates = cells.where(cells.str.fullmatch(_MOMENT, na=False))
    return pandas.to_datetime(dates, format="ISO8601", errors="coerce", utc=True)


def _zoned(cells: Series) -> Series:
    return cells.str.contains(rf":.*{_ZONE}$")


def _as_number(text: str) -> float | None:
    try:
        return None if "_" in text else float(text)
    except ValueError:
        return None


def _split(text: str) -> tuple[str, str]:
    """Return the unit of a number and its signed digits with all marks; ("", "") if the text is not of this form."""
    found = _SHAPE.fullmatch(text.replace("−", "-"))
    if not found or (found["before"] and found["after"]) or (found["sign"] and found["inner"]):
        return "", ""
    sign = found["sign"] or found["inner"]
    return found["before"] or found["after"] or "", sign + found["digits"].translate(_ALIKE)


@functools.lru_cache(10_000)  # of many numbers, few are laid out differently
def _layout(shape: str) -> tuple[str, tuple[bool, ...]]:
    """Return the unit of a number whose digits but 0 are all 1, and which of ``MARKS`` it may have."""
    unit, digits = _split(shape)
    return unit, tuple(_fits(digits, *marks) for marks in MARKS)


def _fits(digits: str, decimal: str, thousands: str) -> bool:
    """Return whether signed digits are a number with these marks; thousands stand in groups of three."""
    return _pattern(decimal, thousands).fullmatch(digits) is not None


@functools.cache
def _pattern(decimal: str, thousands: str) -> re.Pattern[str]:
    whole = rf"[1-9][0-9]{{0,2}}(?:{re.escape(thousands)}[0-9]{{3}})+|[0-9]+" if thousands else "[0-9]+"
    mark = re.escape(decimal)
    end = "*" if decimal == "." else "+"  # 1. is a number in every program; 1, is a slip
    return re.compile(rf"[-+]?(?:(?:{whole})(?:{mark}[0-9]{end})?|{mark}[0-9]+)(?:[eE][-+]?[0-9]+)?")


# --- recognition ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Written:
    """What the values of a column are, and what is in doubt.

    Attributes:
        notation: of its numbers, dates or truth values; None for text.
        comma: how it is written if its commas are decimal marks, where that is possible too and means other numbers.
        points: whether points are the decimal marks of the column beyond doubt.
        cell: the first one that may be read in two ways, or that is wrong.
        unknown: why its values cannot be read, though they look like numbers or dates; "" if they can.
    """

    notation: Notation | None = None
    comma: Notation | None = None
    points: bool = False
    cell: str = ""
    unknown: str = ""


class MisfitError(Exception):
    """A cell that is not written as the others of its column are, and what is wrong with it."""

    def __init__(self, cell: str, said: str) -> None:
        super().__init__(said)
        self.cell = cell


def recognise(table: Table, name: str, mixed: bool = True) -> Written:
    """Return how the values of a column are written; raise ``MisfitError`` if a few do not agree with the others.

    If they are ``mixed``, words for missing values may be among them, and more texts than a few slips make text of it.
    """
    cells, numbers = table.column(name), table.numbers(name)
    if numbers is not None:
        known = ~np.isnan(numbers)
        return _plain(cells, numbers) if known.all() else _plain(cells[known], numbers[known])
    rows, different = table.different(name)
    counts = pandas.Series(np.bincount(rows[rows >= 0], minlength=len(different)), different.to_numpy())
    rest = without_blanks(different).dropna()
    if mixed and len(rest):
        different, counts = rest.reset_index(drop=True), counts.iloc[rest.index]
        numbers = plain_numbers(different)
        if numbers is not None:
            return _plain(different, numbers)
    if different.str.lower().isin(["true", "false", "0", "1", "0.0", "1.0"]).all():
        return Written(Notation("truth"))
    dates = are_dates(different).to_numpy(bool)
    others = counts[~dates][~different[~dates].map(is_number).to_numpy(bool)].sum()
    if others == counts.sum():
        return _texts(different)
    if mixed and others > _TEXTS * counts.sum():
        return Written()
    if not dates.any():
        return _marked(different, counts)
    zoned = _zoned(different).to_numpy(bool)
    return Written(_best({Notation("date", zoned=each): dates & (zoned == each) for each in (True, False)}, counts)[0])


def _marked(different: Series, counts: Series) -> Written:
    """Return the unit and the marks of numbers."""
    units, marks = map(np.array, zip(*(_layout(text.translate(_ONES)) for text in different), strict=True))
    unit = counts.groupby(units, sort=False).sum().idxmax()
    fits = {Notation("number", *each, unit): (units == unit) & marks[:, k] for k, each in enumerate(MARKS)}
    possible = _best(fits, counts)
    point, comma = (next((each for each in possible if each.decimal == mark), possible[0]) for mark in ".,")
    apart = (text for text in (different if point != comma else ()) if point.value(text) != comma.value(text))
    if (cell := next(apart, None)) is not None:
        return Written(point, comma, cell=cell)
    marked = bool(point.thousands) or bool(different.str.contains(".", regex=False).any())
    return Written(point, points=point.decimal == "." and marked)


def _best(fits: dict[Notation, Bools], counts: Series) -> list[Notation]:
    """Return the notations that all different cells fit; raise for the first that does not fit the commonest."""
    best = max(fits, key=lambda each: counts[fits[each]].sum())
    if not fits[best].all():
        cell, others = counts.index[int(np.argmin(fits[best]))], counts[fits[best]].sum()
        what = f"a {best.kind} such as {best.example}"
        raise MisfitError(cell, f"{brief(cell)} is not {what}, and {others} other values of the column are")
    return [each for each, right in fits.items() if right.all()]


def _plain(texts: Series, numbers: Floats) -> Written:
    """Return what plain numbers are; whole numbers with zeros before them are codes."""
    if texts.dtype == np.float64:
        return Written(NUMBER, points=bool((numbers[np.isfinite(numbers)] % 1 != 0).any()))
    large = (np.abs(numbers) >= EXACT) & np.isfinite(numbers)
    for text in texts[large] if large.any() else ():
        if re.fullmatch(r"[-+]?[0-9]+", text) and int(text) != int(float(text)):
            many = f"{brief(text)} has more digits than a number here; subtract a constant"
            return Written(cell=text, unknown=many)
    whole = texts[np.trunc(numbers) == numbers]
    if whole[whole.str.startswith(("0", "+0", "-0"))].str.fullmatch("[-+]?0[0-9]+").any():
        return Written()
    points = "." in "".join(texts.iloc[:1]) or bool(texts.str.contains(".", regex=False).any())
    if not points or not all(_fits(text, ",", ".") for text in texts):  # ends with the first that does not
        return Written(NUMBER, points=points)
    return Written(NUMBER, Notation(decimal=",", thousands="."), cell=next(text for text in texts if "." in text))


def _texts(different: Series) -> Written:
    """Return text, or why values that look like numbers or dates cannot be read."""
    parts, first = [_MEASURE.fullmatch(text) for text in different], str(different[0])
    if all(parts) and len({part["number"] for part in parts if part}) > 2:
        units = {part["unit"] for part in parts if part}
        if len(units) == 1 or units <= _POWERS:
            return Written(cell=first, unknown=f"{brief(first)} is a number with a unit; write the number alone")
    if all(any(map(str.isdigit, text)) and not any(map(str.isalpha, text)) for text in different):
        said = f"{brief(first)} is a number or a date in an unknown form; write it like 1234.5 or 2024-01-31"
        return Written(cell=first, unknown=said)
    return Written()


def settled(
    found: dict[str, Written], every: dict[str, Written], decimal: Decimal | None, semicolons: bool
) -> tuple[dict[str, Written], str | None]:
    """Return columns with what 1,200 and 1.200 mean in them, and the first one of which that is not clear.

    Where 1,200 may be large or small, the marks of other columns decide. 1.200 has a decimal point, as in every CSV
    file, unless another column has decimal commas, or nothing in a file with semicolons, which programs write where
    commas are decimal marks, shows otherwise.

    Args:
        found: how columns are written.
        every: the same of all columns, also of those that are not used.
        decimal: the decimal mark that was given.
        semicolons: whether they separate the columns.
    """
    sure = [each.notation for each in every.values() if each.notation is not None and each.comma is None]
    points = any(each.points for each in every.values())
    commas = any(each.decimal == "," or each.thousands == "." for each in sure)
    clear = dict(found)
    for name, each in found.items():
        if each.comma is None or each.notation is None:
            continue
        large = bool(each.notation.thousands)  # 1,200; else 1.200
        if decimal is None and (points == commas if large else commas or (semicolons and not points)):
            return clear, name
        if decimal == "comma" or (decimal is None and large and commas):
            clear[name] = replace(each, notation=each.comma)
    return clear, None
