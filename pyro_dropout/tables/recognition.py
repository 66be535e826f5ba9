"""Recognise from a whole column how its values are written; stop where two readings are possible."""

import contextlib
import itertools
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pyro_dropout.mathematics.errors import RangeError
from pyro_dropout.tables.cells import Cell, as_label, as_moment, as_number, brief
from pyro_dropout.tables.notation import MARKS, Decimal, Notation, fits, is_number, measured, split
from pyro_dropout.tables.table import Table
from pyro_dropout.tables.whole_column import Cells, Floats

_FORTRAN = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[dD][-+]?[0-9]{1,3}")  # 1.5D+03 is 1500
_POWERS = frozenset({"k", "K", "m", "M", "B", "b", "bn", "G", "T", "Mio", "Mrd"})
_FEW = 100  # cells that are looked at before all of them
_PADDED = re.compile(r"[-+]?0[0-9]+")


class UnrecognisedError(RangeError):
    """All values of a column look like numbers or dates, in a form that is not recognised. Stays within ``tables``."""


class TwoReadingsError(RangeError):
    """A column may be read with a decimal point or with a decimal comma. Stays within ``tables``."""


@contextlib.contextmanager
def as_range_errors() -> Iterator[None]:
    """Raise errors about columns that cannot be read as the ``RangeError`` that users know."""
    try:
        yield
    except (UnrecognisedError, TwoReadingsError) as cause:
        raise RangeError(str(cause)) from None


@dataclass(frozen=True)
class Recognised:
    """What a column holds.

    Attributes:
        notation: of its numbers, dates or booleans; None for text.
        thousands: the row of a value such as 1.200, if all points of the column may separate thousands.
        points: whether points are the decimal marks of the column beyond doubt.
    """

    notation: Notation | None
    thousands: int | None = None
    points: bool = False


def recognise(table: Table, name: str, decimal: Decimal | None, instead: str) -> Recognised:
    """Return how a column is written; raise if its values do not agree, or may be read in two ways.

    Args:
        table: the training table.
        name: the column's.
        decimal: the decimal mark of columns that may be read in two ways.
        instead: how to read the column as text, for messages.
    """
    cells = table.column(name)
    if cells.numbers is not None:
        return _plain_cells(cells, cells.numbers)
    distinct = cells.distinct
    column = _Column(table, name, instead, distinct.rows.tolist(), distinct.cells, distinct.counts.tolist())
    if all(as_number(cell) is not None for cell in column.cells):
        return _plain(column, "", [cell if isinstance(cell, str) else "" for cell in column.cells])
    if all(as_label(cell) in ("true", "false", "0", "1") for cell in column.cells):
        return Recognised(Notation("boolean"))
    dates = [as_moment(cell) is not None for cell in column.cells]
    if any(dates):
        return _dates(column, dates)
    numbers = [is_number(cell) if isinstance(cell, str) else not isinstance(cell, bool) for cell in column.cells]
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
    rows: list[int]
    cells: Sequence[Cell]
    counts: list[int]

    def count(self, good: Sequence[bool]) -> int:
        """Return in how many rows the cells are good."""
        return sum(itertools.compress(self.counts, good))

    def misfit(self, good: Sequence[bool], what: str) -> RangeError:
        """Return an error about the first cell that does not fit, if most of the others do."""
        place = next(k for k, fine in enumerate(good) if not fine)
        return RangeError(
            f"{self.table.where(self.rows[place], self.name)}: {brief(self.cells[place])} is not {what}, and"
            f" {self.count(good)} other values of the column are. Fix it, or {self.instead}."
        )


def _dates(column: _Column, dates: list[bool]) -> Recognised:
    if not all(dates):
        raise column.misfit(dates, f"a date such as {Notation('date').example}")
    zones = [moment.tzinfo is not None for moment in map(as_moment, column.cells) if moment is not None]
    if any(zones) and not all(zones):
        raise column.misfit(zones, "a date with a time zone")
    return Recognised(Notation("date", zoned=all(zones)))


def _numbers(column: _Column, numbers: list[bool], decimal: Decimal | None) -> Recognised:
    if not all(numbers):
        raise column.misfit(numbers, "a number")
    parts = [split(cell) or ("", "") if isinstance(cell, str) else ("", "0") for cell in column.cells]
    units, digits = [unit for unit, _ in parts], [each for _, each in parts]
    weights: Counter[str] = Counter()
    for each, count in zip(units, column.counts, strict=True):
        weights[each] += count
    ((unit, _),) = weights.most_common(1)
    if len(weights) > 1:
        raise column.misfit([each == unit for each in units], f"in {unit}" if unit else "a number without a unit")
    return _marked(column, unit, digits, decimal)


def _marked(column: _Column, unit: str, digits: list[str], decimal: Decimal | None) -> Recognised:
    """Return the marks of numbers that have one unit, or none."""
    possible = [Notation("number", *marks, unit) for marks in MARKS if all(fits(each, *marks) for each in digits)]
    if not possible:
        best = max(MARKS, key=lambda marks: column.count([fits(each, *marks) for each in digits]))
        like = Notation("number", *best, unit).example
        raise column.misfit([fits(each, *best) for each in digits], f"a number such as {like}")
    if possible[0].decimal + possible[0].thousands == ".":
        return _plain(column, unit, digits)
    point, comma = (next((each for each in possible if each.decimal == mark), possible[0]) for mark in ".,")
    differing = [
        row for row, cell in zip(column.rows, column.cells, strict=True) if point.value(cell) != comma.value(cell)
    ]
    if differing and decimal is None:
        raise _two_readings(column.table, differing[0], column.name, (point, comma), column.instead)
    notation = comma if decimal == "comma" else point
    return Recognised(notation, points=notation.decimal == "." and bool(notation.thousands))


def _plain_cells(cells: Cells, numbers: Floats) -> Recognised:
    """Return the same as ``_plain`` for a column of plain numbers without a unit."""
    known, texts = numbers[~cells.missing], cells.texts
    notation = Notation(binary=bool(((known == 0) | (known == 1)).all()))
    if texts is None:
        return Recognised(notation)
    whole = texts[numbers == np.floor(numbers)]
    padded = whole[whole.str.startswith(("0", "-0", "+0"))].str.fullmatch(_PADDED.pattern)
    notation = replace(notation, padded=bool(padded.any()))
    if not all(cell is None or fits(str(cell), ",", ".") for cell in cells[:_FEW]) and len(whole) < len(known):
        return Recognised(notation, points=True)
    points = texts.str.contains(".", regex=False).to_numpy(bool, na_value=False)
    if not points.any():
        return Recognised(notation)
    pointed = all(cell is None or fits(str(cell), ",", ".") for cell in cells)  # ends with the first that does not
    return Recognised(notation, int(points.argmax()) if pointed else None, not pointed)


def _plain(column: _Column, unit: str, digits: list[str]) -> Recognised:
    notation = Notation(unit=unit)
    binary = not unit and all(notation.value(cell) in (0, 1) for cell in column.cells)
    notation = replace(notation, binary=binary, padded=any(map(_PADDED.fullmatch, digits)))
    marked = next((row for row, each in zip(column.rows, digits, strict=True) if "." in each), None)
    pointed = all(fits(each, ",", ".") for each in digits)
    return Recognised(notation, marked if pointed else None, marked is not None and not pointed)


def _texts(column: _Column, decimal: Decimal | None) -> Recognised:
    """Return text, or numbers with one unit; raise if all texts look like numbers or dates in another form."""
    texts = [str(cell) for cell in column.cells]
    parts = [part for part in map(measured, texts) if part is not None]
    units, digits = {unit for unit, _ in parts}, [each for _, each in parts]
    several = len(parts) == len(texts) and len(set(digits)) > 2
    if several and len(units) == 1 and not units <= _POWERS:
        return _marked(column, units.pop(), digits, decimal)
    powers = (several and units <= _POWERS) or all(map(_FORTRAN.fullmatch, texts))
    if powers or all(any(map(str.isdigit, text)) and not any(map(str.isalpha, text)) for text in texts):
        raise UnrecognisedError(
            f"{column.table.where(column.rows[0], column.name)}: {brief(texts[0])} looks like a number or a date, in a"
            f" form that is not recognised. Write it like 1234.5 or 2024-01-31, or {column.instead}."
        )
    return Recognised(None)


def _two_readings(table: Table, row: int, name: str, readings: tuple[Notation, ...], instead: str) -> TwoReadingsError:
    cell = table.columns[name][row]
    point, comma = (f"{each.value(cell):g}" for each in readings)
    return TwoReadingsError(
        f"{table.where(row, name)}: {brief(cell)} may mean {point} or {comma}, and so may the whole column. Say which:"
        f' --decimal point for {point}, --decimal comma for {comma} (in Python decimal="comma"); or {instead}.'
    )
