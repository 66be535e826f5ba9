"""Read Parquet files, Excel workbooks and JSON files, so that each column has the cells that a CSV file would have."""

import importlib
import json
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from pyro_dropout.mathematics.errors import PyroDropoutError, ShapeError
from pyro_dropout.tables.cells import as_text
from pyro_dropout.tables.frame import from_arrow, table_from
from pyro_dropout.tables.table import Table, named

_FORMS = "a list of records, [{...}, {...}], or an object of columns, {...: [...]}"


def _library(path: Path, name: str, formats: str, extra: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        package = name.partition(".")[0]
        raise PyroDropoutError(
            f'{path.name}: reading {formats} needs the package {package}; pip install "pyro-dropout[{extra}]".'
        ) from None


def read_parquet(path: Path, size: int | None, strict: bool = True) -> Iterator[Table]:
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


def read_excel(path: Path, strict: bool = True) -> Table:
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


def read_json(path: Path, strict: bool = True) -> Table:
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


def read_json_lines(path: Path, strict: bool = True) -> Table:
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
