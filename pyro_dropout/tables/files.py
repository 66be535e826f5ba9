"""Read CSV, Parquet and Excel files as tables; errors name the file, row and column.

pyarrow reads the rows of a CSV file, as texts. Python's csv module reads what is not simple, and says what is wrong.
"""

import codecs
import contextlib
import csv
import importlib
import itertools
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pandas

from pyro_dropout.errors import PyroDropoutError, RangeError, ShapeError
from pyro_dropout.tables.notation import are_dates, is_number
from pyro_dropout.tables.settings import Separator
from pyro_dropout.tables.table import Table, from_arrow, named, table_of
from pyro_dropout.training.checkpoints.safe_files import check_regular

_SEPARATORS = dict(zip(get_args(Separator), ",;\t|", strict=True))
_BOMS = {codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32"}
_BOMS |= {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}  # after UTF-32, which begins in the same way
_SHOWN = 60  # characters of a line in a message


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
    table = _read_csv(path, encoding, separator)
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
    names, notes = _names_of(path, ["" if pandas.isna(name) else str(name) for name in sheet.iloc[0]], ",")
    cells = sheet.iloc[1:].infer_objects().set_axis(names, axis=1)  # dates without times stay so
    return table_of(cells, path.name, cells.index + 1, notes)


# --- CSV --------------------------------------------------------------------------------------------------------------


def _read_csv(path: Path, encoding: str | None, separator: str | None) -> Table:
    """Return the table in a file; raise where it is none."""
    if separator is not None and separator not in _SEPARATORS:
        raise RangeError(f"separator must be one of {', '.join(_SEPARATORS)}; got {separator!r}.")
    text = _text(path, encoding)
    mark = _SEPARATORS[separator] if separator else _separator(path, text)
    records = _records(path, text, mark)
    line, header = next(records, (0, [""]))
    if header == [""] or header[0].startswith("#"):
        raise ShapeError(
            f"{path.name} must begin with the header, the names of its columns; it begins with {text[:_SHOWN]!r}."
            " Remove lines that are comments, and a # before the header."
        )
    names, notes = _names_of(path, header, mark)
    notes += tuple(f"separated by {name}s" for name, each in _SEPARATORS.items() if each == mark != ",")
    columns = _simple(text[sum(map(len, itertools.islice(_lines(text), line))) :], len(names), mark)
    if columns is not None:
        numbers: Any = line + 1 + np.arange(len(columns[0]))
    else:
        rows = list(records)
        for number, row in rows:
            if len(row) != len(names):
                raise ShapeError(f"{path.name}, row {number}: {len(row)} values for {len(names)} columns.")
        numbers, columns = [number for number, _ in rows], [[row[k] for _, row in rows] for k in range(len(names))]
    return Table(path.name, dict(zip(names, columns, strict=True)), numbers, notes, mark)


def _names_of(path: Path, header: list[str], separator: str) -> tuple[list[str], tuple[str, ...]]:
    """Return the names of the columns, and what there is to say about them; raise if they are a row of data."""
    names = [name.strip() for name in header]
    dates = are_dates(pandas.Series(names, dtype="str"))
    numbers = [name for name, date in zip(names, dates, strict=True) if date or is_number(name)]
    whole = [name for name in numbers if name.isdecimal()]  # a year may be a name
    if numbers and (len(numbers) == len(names) or len(whole) < len(numbers)):
        raise ShapeError(
            f"{path.name} has no header: its first line is {separator.join(names)[:_SHOWN]!r}. Write the columns' names"
            " there; names that are numbers need a letter."
        )
    return named(path.name, names), (f"columns named by numbers: {', '.join(whole)}",) if whole else ()


def _text(path: Path, encoding: str | None) -> str:
    """Return the text of a file, in the encoding that is given or that its first bytes declare, or else UTF-8."""
    raw = path.read_bytes()
    encoding = encoding or next((name for mark, name in _BOMS.items() if raw.startswith(mark)), "utf-8")
    try:
        text = raw.decode(encoding).removeprefix("\ufeff")
    except LookupError:
        raise RangeError(
            f"encoding must be the name of a text encoding, such as 'latin-1' or 'cp1252'; got {encoding!r}."
        ) from None
    except UnicodeDecodeError as cause:
        what = "neither Parquet nor UTF-8" if encoding == "utf-8" else f"not {encoding}"
        raise PyroDropoutError(
            f"{path.name} is {what} text: byte {cause.start + 1} cannot be decoded. Name its encoding, for example with"
            " --encoding latin-1, or save it in UTF-8."
        ) from None
    if "\0" in text:
        raise PyroDropoutError(
            f"{path.name} is not a table: it holds binary data. Give a CSV or a Parquet file, and name an encoding that"
            " the file does not declare (--encoding utf-16-le)."
        )
    return text


def _separator(path: Path, text: str) -> str:
    """Return the only separator that splits the header; raise if there are several."""
    splitting = []
    for name, mark in _SEPARATORS.items():
        with contextlib.suppress(csv.Error):  # the header cannot be read with it
            header = next((row for row in csv.reader(_lines(text), delimiter=mark, strict=True) if row), [])
            splitting += [name] if len(header) > 1 else []
    if len(splitting) > 1:
        raise ShapeError(
            f"{path.name}: the columns of the header {text.strip()[:_SHOWN]!r} may be separated by"
            f" {' or '.join(f'{name}s' for name in splitting)}. Say which: --separator {splitting[0]}, or"
            f" {splitting[-1]}."
        )
    return _SEPARATORS[splitting[0]] if splitting else ","


def _simple(text: str, width: int, separator: str) -> list[Any] | None:
    """Return columns that pyarrow reads; None unless each line is a row without quotes."""
    raw = text.rstrip("\r\n").replace("\r\n", "\n").encode("utf-8", "surrogatepass")
    if not raw or b'"' in raw or b"\r" in raw or text.startswith("\ufeff"):  # pyarrow would take that mark away
        return None
    try:
        from pyarrow import BufferReader
        from pyarrow import csv as arrow

        names = [str(place) for place in range(width)]
        kinds: dict[str, Any] = dict.fromkeys(names, "large_string")
        table = arrow.read_csv(
            BufferReader(raw),
            arrow.ReadOptions(column_names=names, use_threads=False),
            arrow.ParseOptions(delimiter=separator),
            arrow.ConvertOptions(column_types=kinds, null_values=[""], strings_can_be_null=True),
        )
    except (ImportError, ValueError):  # a row with too many or too few cells
        return None
    whole = table.num_rows == raw.count(b"\n") + 1  # else there are empty lines
    return [column.to_pandas() for column in table.columns] if whole else None


def _lines(text: str) -> Iterator[str]:
    """Yield lines with their ends; a copy of the whole text for io.StringIO takes long."""
    return (found[0] for found in re.finditer(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+", text))


def _records(path: Path, text: str, separator: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the rows that are not empty, each with the line on which it ends."""
    reader = csv.reader(_lines(text), delimiter=separator, strict=True)
    try:
        yield from ((reader.line_num, row) for row in reader if row)
    except csv.Error as cause:
        raise ShapeError(f"{path.name}, row {reader.line_num}: {cause}.") from None
