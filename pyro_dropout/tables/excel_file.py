"""Read Excel workbooks: the table on the first sheet that is not empty."""

import importlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from pyro_dropout.mathematics.errors import PyroDropoutError, ShapeError
from pyro_dropout.tables.cells import as_text
from pyro_dropout.tables.csv_file import check_names, named
from pyro_dropout.tables.table import Table
from pyro_dropout.tables.values import cell_from, table_from


def read_excel(path: Path, size: int | None, strict: bool = True) -> Iterator[Table]:
    """Yield tables of ``size`` rows; None for all rows at once."""
    try:
        openpyxl = importlib.import_module("openpyxl")
    except ModuleNotFoundError:
        raise PyroDropoutError(
            f'{path.name}: reading Excel files needs the package openpyxl; pip install "pyro-dropout[excel]".'
        ) from None
    values, written = _workbook(openpyxl, path, data_only=True), _workbook(openpyxl, path, data_only=False)
    sheets = [sheet for sheet in values.worksheets if any(map(_filled, sheet.iter_rows()))]
    if not sheets:
        raise ShapeError(f"{path.name} is empty; a header and rows are needed.")
    sheet = sheets[0]
    _check_cells(path.name, sheet, written[sheet.title])
    notes = (f"sheet {sheet.title!r}, the first of {len(sheets)}",) if len(sheets) > 1 else ()
    header, *lines = [row for row in sheet.iter_rows() if _filled(row)]
    used = [place for place in range(len(header)) if any(row[place].value is not None for row in (header, *lines))]
    names = [_name(header[place].value) for place in used]
    names = names if strict else named(names)
    check_names(path.name, names)
    step = size or max(1, len(lines))
    for start in range(0, max(1, len(lines)), step):
        some = lines[start : start + step]
        columns = {name: [row[place].value for row in some] for name, place in zip(names, used, strict=True)}
        yield table_from(path.name, columns, [row[0].row for row in some], notes)


def _workbook(openpyxl: ModuleType, path: Path, data_only: bool) -> Any:
    """Return a workbook, with the stored values of its formulas or with the formulas."""
    try:
        # An open file, because openpyxl looks at the ends of names; its warnings are about styles.
        with path.open("rb") as file, warnings.catch_warnings(action="ignore", category=UserWarning):
            return openpyxl.load_workbook(file, data_only=data_only)
    except MemoryError:
        raise
    except Exception as cause:  # of zipfile, zlib, the parser of XML, and openpyxl
        raise PyroDropoutError(f"{path.name} is not a valid Excel file (.xlsx): {cause}.") from None


def _filled(row: Any) -> bool:
    return any(cell.value is not None for cell in row)


def _name(value: object) -> str:
    try:
        cell = cell_from(value)
    except TypeError:
        return str(value)
    return str(value or "").strip() if cell is None or isinstance(cell, str) else as_text(cell)


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
