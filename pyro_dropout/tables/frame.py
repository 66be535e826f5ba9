"""A data frame as a table."""

from typing import Any, Protocol, runtime_checkable

import numpy as np

from pyro_dropout.mathematics.errors import PyroDropoutError, ShapeError
from pyro_dropout.tables.csv_file import check_names, named
from pyro_dropout.tables.table import Table
from pyro_dropout.tables.values import table_from

_SHORT = {"float16": np.float16, "float32": np.float32}


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
    names = named([str(each).strip() for each in given])
    check_names(name, names)
    if not len(frame):
        raise ShapeError(f"{name} has no rows.")
    columns = {each: _values(frame[key]) for each, key in zip(names, given, strict=True)}
    return table_from(name, columns, list(range(len(frame))))


def _values(column: Any) -> list[object]:
    """Return the values of a column; short floats stay short, so that they can be written with few digits."""
    short = _SHORT.get(str(getattr(column, "dtype", "")).lower())
    values: list[object] = column.to_list() if hasattr(column, "to_list") else list(column)
    return values if short is None else [short(each) if isinstance(each, float) else each for each in values]
