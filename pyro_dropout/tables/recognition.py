"""Recognise from a whole column how its values are written; stop where two readings are possible."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pyro_dropout.errors import RangeError
from pyro_dropout.tables.cells import Cells, Distinct, as_label, as_moment, brief
from pyro_dropout.tables.notation import MARKS, Decimal, Notation, fits, is_number, measured, split
from pyro_dropout.tables.precision import known_numbers
from pyro_dropout.tables.table import Table

_POWERS = frozenset({"k", "K", "m", "M", "B", "b", "bn", "G", "T", "Mio", "Mrd"})
_FEW = 20  # cells that are looked at before all of them
_PADDED = "[-+]?0[0-9]+"


@dataclass(frozen=True)
class Recognised:
    """What a column holds.

    Attributes:
        notation: of its numbers, dates or booleans; None for text.
        comma: how it is written if its commas are decimal marks, where that is possible too and means other numbers.
        row: where the two readings first differ, or what is unknown stands.
        points: whether points are the decimal marks of the column beyond doubt.
        unknown: why its values cannot be read, though they look like numbers or dates; "" if they can.
    """

    notation: Notation | None
    comma: Notation | None = None
    row: int = 0
    points: bool = False
    unknown: str = ""


def recognise(table: Table, name: str, instead: str) -> Recognised:
    """Return how a column is written; raise if its values do not agree.

    Args:
        table: the training table.
        name: the column's.
        instead: how to read the column as text, for messages.
    """
    cells = table.column(name)
    if cells.numbers is not None:
        return _plain(cells)
    column = _Column(table, name, instead, cells.distinct)
    if all(as_label(text) in ("true", "false", "0", "1") for text in column.texts):
        return Recognised(Notation("boolean"))
    dates = [as_moment(text) is not None for text in column.texts]
    if any(dates):
        return _dates(column, dates)
    numbers = list(map(is_number, column.texts))
    return _numbers(column, numbers) if any(numbers) else _texts(column)


def settle(
    table: Table,
    found: dict[str, Recognised],
    seen: tuple[bool, bool],
    decimal: Decimal | None,
    instead: dict[str, str],
) -> None:
    """Decide, in place, what 1,200 and 1.200 mean.

    Where 1,200 may be large or small, the marks of other columns decide; if they do not, it is refused. 1.200 has a
    decimal point, as in every CSV file, unless another column has decimal commas, or nothing in a file with semicolons,
    which programs write where commas are decimal marks, shows otherwise.

    Args:
        table: the training table.
        found: how its columns are written.
        seen: what ``marks_in`` finds in all its columns.
        decimal: the decimal mark that was given.
        instead: how to read each column as text, for messages.
    """
    points, commas = seen
    for name, each in found.items():
        if each.comma is None or each.notation is None:
            continue
        large = bool(each.notation.thousands)  # 1,200; else 1.200
        unclear = points == commas if large else commas or (table.separator == ";" and not points)
        if decimal is None and unclear:
            raise _two_readings(table, each, name, instead[name])
        by_comma = decimal == "comma" or (decimal is None and large and commas)
        found[name] = Recognised(each.comma if by_comma else each.notation)


def marks_in(found: dict[str, Recognised]) -> tuple[bool, bool]:
    """Return whether some columns have decimal points beyond doubt, and whether some have decimal commas."""
    sure = [each.notation for each in found.values() if each.notation is not None and each.comma is None]
    commas = any(each.decimal == "," or each.thousands == "." for each in sure)
    return any(each.points for each in found.values()), commas


def quoted(name: str) -> str:
    """Return a column's name as the command line takes it."""
    return shlex.quote('"' + name.replace('"', '""') + '"' if set(name) & set('",') else name)


# --- one kind of column after another ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Column:
    table: Table
    name: str
    instead: str
    distinct: Distinct

    @property
    def texts(self) -> list[str]:
        return self.distinct.cells  # type: ignore[return-value]  # numbers are recognised before

    def count(self, good: Sequence[bool]) -> int:
        """Return in how many rows the texts are good."""
        return int(self.distinct.counts[np.asarray(good, np.bool_)].sum())

    def misfit(self, good: Sequence[bool], what: str) -> RangeError:
        """Return an error about the first text that does not fit, if most of the others do."""
        place = list(good).index(False)
        return RangeError(
            f"{self.table.where(int(self.distinct.rows[place]), self.name)}: {brief(self.texts[place])} is not {what},"
            f" and {self.count(good)} other values of the column are. Fix it, or {self.instead}."
        )


def _plain(cells: Cells) -> Recognised:
    """Return numbers with a decimal point, or without any mark."""
    assert cells.numbers is not None
    known = known_numbers(cells.numbers)
    fractions = known != np.floor(known)
    if cells.texts is None:
        return Recognised(Notation(), points=bool(fractions.any()))
    row = cells.unheld()
    if row is not None:
        many = f"{brief(cells[row])} has more digits than a number here; subtract a constant"
        return Recognised(None, row=row, unknown=many)
    texts = cells.texts[~cells.missing] if cells.missing.any() else cells.texts
    # pandas is slow where columns are many
    padded = not fractions.all() and bool(texts[~fractions].str.fullmatch(_PADDED).any())
    notation = Notation(padded=padded)
    first = next((row for row, cell in enumerate(cells[:_FEW]) if "." in str(cell)), None)
    if first is None:
        points = cells.texts.str.contains(".", regex=False, na=False).to_numpy(bool)
        first = int(points.argmax()) if points.any() else None
    if first is None or not all(fits(text, ",", ".") for text in texts):  # ends with the first that does not
        return Recognised(notation, points=first is not None)
    return Recognised(notation, Notation(decimal=",", thousands="."), first)


def _dates(column: _Column, dates: list[bool]) -> Recognised:
    if not all(dates):
        raise column.misfit(dates, f"a date such as {Notation('date').example}")
    zones = [moment.tzinfo is not None for moment in map(as_moment, column.texts) if moment is not None]
    if any(zones) and not all(zones):
        raise column.misfit(zones, "a date with a time zone")
    return Recognised(Notation("date", zoned=all(zones)))


def _numbers(column: _Column, numbers: list[bool]) -> Recognised:
    if not all(numbers):
        raise column.misfit(numbers, "a number")
    units, digits = zip(*((split(text) or ("", "")) for text in column.texts), strict=True)
    unit = max(dict.fromkeys(units), key=lambda unit: column.count([each == unit for each in units]))
    if len(set(units)) > 1:
        raise column.misfit([each == unit for each in units], f"in {unit}" if unit else "a number without a unit")
    return _marked(column, unit, digits)


def _marked(column: _Column, unit: str, digits: Sequence[str]) -> Recognised:
    """Return the marks of numbers that have one unit, or none."""
    possible = [Notation("number", *marks, unit) for marks in MARKS if all(fits(each, *marks) for each in digits)]
    if not possible:
        best = max(MARKS, key=lambda marks: column.count([fits(each, *marks) for each in digits]))
        like = Notation("number", *best, unit).example
        raise column.misfit([fits(each, *best) for each in digits], f"a number such as {like}")
    point, comma = (next((each for each in possible if each.decimal == mark), possible[0]) for mark in ".,")
    apart = [k for k, text in enumerate(column.texts) if point.value(text) != comma.value(text)]
    if apart:
        return Recognised(point, comma, int(column.distinct.rows[apart[0]]))
    return Recognised(point, points=point.decimal == "." and (bool(point.thousands) or "." in "".join(digits)))


def _texts(column: _Column) -> Recognised:
    """Return text, or numbers with one unit."""
    parts = [part for part in map(measured, column.texts) if part is not None]
    units, digits = {unit for unit, _ in parts}, [each for _, each in parts]
    several = len(parts) == len(column.texts) and len(set(digits)) > 2
    if several and len(units) == 1 and not units <= _POWERS:
        return _marked(column, units.pop(), digits)
    written = all(any(map(str.isdigit, text)) and not any(map(str.isalpha, text)) for text in column.texts)
    if written or (several and units <= _POWERS):
        what = f"{brief(column.texts[0])} is a number or a date in an unknown form; write it like 1234.5 or 2024-01-31"
        return Recognised(None, row=int(column.distinct.rows[0]), unknown=what)
    return Recognised(None)


def _two_readings(table: Table, found: Recognised, name: str, instead: str) -> RangeError:
    cell = table.columns[name][found.row]
    point, comma = (f"{each.value(cell):g}" for each in (found.notation, found.comma) if each is not None)
    return RangeError(
        f"{table.where(found.row, name)}: {brief(cell)} may mean {point} or {comma}, and so may the whole column. Say"
        f" which: --decimal point for {point}, --decimal comma for {comma} (in Python decimal='point' or"
        f" decimal='comma'); or {instead}."
    )
