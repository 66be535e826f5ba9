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

from pyro_dropout.mathematics.errors import PyroDropoutError, ShapeError
from pyro_dropout.tables.cells import as_text
from pyro_dropout.tables.csv_file import read_csv
from pyro_dropout.tables.frame import from_arrow, table_from
from pyro_dropout.tables.table import Table, named
from pyro_dropout.training.checkpoints.regular_file import check_regular

_KINDS = {".parquet": "parquet", ".pq": "parquet", ".xlsx": "excel", ".xlsm": "excel", ".json": "json"}
_KINDS |= {".jsonl": "lines", ".ndjson": "lines"}
_MARKS = {b"PAR1": "parquet", b"PK\x03\x04": "excel"}  # how files begin, whatever their names
_LOOK = 2**20  # bytes
_FORMS = "a list of records, [{...}, {...}], or an object of columns, {...: [...]}"


def read_file(
    path: str | Path, *, encoding: str | None = None, separator: str | None = None, strict: bool = True
) -> Table:
    r"""Return the table in a CSV file with a header, or in a Parquet, Excel or JSON file.

    JSON files hold a list of records or an object of columns; those that end in .jsonl, one record a line. The path "-"
    is standard input, in any of these formats.

    Missing values are an empty cell, NA, N/A, n.a., #N/A, NaN, <NA>, null, None and ?, in upper or lower case. Lines of
    a CSV file that begin with # are comments if they stand before the header; after it, they are rows.

    Args:
        path: the file.
        encoding: of a CSV file; by default UTF-8, or UTF-16 or UTF-32 if the file begins with their mark.
        separator: of a CSV file, "comma", "semicolon", "tab" or "pipe"; by default the one that splits the header.
        strict: whether each column must have a name; if not, a column without one is called after its place.

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
    (table,) = read_pieces(path, encoding=encoding, separator=separator, strict=strict)
    return table


def read_pieces(
    path: str | Path,
    size: int | None = None,
    *,
    encoding: str | None = None,
    separator: str | None = None,
    strict: bool = True,
    least: int = 2,
) -> Iterator[Table]:
    """Yield tables of ``size`` rows each, for files larger than memory; with None, one table of all rows.

    A file with fewer than ``least`` columns is refused.
    """
    path = arrived(path)
    check_regular(path, "give a CSV or Parquet file.")
    with path.open("rb") as file:
        begins = file.read(_LOOK)
    if not begins:
        raise ShapeError(f"{path.name} is empty; a header and rows are needed.")
    rows = 0
    for table in _tables(path, begins, size, encoding, separator, strict):
        names = [*table.columns, *table.unread]
        if len(names) < least:
            raise ShapeError(
                f"{path.name} must have at least two columns, one to predict and one to predict from; its header is"
                f" {', '.join(map(repr, names)) or 'empty'}. The columns of a CSV file are separated by commas,"
                " semicolons, tabs or pipes."
            )
        rows += len(table)
        if len(table):
            yield table
    if not rows:
        raise ShapeError(f"{path.name} has a header and no rows.")


def _tables(
    path: Path, begins: bytes, size: int | None, encoding: str | None, separator: str | None, strict: bool
) -> Iterator[Table]:
    kind = _MARKS.get(begins[:4]) or _KINDS.get(path.suffix.lower()) or _guessed(path, begins)
    if kind == "csv":
        return read_csv(path, size, encoding, separator, strict)
    if kind == "parquet":
        return _read_parquet(path, size, strict)
    table = {"excel": _read_excel, "json": _read_json, "lines": _read_json_lines}[kind](path, strict)
    step = size or max(1, len(table))
    return (table.only(range(at, min(at + step, len(table)))) for at in range(0, max(1, len(table)), step))


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


def _read_parquet(path: Path, size: int | None, strict: bool = True) -> Iterator[Table]:
    """Yield tables of ``size`` rows; None for all rows at once."""
    parquet = _library(path, "pyarrow.parquet", "Parquet files", "parquet")
    done = 0
    try:
        with parquet.ParquetFile(path) as file:  # not as a data set, which would also read columns from the path
            names = named(path.name, file.schema_arrow.names, strict)
            for found in [file.read()] if size is None else file.iter_batches(batch_size=size):
                rows = list(range(done + 1, done + found.num_rows + 1))
                columns = {name: from_arrow(found.column(k)) for k, name in enumerate(names)}
                table, types = table_from(path.name, columns, rows), dict(zip(names, found.schema.types, strict=True))
                yield replace(table, unread={name: str(types[name]) for name in table.unread})
                done += found.num_rows
    except (importlib.import_module("pyarrow").ArrowException, OSError) as cause:
        raise PyroDropoutError(f"{path.name} is not a valid Parquet file: {str(cause).splitlines()[0]}") from None


# --- Excel ------------------------------------------------------------------------------------------------------------


def _read_excel(path: Path, strict: bool = True) -> Table:
    """Return the first sheet that is not empty."""
    openpyxl = _library(path, "openpyxl", "Excel files", "excel")
    try:
        # An open file, because openpyxl looks at the ends of names; its warnings are about styles.
        with path.open("rb") as file, warnings.catch_warnings(action="ignore", category=UserWarning):
            values, written = (openpyxl.load_workbook(file, data_only=stored) for stored in (True, False))
    except MemoryError:
        raise
    except Exception as cause:  # of zipfile, zlib, the parser of XML, and openpyxl
        raise PyroDropoutError(f"{path.name} is not a valid Excel file (.xlsx): {cause}.") from None
    sheets = [sheet for sheet in values.worksheets if any(map(_filled, sheet.iter_rows()))]
    if not sheets:
        raise ShapeError(f"{path.name} is empty; a header and rows are needed.")
    sheet = sheets[0]
    _check_cells(path.name, sheet, written[sheet.title])
    notes = (f"sheet {sheet.title!r}, the first of {len(sheets)}",) if len(sheets) > 1 else ()
    header, *lines = [row for row in sheet.iter_rows() if _filled(row)]
    used = [place for place in range(len(header)) if any(row[place].value is not None for row in (header, *lines))]
    names = named(path.name, [_name(header[place].value) for place in used], strict)
    columns = {name: [row[place].value for row in lines] for name, place in zip(names, used, strict=True)}
    return table_from(path.name, columns, [row[0].row for row in lines], notes)


def _filled(row: Any) -> bool:
    return any(cell.value is not None for cell in row)


def _name(value: object) -> str:
    try:
        return "" if value is None else as_text(value)
    except TypeError:
        return str(value)


def _check_cells(file: str, sheet: Any, written: Any) -> None:
    """Raise if cells would be read as missing that are not: merged ones, and formulas that were never computed."""
    if sheet.merged_cells.ranges:
        raise PyroDropoutError(f"{file}: the cells {next(iter(sheet.merged_cells.ranges))} are merged; separate them.")
    formulas = [cell.coordinate for row in written.iter_rows() for cell in row if cell.data_type == "f"]
    if formulas and all(sheet[each].value is None for each in formulas):  # one that gives "" is empty, too
        raise PyroDropoutError(
            f"{file}: the formula in cell {formulas[0]} has no stored value. Open the file in a spreadsheet program and"
            " save it."
        )


# --- JSON -------------------------------------------------------------------------------------------------------------


def _read_json(path: Path, strict: bool = True) -> Table:
    """Return a list of records or an object of columns."""
    found = _parsed(path.name, path.read_bytes())
    if isinstance(found, dict):
        columns = {name: _cells(path.name, name, each) for name, each in found.items()}
        keys = list(next(iter(columns.values()), {}))
        for name, each in columns.items():
            if list(each) != keys:
                raise ShapeError(
                    f"{path.name}: the column {name!r} has other rows than the column {next(iter(found))!r}."
                )
        found = [{name: each[key] for name, each in columns.items()} for key in keys]
    if not isinstance(found, list):
        raise ShapeError(f"{path.name} is not a table: it must be {_FORMS}.")
    return _from_records(path.name, list(enumerate(found, 1)), strict)


def _read_json_lines(path: Path, strict: bool = True) -> Table:
    """Return a file with one record a line."""
    lines = enumerate(path.read_bytes().split(b"\n"), 1)
    records = [(row, _parsed(f"{path.name}, row {row}", line)) for row, line in lines if line.strip()]
    return _from_records(path.name, records, strict)


def _from_records(file: str, records: list[tuple[int, Any]], strict: bool) -> Table:
    """Return records with their rows as a table; a record may lack a name."""
    for row, record in records:
        if not isinstance(record, dict):
            raise ShapeError(
                f'{file}, row {row} is not a record: an object such as {{"age": 12, "kind": "oak"}} is needed.'
            )
    keys = list(dict.fromkeys(key for _, record in records for key in record))
    columns = {
        name: [record.get(key) for _, record in records]
        for name, key in zip(named(file, keys, strict), keys, strict=True)
    }
    return table_from(file, columns, [row for row, _ in records])


def _parsed(where: str, text: bytes) -> Any:
    try:
        return json.loads(text.removeprefix(b"\xef\xbb\xbf"), object_pairs_hook=_once)
    except (ValueError, RecursionError) as cause:  # text that is not Unicode is a ValueError, too
        what = str(cause).splitlines()[0] if isinstance(cause, ValueError) else "it is nested too deeply"
        hint = " If it has one record a line, let its name end in .jsonl." if what.startswith("Extra data") else ""
        raise PyroDropoutError(f"{where} is not valid JSON: {what}.{hint}") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} occurs twice in an object")
    return found


def _cells(file: str, name: str, found: Any) -> dict[object, Any]:
    """Return the values of a column by row: a list, or an object as pandas writes it."""
    if not isinstance(found, list | dict):
        raise ShapeError(f"{file}, column {name!r}: it is not a list; the file must be {_FORMS}.")
    return dict(enumerate(found)) if isinstance(found, list) else dict(found)
