"""Read CSV files: their encoding, comments before the header, the header, the separator and the rows.

pyarrow reads the rows, as texts. Python's csv module reads what is not simple, and says what is wrong.
"""

import codecs
import contextlib
import csv
import functools
import io
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import numpy as np
import pandas

from pyro_dropout.errors import PyroDropoutError, RangeError, ShapeError
from pyro_dropout.tables.notation import is_date, is_number
from pyro_dropout.tables.table import Floats, Ints, Series, Table, cast, named, texts_of

SEPARATORS: dict[str, str] = {"comma": ",", "semicolon": ";", "tab": "\t", "pipe": "|"}

_BOMS = {codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32"}
_BOMS |= {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}  # after UTF-32, which begins in the same way
_LOOK = 200  # lines that are looked at to tell separators apart
_SHOWN = 60  # characters of a line in a message


def read_csv(path: Path, size: int | None, encoding: str | None, separator: str | None) -> Iterator[Table]:
    """Yield tables of ``size`` rows; None for all rows at once."""
    encoding = _encoding(path, encoding)
    try:
        with path.open(encoding=encoding, newline="") as file:
            number, mark, said, head = _start(path, file, separator)
            # All that is left at once; line by line takes longer.
            lines = itertools.chain(head, file if size is not None else iter(file.read, ""))
            line, header = next(_records(lines, number, mark))
            names, notes = names_of(path, header, mark)
            for columns, rows in _pieces(path, lines, line, len(names), mark, size):
                cells, numbers = dict(zip(names, columns, strict=True)), dict[object, Floats]()
                for name, texts in cells.items():
                    found = cast(texts)
                    if found is None:
                        cells[name] = texts_of(texts)
                    else:  # numbers have no spaces around them, and do not mean that a value is missing
                        numbers[name] = found
                yield Table(path.name, cells, rows, notes=(*said, *notes), separator=mark, kept=numbers)
    except (UnicodeDecodeError, csv.Error) as cause:
        _check_text(path, encoding)
        raise ShapeError(f"{path.name}, {cause}.") from None


def names_of(path: Path, header: list[str], separator: str) -> tuple[list[str], tuple[str, ...]]:
    """Return the names of the columns, and what there is to say about them; raise if they are a row of data."""
    names = [name.strip() for name in header]
    numbers = [name for name in names if is_number(name) or is_date(name)]
    whole = [name for name in numbers if name.isdecimal()]  # a year may be a name
    if numbers and (len(numbers) == len(names) or len(whole) < len(numbers)):
        raise ShapeError(
            f"{path.name} has no header: its first line is {separator.join(names)[:_SHOWN]!r}. Write the columns' names"
            " there; names that are numbers need a letter."
        )
    return named(path.name, names), (f"columns named by numbers: {', '.join(whole)}",) if whole else ()


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


def _start(path: Path, file: TextIO, asked: str | None) -> tuple[int, str, list[str], list[str]]:
    """Return the line of the header, the separator, what there is to say of it, and the first lines from the header."""
    if asked is not None and asked not in SEPARATORS:
        raise RangeError(f"separator must be one of {', '.join(SEPARATORS)}; got {asked!r}.")
    comments: list[tuple[int, str]] = []
    for number, line in enumerate(file, 1):
        if line.startswith("#"):
            comments.append((number, line))
        elif line.strip("\r\n"):
            break
    else:
        raise ShapeError(f"{path.name} has no header; its lines are empty or comments, which begin with #.")
    head = [line, *itertools.islice(file, _LOOK)]
    mark = SEPARATORS[asked] if asked else _separator(path, head)
    notes = [f"separated by {name}s" for name, each in SEPARATORS.items() if each == mark != ","]
    if comments:
        first, last = comments[-1]
        names, (header, *_) = _parsed([last], mark), _parsed(head, mark) or [[]]
        if names and len(names[0]) == len(header) > 1:
            raise ShapeError(
                f"{path.name}, row {first}: the line begins with # and has as many values as the next one. If it is the"
                " header, remove the #; if it is a comment, remove the line."
            )
        notes.append(f"{len(comments)} comment line{'s' * (len(comments) > 1)} before the header skipped")
    return number, mark, notes, head


def _separator(path: Path, head: list[str]) -> str:
    """Return the only separator that splits the header; if there are several, the only one that also fits the rows."""
    found = {mark: _parsed(head, mark) for mark in SEPARATORS.values()}
    splitting = [mark for mark, records in found.items() if records and len(records[0]) > 1]
    even = [mark for mark in splitting if len(set(map(len, found[mark]))) == 1]
    if len(splitting) < 2 or len(even) == 1:
        return ([*splitting, ","] if len(splitting) < 2 else even)[0]
    names = [name for name, mark in SEPARATORS.items() if mark in splitting]
    raise ShapeError(
        f"{path.name}: the columns of the header {head[0].strip()[:_SHOWN]!r} may be separated by"
        f" {' or '.join(f'{name}s' for name in names)}. Say which: --separator {names[0]}, or {names[-1]}."
    )


def _parsed(head: list[str], mark: str) -> list[list[str]]:
    """Return the records in the first lines of a file, up to the first that csv cannot read."""
    records: list[list[str]] = []
    with contextlib.suppress(csv.Error):
        for record in csv.reader(head, delimiter=mark, strict=True):
            records += [record] if record else []
    return records


# --- rows -------------------------------------------------------------------------------------------------------------


def _pieces(
    path: Path, lines: Iterator[str], line: int, width: int, separator: str, size: int | None
) -> Iterator[tuple[list[Series], Ints]]:
    """Yield the columns after a line, ``size`` rows at a time, and the line of each row."""
    while text := "".join(itertools.islice(lines, size)):
        columns = _simple(text, width, separator)
        if columns is None:
            break
        rows = len(columns[0])
        yield columns, np.arange(line + 1, line + 1 + rows)
        line += rows
    records = _records(itertools.chain(io.StringIO(text, newline=""), lines), line + 1, separator)
    while some := list(itertools.islice(records, size)):
        for number, row in some:
            if len(row) != width:
                hint = " Comments may stand before the header only." if row[0].startswith("#") else ""
                raise ShapeError(f"{path.name}, row {number}: {len(row)} values for {width} columns.{hint}")
        columns = [pandas.Series([row[k] for _, row in some], dtype="str") for k in range(width)]
        yield columns, np.array([number for number, _ in some])


def _simple(text: str, width: int, separator: str) -> list[Series] | None:
    """Return columns that pyarrow reads; None unless each line is a row, and quotes stand around whole cells."""
    raw = text.rstrip("\r\n").encode("utf-8", "surrogatepass")
    raw = raw.replace(b"\r\n", b"\n") if b"\r" in raw else raw
    odd = not raw or b"\0" in raw or b"\r" in raw
    if odd or (b'"' in raw and not _whole_quotes(separator).fullmatch(raw)):
        return None
    try:
        from pyarrow import BufferReader
        from pyarrow import csv as arrow

        names = [str(place) for place in range(width)]
        table = arrow.read_csv(
            BufferReader(raw),
            arrow.ReadOptions(column_names=names, use_threads=False),
            arrow.ParseOptions(delimiter=separator),
            arrow.ConvertOptions(
                column_types=dict.fromkeys(names, "large_string"), null_values=[""], strings_can_be_null=True
            ),
        )
    except (ImportError, ValueError):  # a row with too many or too few cells
        return None
    whole = table.num_rows == raw.count(b"\n") + 1  # else there are empty lines
    return [column.to_pandas() for column in table.columns] if whole else None


@functools.cache
def _whole_quotes(separator: str) -> re.Pattern[bytes]:
    """Return a pattern of lines in which quotes stand around whole cells, and hold neither quotes nor line ends."""
    mark = re.escape(separator.encode())
    return re.compile(rb'(?:(?:"[^"\n]*+"|[^"\n%b]*+)(?:[\n%b]|\Z))*+' % (mark, mark))


def _records(lines: Iterator[str], line: int, separator: str) -> Iterator[tuple[int, list[str]]]:
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
