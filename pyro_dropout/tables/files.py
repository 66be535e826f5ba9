"""Read CSV, Parquet and Excel files as tables; errors name the file, row and column."""

import importlib
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas

from pyro_dropout.errors import PyroDropoutError, ShapeError
from pyro_dropout.tables.csv_file import names_of, read_csv
from pyro_dropout.tables.table import Table, from_arrow, table_of
from pyro_dropout.training.checkpoints.safe_files import check_regular


def read_file(path: str | Path, *, encoding: str | None = None, separator: str | None = None) -> Table:
    """Return the table in a CSV file with a header, in a Parquet file, or in the first sheet of an Excel file.

    Args:
        path: the file.
        encoding: of a CSV file; by default UTF-8, or UTF-16 or UTF-32 if the file begins with their mark.
        separator: of a CSV file, "comma", "semicolon", "tab" or "pipe"; by default the one that splits the header.
    """
    path = Path(path)
    check_regular(path, "give a CSV, Parquet or Excel file.")
    with path.open("rb") as file:
        begins = file.read(4)
    ending = path.suffix.lower()
    if not begins:
        raise ShapeError(f"{path.name} is empty; a header and rows are needed.")
    if ending in (".xls", ".ods", ".json", ".jsonl", ".ndjson"):
        raise PyroDropoutError(
            f"{path.name} is in a format that is not read; save it as CSV, Parquet or .xlsx, or give what pandas reads"
            " from it to fit_table."
        )
    try:
        if begins == b"PAR1" or ending in (".parquet", ".pq"):
            return _read_parquet(path)
        if begins == b"PK\x03\x04" or ending in (".xlsx", ".xlsm"):
            return _read_excel(path)
    except ImportError as absent:
        extra = "excel" if absent.name == "openpyxl" else "parquet"
        raise PyroDropoutError(f'{path.name}: {absent}; pip install "pyro-dropout[{extra}]".') from None
    table = read_csv(path, encoding, separator)
    if not len(table):
        raise ShapeError(f"{path.name} has a header and no rows.")
    return table


def _read_parquet(path: Path) -> Table:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as file:  # not as a data set, which would also read columns from the path
            frame = from_arrow(file.read())
    except (pyarrow.ArrowException, OSError) as cause:
        raise PyroDropoutError(f"{path.name} is not a valid Parquet file: {str(cause).splitlines()[0]}") from None
    return table_of(frame, path.name, np.arange(1, len(frame) + 1))


def _read_excel(path: Path) -> Table:
    """Return the first sheet, as pandas reads it; its first row that is not empty is the header."""
    importlib.import_module("openpyxl")  # pandas reads Excel with it, and does not say which package is absent

    try:
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # about styles
            how: dict[str, Any] = {"header": None, "dtype": object, "keep_default_na": False, "na_values": [""]}
            sheet = pandas.read_excel(path, engine="openpyxl", **how)
    except MemoryError:
        raise
    except Exception as cause:  # of zipfile, zlib, the parser of XML, and openpyxl
        raise PyroDropoutError(f"{path.name} is not a valid Excel file (.xlsx): {cause}.") from None
    sheet = sheet.dropna(how="all").dropna(axis=1, how="all")
    if not len(sheet):
        raise ShapeError(f"{path.name} is empty; a header and rows are needed.")
    names, notes = names_of(path, ["" if pandas.isna(name) else str(name) for name in sheet.iloc[0]], ",")
    cells = sheet.iloc[1:].infer_objects().set_axis(names, axis=1)  # dates without times stay so
    return table_of(cells, path.name, cells.index + 1, notes)
