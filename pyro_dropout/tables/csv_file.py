"""Read CSV files: their encoding, comments before the header, the header, the separator and the rows.

pyarrow reads the rows, as texts. Python's csv module reads what is not simple, and says what is wrong.
"""

import codecs
import csv
import io
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, TextIO

import numpy as np

from pyro_dropout.mathematics.errors import PyroDropoutError, RangeError, ShapeError
from pyro_dropout.tables.cell_columns import Cells
from pyro_dropout.tables.cells import as_moment
from pyro_dropout.tables.notation import is_number
from pyro_dropout.tables.table import Table, named

Separator = Literal["comma", "semicolon", "tab", "pipe"]
SEPARATORS: dict[str, str] = {"comma": ",", "semicolon": ";", "tab": "\t", "pipe": "|"}

_BOMS = {codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32"}
_BOMS |= {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}  # after UTF-32, which begins in the same way
_LOOK = 200  # lines that are looked at to tell separators apart
_SHOWN = 60  # characters of a line in a message


def read_csv(
    path: Path, size: int | None, encoding: str | None, separator: str | None, strict: bool = True
) -> Iterator[Table]:
    """Yield tables of ``size`` rows; None for all rows at once."""
    encoding = _encoding(path, encoding)
    try:
        first, mark, said = _start(path, encoding, separator)
        with path.open(encoding=encoding, newline="") as file:
            line, header = next(_records(path, itertools.islice(file, first - 1, None), first, mark))
            names, notes = _names(path, header, mark, strict)
        with path.open(encoding=encoding, newline="") as file:
            for _ in range(line):
                file.readline()
            for columns, rows in _pieces(path, file, line, len(names), mark, size):
                cells = dict(zip(names, columns, strict=True))
                yield Table(path.name, cells, rows, notes=(*said, *notes), separator=mark)
    except (UnicodeDecodeError, csv.Error) as cause:
        _check_text(path, encoding)
        raise ShapeError(f"{path.name}, {cause}.") from None


def _names(path: Path, header: list[str], separator: str, strict: bool) -> tuple[list[str], tuple[str, ...]]:
    """Return the names of the columns, and what there is to say about them; raise if they are a row of data."""
    names = [name.strip() for name in header]
    numbers = [name for name in names if is_number(name) or as_moment(name) is not None]
    whole = [name for name in numbers if name.isdecimal()]  # a year may be a name
    if numbers and (len(numbers) == len(names) or len(whole) < len(numbers)):
        raise ShapeError(
            f"{path.name} has no header: its first line is {separator.join(names)[:_SHOWN]!r}. Write the columns' names"
            " there; names that are numbers need a letter."
        )
    notes = (f"columns named by numbers: {', '.join(whole)}",) if whole else ()
    return named(path.name, names, strict), notes


def _encoding(path: Path, given: str | None) -> str:
    """Return the encoding that was given, or that the file's first bytes declare, or else UTF-8."""
    if given is None:
        with path.open("rb") as file:
            begins = file.read(4)
        return next((name for mark, name in _BOMS.items() if begins.startswith(mark)), "utf-8")
    try:
        io.TextIOWrapper(io.BytesIO(), encoding=given)
    except LookupError:
        raise RangeError(
            f"encoding must be the name of a text encoding, such as 'latin-1' or 'cp1252'; got {given!r}."
        ) from None
    return "utf-8-sig" if codecs.lookup(given).name == "utf-8" else given


# --- where the table begins -------------------------------------------------------------------------------------------


def _start(path: Path, encoding: str, asked: str | None) -> tuple[int, str, list[str]]:
    """Return the line of the header, the separator, and what there is to say of how a file begins."""
    if asked is not None and asked not in SEPARATORS:
        raise RangeError(f"separator must be one of {', '.join(SEPARATORS)}; got {asked!r}.")
    comments: list[tuple[int, str]] = []
    with path.open(encoding=encoding, newline="") as file:
        lines = enumerate(file, 1)
        for number, line in lines:
            if line.startswith("#"):
                comments.append((number, line))
            elif line.strip("\r\n"):
                break
        else:
            raise ShapeError(f"{path.name} has no header; its lines are empty or comments.")
        head = [line, *(line for _, line in itertools.islice(lines, _LOOK))]
    mark = SEPARATORS[asked] if asked else _separator(path, head)
    notes = [f"separated by {name}s" for name, each in SEPARATORS.items() if each == mark != ","]
    if comments and _is_header(path, comments[-1], head, mark):
        number = comments.pop()[0]
        notes.append(f"the header is line {number}, which begins with #")
    if comments:
        notes.append(f"{len(comments)} comment line{'s' * (len(comments) > 1)} before the header skipped")
    return number, mark, notes


def _separator(path: Path, head: list[str]) -> str:
    """Return the only separator that splits the header; if there are several, the only one that also fits the rows."""
    found = {mark: _parsed(head, mark) for mark in SEPARATORS.values()}
    splitting = [mark for mark, records in found.items() if records and len(records[0]) > 1]
    if len(splitting) < 2:
        return splitting[0] if splitting else ","
    even = [mark for mark in splitting if len(set(map(len, found[mark]))) == 1]
    if len(even) == 1:
        return even[0]
    names = [name for name, mark in SEPARATORS.items() if mark in splitting]
    raise ShapeError(
        f"{path.name}: the columns of the header {head[0].strip()[:_SHOWN]!r} may be separated by"
        f" {' or '.join(f'{name}s' for name in names)}. Say which: --separator {names[0]}, or {names[-1]}."
    )


def _parsed(head: list[str], mark: str) -> list[list[str]]:
    """Return the records in the first lines of a file, up to the first that csv cannot read."""
    records: list[list[str]] = []
    reader = csv.reader(head, delimiter=mark, strict=True)
    while True:
        try:
            record = next(reader)
        except (StopIteration, csv.Error):
            return records
        records += [record] if record else []


def _is_header(path: Path, comment: tuple[int, str], head: list[str], mark: str) -> bool:
    """Return whether the last line that begins with # is the header; raise if it may be one or not."""
    number, line = comment
    names, (first, *rows) = _parsed([line], mark), _parsed(head, mark) or [[]]
    if not names or len(names[0]) != len(first) or len(first) < 2:
        return False
    numbers = sum(is_number(cell.strip()) for cell in first)
    if numbers == len(first) or (numbers and not line[1:2].isspace()):
        return True  # what follows cannot be a header, or holds a number while this line reads like a header
    if not numbers and any(is_number(cell.strip()) for row in rows[:1] for cell in row):
        return False
    raise ShapeError(
        f"{path.name}, row {number}: the line begins with # and has as many values as the next one. If it is the"
        " header, remove the #; if it is a comment, remove the line."
    )


# --- rows -------------------------------------------------------------------------------------------------------------


def _pieces(
    path: Path, file: TextIO, line: int, width: int, separator: str, size: int | None
) -> Iterator[tuple[list[Cells], list[int]]]:
    """Yield the columns after a line, ``size`` rows at a time, and the line of each row."""
    while text := file.read() if size is None else "".join(itertools.islice(file, size)):
        columns = _simple(text, width, separator)
        if columns is None:
            lines = itertools.chain(io.StringIO(text, newline=""), file)
            yield from _odd_pieces(path, lines, line, width, separator, size)
            return
        rows = len(columns[0])
        yield columns, list(range(line + 1, line + 1 + rows))
        line += rows


def _simple(text: str, width: int, separator: str) -> list[Cells] | None:
    """Return columns that pandas reads; None unless each line is a row, and quotes stand around whole cells."""
    text = text.rstrip("\r\n")
    try:
        raw = text.encode()
    except UnicodeEncodeError:
        return None
    if not raw or b"\0" in raw or (b"\r" in raw and raw.count(b"\r") != raw.count(b"\r\n")):
        return None
    view = np.frombuffer(b"\n" + raw + b"\n", np.uint8)
    ends = np.flatnonzero(view == ord("\n"))
    lengths = np.diff(ends)
    if lengths.max() > csv.field_size_limit() or lengths.min() <= 1 + (view[ends[1:] - 1] == ord("\r")).max():
        return None
    quotes = np.flatnonzero(view == ord('"'))
    outside = np.array([*b'\n\r"', ord(separator)], np.uint8)
    around = np.stack([view[quotes[::2] - 1], view[quotes[1::2] + 1]]) if len(quotes) % 2 == 0 else np.zeros(1)
    if not np.isin(around, outside).all() or (np.searchsorted(quotes, ends) % 2).any():
        return None
    try:
        from pyarrow import csv as arrow

        names = [str(place) for place in range(width)]
        table = arrow.read_csv(
            io.BytesIO(raw),
            arrow.ReadOptions(column_names=names),
            arrow.ParseOptions(delimiter=separator),
            arrow.ConvertOptions(column_types=dict.fromkeys(names, "large_string"), check_utf8=False),
        )
    except (ImportError, ValueError):  # a row with too many or too few cells
        return None
    return [Cells.of_texts(column.to_pandas()) for column in table.columns] if len(table) == len(lengths) else None


def _odd_pieces(
    path: Path, lines: Iterator[str], line: int, width: int, separator: str, size: int | None
) -> Iterator[tuple[list[Cells], list[int]]]:
    records = _records(path, lines, line + 1, separator)
    while some := list(itertools.islice(records, size)):
        for number, row in some:
            if len(row) != width:
                hint = " Comments may stand before the header only." if row[0].startswith("#") else ""
                raise ShapeError(f"{path.name}, row {number}: {len(row)} values for {width} columns.{hint}")
        yield [Cells.of_texts([row[k] for _, row in some]) for k in range(width)], [number for number, _ in some]


def _records(path: Path, lines: Iterator[str], line: int, separator: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the rows in lines, the first of which has this number, with the line on which each ends."""
    reader = csv.reader(lines, delimiter=separator, strict=True)
    while True:
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as cause:
            raise csv.Error(f"row {line - 1 + reader.line_num}: {cause}") from None
        if any("\0" in value for value in row):
            raise csv.Error(f"row {line - 1 + reader.line_num}: a NUL character")
        if row:
            yield line - 1 + reader.line_num, row


def _check_text(path: Path, encoding: str) -> None:
    """Raise an error with the byte position if a file is not text; a line reader knows only the place in its buffer."""
    raw = path.read_bytes()
    try:
        text = raw.decode(encoding)
    except UnicodeDecodeError as cause:
        what = "neither Parquet nor UTF-8" if encoding.startswith("utf-8") else f"not {encoding}"
        first = cause.start + 1 + len(codecs.BOM_UTF8) * (encoding == "utf-8-sig" and raw.startswith(codecs.BOM_UTF8))
        raise PyroDropoutError(
            f"{path.name} is {what} text: byte {first} cannot be decoded. Name its encoding, for example with"
            " --encoding latin-1, or save it in UTF-8."
        ) from None
    if "\0" in text:
        raise PyroDropoutError(
            f"{path.name} is not a table: it holds binary data. Give a CSV or a Parquet file, and name an encoding that"
            " the file does not declare (--encoding utf-16-le)."
        )
