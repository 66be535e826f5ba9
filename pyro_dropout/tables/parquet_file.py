"""Read Parquet files, so that each column has the values that a CSV file of the same table would have."""

import datetime
import importlib
import math
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from pyro_dropout.mathematics.errors import PyroDropoutError, RangeError
from pyro_dropout.tables.cells import Cell, cell_of
from pyro_dropout.tables.csv_file import check_names
from pyro_dropout.tables.table import Table

_EPOCH = datetime.datetime(1970, 1, 1)
_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}


def read_parquet(path: Path, size: int | None) -> Iterator[Table]:
    """Yield tables of ``size`` rows; None for all rows at once."""
    try:
        pyarrow = importlib.import_module("pyarrow")
        parquet = importlib.import_module("pyarrow.parquet")
    except ModuleNotFoundError:
        raise PyroDropoutError(
            f"{path.name}: reading Parquet needs the package pyarrow; pip install pyarrow."
        ) from None
    done = 0
    try:
        with parquet.ParquetFile(path) as file:  # not as a data set, which would also read columns from the path
            names = [str(name).strip() for name in file.schema_arrow.names]
            check_names(path.name, names)
            kinds = dict(zip(names, map(_kind(pyarrow.types), file.schema_arrow.types), strict=True))
            reading = {name: _reading(pyarrow.types, kind) for name, kind in kinds.items()}
            unread = {name: str(kind) for name, kind in kinds.items() if reading[name] is None}
            for found in [file.read()] if size is None else file.iter_batches(batch_size=size):
                rows = list(range(done + 1, done + found.num_rows + 1))
                columns: dict[str, list[Cell]] = {}
                for k, (name, read) in enumerate(reading.items()):
                    if read is not None:
                        columns[name] = _cells(path, name, rows, _plain(pyarrow, kinds[name], found.column(k)), read)
                yield Table(path.name, columns, rows, unread)
                done += found.num_rows
    except (pyarrow.ArrowException, OSError) as cause:
        raise PyroDropoutError(f"{path.name} is not a valid Parquet file: {str(cause).splitlines()[0]}") from None


def _kind(is_a: ModuleType) -> Callable[[Any], Any]:
    return lambda kind: kind.value_type if is_a.is_dictionary(kind) else kind


def _plain(pyarrow: ModuleType, kind: Any, column: Any) -> list[Any]:
    """Return the values of a column, moments as whole numbers of their unit: Python's have no nanoseconds."""
    if pyarrow.types.is_timestamp(kind):
        column = column.cast(kind).cast(pyarrow.int64())
    values: list[Any] = column.to_pylist()
    return values


def _cells(path: Path, name: str, rows: list[int], values: list[Any], read: Callable[[Any], Cell]) -> list[Cell]:
    cells: list[Cell] = []
    for row, value in zip(rows, values, strict=True):
        try:
            cells.append(None if value is None else read(value))
        except (OverflowError, ArithmeticError):
            raise RangeError(
                f"{path.name}, row {row}, column {name!r}: the date is finer than a microsecond, or not in the years 1"
                " to 9999. Round or remove it."
            ) from None
    return cells


def _reading(is_a: ModuleType, kind: Any) -> Callable[[Any], Cell] | None:
    """Return a function from values of a column of this type to cells; None for types that cannot be read."""
    if is_a.is_boolean(kind):
        return bool
    if is_a.is_integer(kind):
        return int
    if is_a.is_floating(kind):
        if is_a.is_float64(kind):
            return lambda value: None if math.isnan(value) else float(value)
        short = np.float16 if is_a.is_float16(kind) else np.float32
        return lambda value: _short_float(short(value))
    if is_a.is_decimal(kind):
        return _decimal
    if is_a.is_string(kind) or is_a.is_large_string(kind):
        return cell_of
    if is_a.is_date(kind):
        return _day
    if is_a.is_timestamp(kind):
        zone = None if kind.tz is None else datetime.UTC
        return lambda value: _moment(value, _PER_SECOND[kind.unit], zone)
    return (lambda value: None) if is_a.is_null(kind) else None


def _short_float(value: np.floating[Any]) -> Cell:
    # The shortest decimal number that rounds to it: the 0.1 of a CSV file, not the 0.10000000149 of float32.
    return None if math.isnan(value) else float(str(value))


def _decimal(value: Decimal) -> Cell:
    return None if value.is_nan() else format(value, "f")


def _day(value: datetime.date) -> Cell:
    return datetime.datetime(value.year, value.month, value.day)


def _moment(value: int, per_second: int, zone: datetime.tzinfo | None) -> Cell:
    microseconds, finer = divmod(value * 10**6, per_second)
    if finer:
        raise ArithmeticError
    return (_EPOCH + datetime.timedelta(microseconds=microseconds)).replace(tzinfo=zone)
