"""How the values of one column are written: marks of decimals and thousands, a currency or a percent sign, dates.

A notation is recognised from the whole training column, stored with the run, and then required of every new value.
"""

import datetime
import functools
import re
from dataclasses import dataclass
from typing import Literal

from pyro_dropout.tables.cells import Cell, as_label, as_moment, as_number

Kind = Literal["number", "date", "boolean"]
Decimal = Literal["point", "comma"]

# (decimal mark, mark of thousands), the plain one first.
MARKS = ((".", ""), (".", ","), (",", ""), (",", "."), (".", " "), (",", " "), (".", "'"), (",", "'"))

_NAMES = {".": "point", ",": "comma", " ": "space", "'": "apostrophe"}
_CURRENCY = "[A-Z]{0,3}[$¢£¤¥֏؋৳฿₠-₿]"
_SPACES = " \u00a0\u2009\u202f"
_SHAPE = re.compile(
    rf"(?P<sign>[-+]?)[{_SPACES}]?(?P<before>{_CURRENCY})?[{_SPACES}]?(?P<inner>[-+]?)"
    rf"(?P<digits>[0-9.,](?:[0-9.,'’{_SPACES}]*[0-9.,])?(?:[eE][-+]?[0-9]+)?)[{_SPACES}]?(?P<after>[%‰]|{_CURRENCY})?"
)
_WORD = "(?:(?:[cdkm]?m|ft|in|mi|s|yd)[23]|[^\\W\\d_]{1,8}[²³]?)"
_MEASURE = re.compile(rf"(?P<number>[-+−]?[0-9][0-9.,]*)[{_SPACES}]?(?P<unit>[°µ]?{_WORD}(?:/{_WORD})?)")
_ALIKE = str.maketrans({**dict.fromkeys(_SPACES, " "), "’": "'"})
_EPOCH = datetime.datetime(1970, 1, 1)
_DAY = datetime.timedelta(days=1)
_TRUTH = {"0": "false", "1": "true"}


@dataclass(frozen=True)
class Notation:
    """How the values of a column are written.

    Attributes:
        kind: "number", "date" (a number of days), or "boolean" (true and false, or 1 and 0).
        decimal: the decimal mark of numbers.
        thousands: the mark between thousands; "" for none.
        unit: the currency or percent sign of every number, or its unit, such as "km"; "" for none.
        zoned: whether dates have a time zone.
        padded: whether some whole numbers begin with a zero, as codes do.

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
    padded: bool = False

    def value(self, cell: Cell) -> float | None:
        """Return a cell as a number, a date as days since 1970-01-01; None if it is not written in this way."""
        if self.kind == "date":
            return self._days(as_moment(cell))
        if not self.unit and (self.plain or not isinstance(cell, str)) and (number := as_number(cell)) is not None:
            return number
        unit, digits = ((split(cell) or measured(cell)) if isinstance(cell, str) else None) or ("", "")
        if unit != self.unit or not fits(digits, self.decimal, self.thousands):
            return None
        return as_number(digits.replace(self.thousands, "").replace(self.decimal, "."))

    def label(self, cell: Cell) -> str:
        """Return a cell as the name of a category."""
        label = as_label(cell)
        return _TRUTH.get(label, label) if self.kind == "boolean" else label

    def _days(self, moment: datetime.datetime | None) -> float | None:
        if moment is None or (moment.tzinfo is not None) != self.zoned:
            return None
        return (moment - _EPOCH.replace(tzinfo=datetime.UTC if self.zoned else None)) / _DAY

    def moment(self, days: float) -> datetime.datetime:
        """Return the date that is so many days after 1970-01-01."""
        return (_EPOCH + days * _DAY).replace(tzinfo=datetime.UTC if self.zoned else None)

    @functools.cached_property
    def plain(self) -> bool:
        """Whether numbers have a decimal point and nothing else."""
        return self.kind == "number" and (self.decimal, self.thousands, self.unit) == (*MARKS[0], "")

    @property
    def example(self) -> str:
        """A value that is written in this way."""
        if self.kind == "date":
            return "2024-01-31T12:00Z" if self.zoned else "2024-01-31"
        number = f"1{self.thousands}234{self.decimal}5"
        if not self.unit:
            return number
        if self.unit.endswith("$"):
            return f"{self.unit}{number}"
        return f"{number}{self.unit}" if self.unit in "%‰" else f"{number} {self.unit}"

    @property
    def described(self) -> str:
        """The notation in words; "" for plain numbers."""
        if self.kind == "date":
            return "dates, in days" + (", UTC" if self.zoned else "")
        words = [f"decimal {_NAMES[self.decimal]}"] if self.decimal != "." else []
        words += [f"thousands {_NAMES[self.thousands]}"] if self.thousands else []
        words += [f"12{self.unit} is 12" if self.unit in "%‰" else self.unit] if self.unit else []
        words += ["padded with zeros; --categorical if they are codes"] if self.padded else []
        return ", ".join(words)

    @property
    def known(self) -> bool:
        """Whether this is one of the notations that are recognised; one in a file may be another."""
        return (self.decimal, self.thousands) in MARKS


PLAIN = Notation()


def split(text: str) -> tuple[str, str] | None:
    """Return the unit of a number and its signed digits with all marks; None if the text is not of this form.

    Example:
        >>> split("-1.234,5 €"), split("$30"), split("oak")
        (('€', '-1.234,5'), ('$', '30'), None)
    """
    found = _SHAPE.fullmatch(text.replace("−", "-"))
    if not found or (found["before"] and found["after"]) or (found["sign"] and found["inner"]):
        return None
    sign = found["sign"] or found["inner"]
    return found["before"] or found["after"] or "", sign + found["digits"].translate(_ALIKE)


def measured(text: str) -> tuple[str, str] | None:
    """Return the unit after a number, a word such as "km", and the signed digits; None if the text has another form.

    Example:
        >>> measured("1,200.5 km"), measured("80km/h"), measured("-3 °C"), measured("oak 3"), measured("30")
        (('km', '1,200.5'), ('km/h', '80'), ('°C', '-3'), None, None)
    """
    found = _MEASURE.fullmatch(text)
    return (found["unit"], found["number"].replace("−", "-")) if found else None


def fits(digits: str, decimal: str, thousands: str) -> bool:
    """Return whether signed digits are a number with these marks; thousands stand in groups of three.

    Example:
        >>> fits("1,200", ".", ","), fits("1,200", ",", ""), fits("0,5", ".", ",")
        (True, True, False)
    """
    return _pattern(decimal, thousands).fullmatch(digits) is not None


@functools.cache
def _pattern(decimal: str, thousands: str) -> re.Pattern[str]:
    whole = rf"[1-9][0-9]{{0,2}}(?:{re.escape(thousands)}[0-9]{{3}})+|[0-9]+" if thousands else "[0-9]+"
    mark = re.escape(decimal)
    end = "*" if decimal == "." else "+"  # 1. is a number in every program; 1, is a slip
    return re.compile(rf"[-+]?(?:(?:{whole})(?:{mark}[0-9]{end})?|{mark}[0-9]+)(?:[eE][-+]?[0-9]+)?")


def is_number(text: str) -> bool:
    """Return whether a text is a number in some notation.

    Example:
        >>> [is_number(text) for text in ("1.5", "1,5", "12%", "$1,200", "1 200,50", "1.2.3", "oak")]
        [True, True, True, True, True, False, False]
    """
    if as_number(text) is not None:
        return True
    found = split(text)
    return found is not None and any(fits(found[1], *marks) for marks in MARKS)
