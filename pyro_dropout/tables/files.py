"""Read CSV, Parquet, Excel and JSON files, and standard input, into columns with the cells of a CSV file.

Nothing is guessed here. Errors name the file, the row (the line of a CSV file, header included) and the column.
"""

import atexit
import importlib
import json
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas

from pyro_dropout.errors import PyroDropoutError, ShapeError
from pyro_dropout.tables.csv_file import read_csv
from pyro_dropout.tables.table import Table, from_arrow, named
from pyro_dropout.training.checkpoints.regular_file import check_regular

_KINDS = {".parquet": "parquet", ".pq": "parquet", ".xlsx": "excel", ".xlsm": "excel", ".json": "json"}
_KINDS |= {".jsonl": "lines", ".ndjson": "lines"}
_MARKS = {b"PAR1": "parquet", b"PK\x03\x04": "excel"}  # how files begin, whatever their names
_LOOK = 2**20  # bytes
_FORMS = "a list of records, [{...}, {...}], or an object of columns, {...: [...]}"


def read_file(path: str | Path, *, encoding: str | None = None, separator: str | None = None) -> Table:
    r"""Return the table in a CSV file with a header, or in a Parquet, Excel or JSON file.

    JSON files hold a list of records or an object of columns; those that end in .jsonl, one record a line. The path "-"
    is standard input, in any of these formats.

    Missing values are an empty cell, NA, N/A, n.a., #N/A, NaN, <NA>, null, None and ?, in upper or lower case. Lines of
    a CSV file that begin with # are comments if they stand before the header; after it, they are rows.

    Args:
        path: the file.
        encoding: of a CSV file; by default UTF-8, or UTF-16 or UTF-32 if the file begins with their mark.
        separator: of a CSV file, "comma", "semicolon", "tab" or "pipe"; by default the one that splits the header.

    Example:
        >>> import pathlib, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "trees.csv")
        ...     _ = path.write_text("# by hand\nage;kind\n12;#1 oak\n?;elm\n")
        ...     table = read_file(path)
        >>> table.columns, table.rows
        ({'age': ['12', None], 'kind': ['#1 oak', 'elm']}, [3, 4])
        >>> table.notes
        ('separated by semicolons', '1 comment line before the header skipped')
    """
    (table,) = read_pieces(path, encoding=encoding, separator=separator)
    names = [*table.columns, *table.unread]
    if len(names) < 2:
        raise ShapeError(
            f"{table.file} must have at least two columns, one to predict and one to predict from; its header is"
            f" {', '.join(map(repr, names))}. The columns of a CSV file are separated by commas, semicolons, tabs or"
            " pipes."
        )
    return table


def read_pieces(
    path: str | Path, size: int | None = None, *, encoding: str | None = None, separator: str | None = None
) -> Iterator[Table]:
    """Yield tables of ``size`` rows each, for files larger than memory; with None, one table of all rows."""
    path = arrived(path)
    check_regular(path, "give a CSV or Parquet file.")
    with path.open("rb") as file:
        begins = file.read(_LOOK)
    if not begins:
        raise ShapeError(f"{path.name} is empty; a header and rows are needed.")
    kind = _MARKS.get(begins[:4]) or _KINDS.get(path.suffix.lower()) or _guessed(path, begins)
    if kind == "csv":
        tables = read_csv(path, size, encoding, separator)
    elif kind == "parquet":
        tables = _read_parquet(path, size)
    else:
        tables = iter([_read_excel(path) if kind == "excel" else _read_json(path, lines=kind == "lines")])
    rows = 0
    for table in tables:
        rows += len(table)
        if len(table):
            yield table
    if not rows:
        raise ShapeError(f"{path.name} has a header and no rows.")


def _guessed(path: Path, begins: bytes) -> str:
    """Return the format of a file whose name and first bytes do not tell it: JSON begins with a bracket."""
    begins = begins.removeprefix(b"\xef\xbb\xbf").lstrip()
    if path.suffix or not begins.startswith((b"{", b"[")):
        return "csv"
    first, *more = begins.split(b"\n", 1)
    return "lines" if begins.startswith(b"{") and first.rstrip().endswith(b"}") and more else "json"


def arrived(path: str | Path) -> Path:
    """Return the path of a file; for "-", that of a copy of standard input, which exists until the program ends.

    Standard input can be read once, so a program that needs its table again keeps this path.

    Example:
        >>> arrived("houses.csv")
        PosixPath('houses.csv')
    """
    return _standard_input() if str(path) == "-" else Path(path)


def _standard_input() -> Path:
    if sys.stdin is None or sys.stdin.isatty():
        raise PyroDropoutError("standard input is a terminal; send a table through it, or give a file.")
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = Path(folder, "standard input")
    with path.open("wb") as copy:
        shutil.copyfileobj(sys.stdin.buffer, copy)
    return path


# --- Parquet ----------------------------------------------------------------------------------------------------------


def _library(path: Path, name: str, formats: str, extra: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        package = name.partition(".")[0]
        raise PyroDropoutError(
            f'{path.name}: reading {formats} needs the package {package}; pip install "pyro-dropout[{extra}]".'
        ) from None


def _read_parquet(path: Path, size: int | None) -> Iterator[Table]:
    """Yield tables of ``size`` rows; None for all rows at once."""
    parquet = _library(path, "pyarrow.parquet", "Parquet files", "parquet")
    done = 0
    try:
        with parquet.ParquetFile(path) as file:  # not as a data set, which would also read columns from the path
            names = named(path.name, file.schema_arrow.names)
            for found in [file.read()] if size is None else file.iter_batches(batch_size=size):
                rows = list(range(done + 1, done + found.num_rows + 1))
                columns = {name: from_arrow(found.column(k)) for k, name in enumerate(names)}
                table, types = Table(path.name, columns, rows), dict(zip(names, found.schema.types, strict=True))
                yield replace(table, unread={name: str(types[name]) for name in table.unread})
                done += found.num_rows
    except (importlib.import_module("pyarrow").ArrowException, OSError) as cause:
        raise PyroDropoutError(f"{path.name} is not a valid Parquet file: {str(cause).splitlines()[0]}") from None


# --- Excel and JSON ---------------------------------------------------------------------------------------------------


def _read_excel(path: Path) -> Table:
    """Return the first sheet that is not empty, as pandas reads it; its first row that is not empty is the header."""
    openpyxl = _library(path, "openpyxl", "Excel files", "excel")
    try:
        with path.open("rb") as file, warnings.catch_warnings(action="ignore", category=UserWarning):  # about styles
            book = openpyxl.load_workbook(file)
            sheets = pandas.read_excel(file, sheet_name=None, header=None, dtype=object, engine="openpyxl")
    except MemoryError:
        raise
    except Exception as cause:  # of zipfile, zlib, the parser of XML, and openpyxl
        raise PyroDropoutError(f"{path.name} is not a valid Excel file (.xlsx): {cause}.") from None
    filled = {name: frame.dropna(how="all").dropna(axis=1, how="all") for name, frame in sheets.items()}
    filled = {name: frame for name, frame in filled.items() if len(frame)}
    if not filled:
        raise ShapeError(f"{path.name} is empty; a header and rows are needed.")
    sheet, frame = next(iter(filled.items()))
    _check_cells(path.name, book[sheet], sheets[sheet])
    notes = (f"sheet {sheet!r}, the first of {len(filled)}",) if len(filled) > 1 else ()
    names = named(path.name, ["" if pandas.isna(name) else name for name in frame.iloc[0]])
    columns = dict(zip(names, (frame[key].iloc[1:] for key in frame), strict=True))
    return Table(path.name, columns, [row + 1 for row in frame.index[1:]], notes=notes)


def _check_cells(file: str, written: Any, frame: pandas.DataFrame) -> None:
    """Raise if cells would be read as missing that are not: merged ones, and formulas that were never computed."""
    if written.merged_cells.ranges:
        raise PyroDropoutError(
            f"{file}: the cells {next(iter(written.merged_cells.ranges))} are merged; separate them."
        )
    formulas = [cell for row in written.iter_rows() for cell in row if cell.data_type == "f"]
    stored = frame.reindex(index=range(written.max_row), columns=range(written.max_column))
    if formulas and all(pandas.isna(stored.iat[cell.row - 1, cell.column - 1]) for cell in formulas):
        raise PyroDropoutError(
            f"{file}: the formula in cell {formulas[0].coordinate} has no stored value. Open the file in a spreadsheet"
            " program and save it."
        )


def _read_json(path: Path, lines: bool = False) -> Table:
    """Return a list of records, an object of columns, or one record a line."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
        parts = [line for line in text.split("\n") if line.strip()] if lines else [text]
        found = [json.loads(part, object_pairs_hook=_once) for part in parts]
        frame = pandas.DataFrame(found if lines else found[0], dtype=object)
    except (ValueError, RecursionError, TypeError, AttributeError) as cause:
        hint = " If it has one record a line, let its name end in .jsonl." if "Extra data" in str(cause) else ""
        raise PyroDropoutError(f"{path.name} is not a JSON table, {_FORMS}: {cause}.{hint}") from None
    if isinstance(frame.columns, pandas.RangeIndex):  # no record has a name
        raise ShapeError(f"{path.name} is not a table: it must be {_FORMS}.")
    columns = {name: frame[key] for name, key in zip(named(path.name, frame.columns), frame.columns, strict=True)}
    return Table(path.name, columns, list(range(1, len(frame) + 1)))


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name occurs twice in an object")
    return found
