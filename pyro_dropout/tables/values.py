"""Cells from values of Python, NumPy and pandas, equal to those of a CSV file of the same table."""

import datetime
import math
from collections.abc import Iterable, Mapping
from decimal import Decimal

import numpy as np

from pyro_dropout.mathematics.errors import RangeError
from pyro_dropout.tables.cells import Cell, cell_of
from pyro_dropout.tables.table import Table


def cell_from(value: object) -> Cell:
    """Return a value as a cell; raise ``TypeError`` for types that cannot be read.

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
        return _moment(value)
    if isinstance(value, datetime.date):
        return datetime.datetime(value.year, value.month, value.day)
    raise TypeError(type(value).__name__)


def _moment(value: datetime.datetime) -> datetime.datetime:
    if getattr(value, "nanosecond", 0):  # pandas has them, a cell has not
        raise RangeError(f"the date {value} is finer than a microsecond; round it.")
    zone = None if value.tzinfo is None else datetime.UTC
    value = value if zone is None else value.astimezone(zone)
    parts = value.year, value.month, value.day, value.hour, value.minute, value.second, value.microsecond
    return datetime.datetime(*parts, tzinfo=zone)


def table_from(
    file: str, columns: Mapping[str, Iterable[object]], rows: list[int], notes: tuple[str, ...] = ()
) -> Table:
    """Return a table of named values; columns with a value of a type that cannot be read are named in ``unread``."""
    cells: dict[str, list[Cell]] = {}
    unread: dict[str, str] = {}
    for name, values in columns.items():
        try:
            cells[name] = [_placed(file, name, row, each) for row, each in zip(rows, values, strict=True)]
        except TypeError as cause:
            unread[name] = str(cause)
    return Table(file, cells, rows, unread, notes)


def _placed(file: str, column: str, row: int, value: object) -> Cell:
    try:
        return cell_from(value)
    except RangeError as cause:
        raise RangeError(f"{file}, row {row}, column {column!r}: {cause}") from None
