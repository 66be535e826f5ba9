"""Recognise from a whole column how its values are written; stop where two readings are possible."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas

from pyro_dropout.mathematics.errors import RangeError
from pyro_dropout.tables.cell_columns import Cells, Distinct
from pyro_dropout.tables.cells import as_label, as_moment, as_number, brief
from pyro_dropout.tables.notation import MARKS, Decimal, Notation, fits, is_number, measured, split
from pyro_dropout.tables.precision import known_numbers
from pyro_dropout.tables.table import Table

_FORTRAN = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[dD][-+]?[0-9]{1,3}")  # 1.5D+03 is 1500
_POWERS = frozenset({"k", "K", "m", "M", "B", "b", "bn", "G", "T", "Mio", "Mrd"})
_FEW = 20  # cells that are looked at before all of them
_PADDED = "[-+]?0[0-9]+"


@dataclass(frozen=True)
class Recognised:
    """What a column holds.

    Attributes:
        notation: of its numbers, dates or booleans; None for text.
        thousands: the row of a value such as 1.200, if all points of the column may separate thousands.
        points: whether points are the decimal marks of the column beyond doubt.
        doubt: what to say if the column may be read with a decimal point or with a decimal comma.
        unknown: what to say if all its values look like numbers or dates, in a form that is not recognised.
    """

    notation: Notation | None
    thousands: int | None = None
    points: bool = False
    doubt: RangeError | None = None
    unknown: RangeError | None = None


def recognise(table: Table, name: str, decimal: Decimal | None, instead: str) -> Recognised:
    """Return how a column is written; raise if its values do not agree.

    Args:
        table: the training table.
        name: the column's.
        decimal: the decimal mark of columns that may be read in two ways.
        instead: how to read the column as text, for messages.
    """
    cells = table.column(name)
    if cells.numbers is not None:
        known = cells.numbers[~cells.missing]
        binary = bool(((known == 0) | (known == 1)).all())
        return Recognised(Notation(binary=binary)) if cells.texts is None else _plain(cells, binary=binary)
    column = _Column(table, name, instead, cells.distinct)
    if all(as_number(text) is not None for text in column.texts):  # some of them are beyond 2^53
        return _plain(cells)
    if all(as_label(text) in ("true", "false", "0", "1") for text in column.texts):
        return Recognised(Notation("boolean"))
    dates = [as_moment(text) is not None for text in column.texts]
    if any(dates):
        return _dates(column, dates)
    numbers = list(map(is_number, column.texts))
    if any(numbers):
        return _numbers(column, numbers, decimal)
    return _texts(column, decimal)


def settle(table: Table, found: dict[str, Recognised], decimal: Decimal | None, instead: dict[str, str]) -> None:
    """Decide, in place, what 1.200 means in columns where a point may separate thousands.

    It is a decimal point, as in every CSV file, unless another column has decimal commas, or nothing in a file with
    semicolons, which programs write where commas are decimal marks, shows otherwise.
    """
    points, commas = marks_in(found)
    for name, each in found.items():
        if each.thousands is None or each.notation is None or decimal == "point":
            continue
        if decimal == "comma":
            found[name] = Recognised(replace(each.notation, decimal=",", thousands="."))
        elif commas or (table.separator == ";" and not points):
            comma = replace(each.notation, decimal=",", thousands=".")
            raise _two_readings(table, each.thousands, name, (each.notation, comma), instead[name])


def marks_in(found: dict[str, Recognised]) -> tuple[bool, bool]:
    """Return whether some columns have decimal points beyond doubt, and whether some have decimal commas."""
    written = [each.notation for each in found.values() if each.notation is not None]
    commas = any(each.decimal == "," or each.thousands == "." for each in written)
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


def _dates(column: _Column, dates: list[bool]) -> Recognised:
    if not all(dates):
        raise column.misfit(dates, f"a date such as {Notation('date').example}")
    zones = [moment.tzinfo is not None for moment in map(as_moment, column.texts) if moment is not None]
    if any(zones) and not all(zones):
        raise column.misfit(zones, "a date with a time zone")
    return Recognised(Notation("date", zoned=all(zones)))


def _numbers(column: _Column, numbers: list[bool], decimal: Decimal | None) -> Recognised:
    if not all(numbers):
        raise column.misfit(numbers, "a number")
    units, digits = zip(*((split(text) or ("", "")) for text in column.texts), strict=True)
    unit = max(dict.fromkeys(units), key=lambda unit: column.count([each == unit for each in units]))
    if len(set(units)) > 1:
        raise column.misfit([each == unit for each in units], f"in {unit}" if unit else "a number without a unit")
    return _marked(column, unit, digits, decimal)


def _marked(column: _Column, unit: str, digits: Sequence[str], decimal: Decimal | None) -> Recognised:
    """Return the marks of numbers that have one unit, or none."""
    possible = [Notation("number", *marks, unit) for marks in MARKS if all(fits(each, *marks) for each in digits)]
    if not possible:
        best = max(MARKS, key=lambda marks: column.count([fits(each, *marks) for each in digits]))
        like = Notation("number", *best, unit).example
        raise column.misfit([fits(each, *best) for each in digits], f"a number such as {like}")
    rows = column.distinct.rows
    if possible[0].decimal + possible[0].thousands == ".":
        found = _plain(Cells(pandas.Series(digits, dtype="str")), unit)
        return found if found.thousands is None else replace(found, thousands=int(rows[found.thousands]))
    point, comma = (next((each for each in possible if each.decimal == mark), possible[0]) for mark in ".,")
    apart = [row for row, text in zip(rows, column.texts, strict=True) if point.value(text) != comma.value(text)]
    if apart and decimal is None:
        doubt = _two_readings(column.table, int(apart[0]), column.name, (point, comma), column.instead)
        return Recognised(None, doubt=doubt)
    notation = comma if decimal == "comma" else point
    return Recognised(notation, points=notation.decimal == "." and bool(notation.thousands))


def _plain(cells: Cells, unit: str = "", binary: bool = False) -> Recognised:
    """Return numbers with a decimal point, or without any mark."""
    texts = cells.texts[~cells.missing] if cells.missing.any() else cells.texts
    whole = np.ones(len(texts), np.bool_)
    if cells.numbers is not None:
        numbers = known_numbers(cells.numbers)
        whole = numbers == np.floor(numbers)
    padded = whole.any() and texts[whole].str.fullmatch(_PADDED).any()  # pandas is slow where columns are many
    notation = Notation(unit=unit, binary=binary, padded=bool(padded))
    first = next((row for row, cell in enumerate(cells[:_FEW]) if "." in str(cell)), None)
    if first is None:
        points = cells.texts.str.contains(".", regex=False, na=False).to_numpy(bool)
        first = int(points.argmax()) if points.any() else None
    pointed = first is not None and all(fits(text, ",", ".") for text in texts)  # ends with the first that does not
    return Recognised(notation, first if pointed else None, first is not None and not pointed)


def _texts(column: _Column, decimal: Decimal | None) -> Recognised:
    """Return text, or numbers with one unit."""
    parts = [part for part in map(measured, column.texts) if part is not None]
    units, digits = {unit for unit, _ in parts}, [each for _, each in parts]
    several = len(parts) == len(column.texts) and len(set(digits)) > 2
    if several and len(units) == 1 and not units <= _POWERS:
        return _marked(column, units.pop(), digits, decimal)
    powers = (several and units <= _POWERS) or all(map(_FORTRAN.fullmatch, column.texts))
    if powers or all(any(map(str.isdigit, text)) and not any(map(str.isalpha, text)) for text in column.texts):
        where = column.table.where(int(column.distinct.rows[0]), column.name)
        unknown = RangeError(
            f"{where}: {brief(column.texts[0])} looks like a number or a date, in a form that is not recognised."
            f" Write it like 1234.5 or 2024-01-31, or {column.instead}."
        )
        return Recognised(None, unknown=unknown)
    return Recognised(None)


def _two_readings(table: Table, row: int, name: str, readings: tuple[Notation, ...], instead: str) -> RangeError:
    cell = table.columns[name][row]
    point, comma = (f"{each.value(cell):g}" for each in readings)
    return RangeError(
        f"{table.where(row, name)}: {brief(cell)} may mean {point} or {comma}, and so may the whole column. Say which:"
        f' --decimal point for {point}, --decimal comma for {comma} (in Python decimal="comma"); or {instead}.'
    )
