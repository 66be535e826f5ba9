"""A data frame as a table, with the cells that its CSV file would have."""

import datetime
import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
import pandas

from pyro_dropout.mathematics.errors import PyroDropoutError, RangeError, ShapeError
from pyro_dropout.tables.cell_columns import Cells
from pyro_dropout.tables.cells import EXACT
from pyro_dropout.tables.table import Table, named

_FIRST, _LAST = np.datetime64("0001-01-01", "us"), np.datetime64("9999-12-31T23:59:59.999999", "us")
_WHOLE = {kind.lower(): pandas.array([], kind).dtype for n in (8, 16, 32, 64) for kind in (f"Int{n}", f"UInt{n}")}


@runtime_checkable
class Frame(Protocol):
    """What is needed of a data frame, of pandas, polars or another library."""

    @property
    def columns(self) -> Any:
        """The names of the columns."""

    def __getitem__(self, name: Any) -> Any: ...

    def __len__(self) -> int: ...


def table_of(frame: Frame, name: str = "the table") -> Table:
    """Return a data frame of pandas or polars as a table, with the cells that its CSV file would have.

    Texts, numbers, truth values, dates and categories are read, and None, NaN, NaT and NA are missing. The index is
    ignored. Rows are counted from 0.

    Args:
        frame: the data frame.
        name: of the table, for messages.

    Example:
        >>> import pandas
        >>> table_of(pandas.DataFrame({"age": [12, None], "kind": ["oak", "NA"]})).columns
        {'age': [12.0, None], 'kind': ['oak', None]}
    """
    given = list(getattr(frame, "columns", ()))
    if not given or not hasattr(frame, "__getitem__"):
        raise PyroDropoutError(f"a data frame with named columns is needed; got {type(frame).__name__}.")
    names = named(name, given, strict=False)
    if not len(frame):
        raise ShapeError(f"{name} has no rows.")
    columns = {each: frame[key] for each, key in zip(names, given, strict=True)}
    return table_from(name, columns, list(range(len(frame))))


def table_from(file: str, columns: Mapping[str, Any], rows: list[int], notes: tuple[str, ...] = ()) -> Table:
    """Return a table of named values; columns with a value of a type that cannot be read are named in ``unread``."""
    cells: dict[str, Cells] = {}
    unread: dict[str, str] = {}
    for name, values in columns.items():
        try:
            cells[name] = column_of(values, functools.partial(Table(file, {}, rows).where, column=name))
        except TypeError as cause:
            unread[name] = str(cause)
    return Table(file, cells, rows, unread, notes)


def from_arrow(found: Any) -> Any:
    """Return a table or an array of Arrow in types of pandas; whole numbers with gaps stay whole."""
    return found.to_pandas(types_mapper=lambda kind: _WHOLE.get(str(kind)))


def column_of(series: Any, where: Callable[[int], str]) -> Cells:
    """Return a column of a data frame as cells; raise ``TypeError`` with the name of a type that is not read.

    Args:
        series: of pandas, or of a library with ``to_list`` and ``to_numpy``.
        where: the place of a row, for messages.
    """
    if not isinstance(series, pandas.Series):
        short = str(getattr(series, "dtype", "")).lower() in ("float16", "float32")
        return Cells.of(
            series.to_numpy() if short else series.to_list() if hasattr(series, "to_list") else series, where
        )
    series = series.reset_index(drop=True)
    if isinstance(series.dtype, pandas.ArrowDtype):
        series = from_arrow(series.array.__arrow_array__())
    if isinstance(series.dtype, pandas.CategoricalDtype):
        kind = series.cat.categories.dtype
        series = series.astype(object if series.hasnans and not isinstance(kind, pandas.StringDtype) else kind)
    is_a, kind = pandas.api.types, series.dtype
    if isinstance(kind, pandas.StringDtype):
        return Cells.of_texts(series)
    if is_a.is_datetime64_any_dtype(kind):
        return _moments(series, where)
    if is_a.is_float_dtype(kind):
        values = series.to_numpy(getattr(kind, "numpy_dtype", kind), na_value=np.nan)
        if values.dtype != np.float64:
            values = values.astype(str).astype(np.float64)  # the 0.1 that was written, not that of float32
        series = pandas.Series(values)
    elif is_a.is_integer_dtype(kind):
        values = series.to_numpy(float, na_value=np.nan)
    else:
        return Cells.of(series.tolist(), where)
    return Cells.of(series) if bool((np.abs(values) >= EXACT).any()) else Cells(pandas.Series(values))


def _moments(series: Any, where: Callable[[int], str]) -> Cells:
    zoned = series.dt.tz is not None
    values = (series.dt.tz_convert("UTC").dt.tz_localize(None) if zoned else series).to_numpy()
    coarse = values.astype("M8[us]")
    if values.dtype == "M8[ns]":
        odd = coarse != values
    else:  # of which years are compared before they are converted, which may overflow
        odd = (values < _FIRST.astype(values.dtype)) | (values > _LAST.astype(values.dtype))
    odd &= ~np.isnat(values)
    if odd.any():
        raise RangeError(
            f"{where(int(odd.argmax()))}: the date is finer than a microsecond, or not in the years 1 to 9999. Round or"
            " remove it."
        )
    return Cells.of(each and each.replace(tzinfo=datetime.UTC if zoned else None) for each in coarse.tolist())
