"""Read CSV files: their encoding, comments before the header, the header, the separator and the rows."""

import codecs
import csv
import io
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pyro_dropout.mathematics.errors import PyroDropoutError, RangeError, ShapeError
from pyro_dropout.tables.cells import as_moment
from pyro_dropout.tables.csv_lines import Piece, plain_pieces
from pyro_dropout.tables.notation import is_number
from pyro_dropout.tables.table import Table
from pyro_dropout.tables.texts import texts_of

SEPARATORS = {"comma": ",", "semicolon": ";", "tab": "\t", "pipe": "|"}

_BOMS = {codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32"}
_BOMS |= {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}  # after UTF-32, which begins in the same way
_BLOCK = 2**20  # bytes
_LOOK = 200  # lines that are looked at to tell separators apart
_SHOWN = 60  # characters of a line in a message


@dataclass(frozen=True)
class _Start:
    """How a file begins: the line of its header, its separator, and what there is to say."""

    line: int
    separator: str
    notes: tuple[str, ...]


def read_csv(
    path: Path, size: int | None, encoding: str | None, separator: str | None, strict: bool = True
) -> Iterator[Table]:
    """Yield tables of ``size`` rows; None for all rows at once."""
    encoding = _encoding(path, encoding)
    try:
        start = _start(path, encoding, separator)
        line, header = next(_records(path, encoding, start.line, start.separator))
        names = [name.strip() for name in header]
        names = names if strict else named(names)
    except UnicodeDecodeError:
        _check_text(path, encoding)
        raise
    notes = start.notes + _check_header(path, names, start.separator)
    for columns, rows in _pieces(path, encoding, line, len(names), start.separator, size):
        yield Table(path.name, dict(zip(names, columns, strict=True)), rows, notes=notes, separator=start.separator)


def named(names: list[str]) -> list[str]:
    """Return the names of columns; those that have none are called after their place, as an index often is.

    Example:
        >>> named(["", "price", ""])
        ['unnamed 1', 'price', 'unnamed 3']
    """
    return [name or f"unnamed {place}" for place, name in enumerate(names, 1)]


def check_names(file: str, names: list[str]) -> None:
    """Raise unless columns have names, all different."""
    for place, name in enumerate(names, 1):
        if not name:
            raise ShapeError(f"{file}: column {place} of {len(names)} has no name in the header.")
        if name in names[: place - 1]:
            raise ShapeError(f"{file} has two columns called {name!r}; column names must be unique.")


def check_width(file: str, names: list[str], least: int = 2) -> None:
    """Raise unless there are enough columns: by default, one to predict and one to predict from."""
    if len(names) < least:
        raise ShapeError(
            f"{file} must have at least two columns, one to predict and one to predict from; its header is"
            f" {', '.join(map(repr, names)) or 'empty'}. The columns of a CSV file are separated by commas, semicolons,"
            " tabs or pipes."
        )


def _check_header(path: Path, names: list[str], separator: str) -> tuple[str, ...]:
    """Raise if the first line is a row of data; return what there is to say about it."""
    numbers = [name for name in names if is_number(name) or as_moment(name) is not None]
    whole = [name for name in numbers if name.isdecimal()]  # a year may be a name
    if numbers and (len(numbers) == len(names) or len(whole) < len(numbers)):
        raise ShapeError(
            f"{path.name} has no header: its first line is {separator.join(names)[:_SHOWN]!r}. Write the columns' names"
            " there; names that are numbers need a letter."
        )
    check_names(path.name, names)
    return (f"columns named by numbers: {', '.join(whole)}",) if whole else ()


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


def _start(path: Path, encoding: str, asked: str | None) -> _Start:
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
    return _Start(number, mark, tuple(notes))


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


def _pieces(path: Path, encoding: str, line: int, width: int, separator: str, size: int | None) -> Iterator[Piece]:
    """Yield the rows after a line, ``size`` at a time; the last piece is smaller, and may be empty."""
    left: int | None = line
    if encoding.startswith("utf-8"):
        left = yield from plain_pieces(path, line, width, separator, size)
    if left is None:
        return
    records = _records(path, encoding, left + 1, separator)
    while True:
        rows: list[int] = []
        cells: list[list[str]] = []
        for number, row in itertools.islice(records, size):
            if len(row) != width:
                hint = " Comments may stand before the header only." if row[0].startswith("#") else ""
                raise ShapeError(f"{path.name}, row {number}: {len(row)} values for {width} columns.{hint}")
            rows.append(number)
            cells.append(row)
        yield [texts_of(column) for column in zip(*cells, strict=True)] if cells else [[]] * width, rows
        if size is None or len(rows) < size:
            return


def _records(path: Path, encoding: str, line: int, separator: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the rows from a line on, with the number of the line on which each ends."""
    with path.open(encoding=encoding, newline="") as file:
        reader = csv.reader(itertools.islice(file, line - 1, None), delimiter=separator, strict=True)
        while True:
            try:
                row = next(reader)
            except StopIteration:
                return
            except csv.Error as cause:
                _check_text(path, encoding)
                raise ShapeError(f"{path.name}, row {line - 1 + reader.line_num}: {cause}.") from None
            except UnicodeDecodeError:
                _check_text(path, encoding)
                raise
            if any("\0" in value for value in row):
                _check_text(path, encoding)
            if row:
                yield line - 1 + reader.line_num, row


def _check_text(path: Path, encoding: str) -> None:
    """Raise an error with the byte position if a file is not text; a line reader knows only the place in its buffer."""
    decoder = codecs.getincrementaldecoder(encoding)()
    done = 0
    with path.open("rb") as file:
        while True:
            block = file.read(_BLOCK)
            held = len(decoder.getstate()[0])
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as cause:
                what = "neither Parquet nor UTF-8" if encoding.startswith("utf-8") else f"not {encoding}"
                raise PyroDropoutError(
                    f"{path.name} is {what} text: byte {done - held + cause.start + 1} cannot be decoded. Name its"
                    " encoding, for example with --encoding latin-1, or save it in UTF-8."
                ) from None
            if "\0" in text:
                raise PyroDropoutError(
                    f"{path.name} is not a table: it holds binary data. Give a CSV or a Parquet file, and name an"
                    " encoding that the file does not declare (--encoding utf-16-le)."
                )
            if not block:
                return
            done += len(block)
