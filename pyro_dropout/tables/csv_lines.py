"""Split simple CSV into columns, a block of lines at once; quotes within cells are left to Python's csv module."""

import csv
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from pyro_dropout.tables.cells import Cell
from pyro_dropout.tables.texts import PADDING, cells_in, joined, part

Piece = tuple[list[Sequence[Cell]], list[int]]  # the cells of each column, and the line of each row

_BLOCK = 2**20  # bytes of a file that are split at once: they stay in the cache
_NEWLINE, _QUOTE = ord("\n"), ord('"')


def plain_pieces(
    path: Path, line: int, width: int, separator: str, size: int | None
) -> Generator[Piece, None, int | None]:
    """Yield the rows after a line of a file in UTF-8, ``size`` at a time; the last piece is smaller, and may be empty.

    Returns:
        None at the end of the file; the last line that was yielded if Python's csv module must read those after it.
    """
    with path.open("rb") as file:
        for _ in range(line):
            head = file.readline()
            if head.count(b"\r") != head.count(b"\r\n"):
                return line
        parts: list[Piece] = []
        for block in _blocks(file, line, width, separator):
            if block is None:
                return line
            parts.append(block)
            held = sum(len(rows) for _, rows in parts)
            if size is not None and held >= size:
                columns, lines = _joined(parts, width)
                for start in range(0, held - size + 1, size):
                    yield [part(column, start, start + size) for column in columns], lines[start : start + size]
                    line = lines[start + size - 1]
                left = held - held % size
                parts = [([part(column, left, held) for column in columns], lines[left:])]
        yield _joined(parts, width)
        return None


def _joined(parts: Sequence[Piece], width: int) -> Piece:
    columns = [joined([part[k] for part, _ in parts]) for k in range(width)]
    return columns, [line for _, lines in parts for line in lines]


def _blocks(file: BinaryIO, line: int, width: int, separator: str) -> Iterator[Piece | None]:
    """Yield the rows that are left in a file, a block at a time; None, and nothing more, if csv must read them."""
    rest = b""
    while block := file.read(_BLOCK) or (rest and b"\n"):  # the last line may have no end
        buffer = b"".join([rest, block, bytes(PADDING)])
        stop = buffer.rfind(b"\n") + 1
        found = _split(buffer, stop, width, separator) if stop else None
        if found is None:
            yield None
            return
        edges, lines = found
        ends = [(edges[k:-1:width] + 1, edges[k + 1 :: width]) for k in range(width)]
        if b'"' in buffer:
            ends = [_unquoted(buffer, *each) for each in ends]
        yield [cells_in(buffer, *each) for each in ends], (lines + line).tolist()
        line += buffer.count(b"\n", 0, stop)
        rest = buffer[stop:-PADDING]


def _split(buffer: bytes, stop: int, width: int, separator: str) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
    """Return where cells end, after a -1 for the start, and on which line each row stands.

    None if a line has another number of cells, or if its quotes are not simply around cells.
    """
    if buffer.find(b"\0", 0, stop) >= 0:
        return None
    if buffer.find(b"\r", 0, stop) >= 0 and buffer.count(b"\r", 0, stop) != buffer.count(b"\r\n", 0, stop):
        return None
    if not buffer.isascii() and not _is_utf8(buffer[:stop]):
        return None
    view = np.frombuffer(buffer, np.uint8)[:stop]
    ends = view == _NEWLINE
    marks = (view == ord(separator)) | ends
    quoted = buffer.find(b'"', 0, stop) >= 0
    if quoted and not _outside(view, marks, ends):
        return None
    edges = np.append(-1, np.flatnonzero(marks))
    lines = np.arange(1, 1 + np.count_nonzero(ends))
    if width == 1 or len(edges) != 1 + width * len(lines):
        if quoted:  # what is stripped must not stand before a quote
            return None
        edges, lines = _without_empty(view, edges, lines)
    even = len(edges) == 1 + width * len(lines) and bool((view[edges[width::width]] == _NEWLINE).all())
    short = int(np.diff(edges[::width]).max(initial=0)) <= csv.field_size_limit()
    return (edges, lines) if even and short else None


def _outside(view: NDArray[np.uint8], marks: NDArray[np.bool_], ends: NDArray[np.bool_]) -> bool:
    """Unmark separators within quotes; return whether quotes stand around whole cells only, each on one line."""
    quotes = view == _QUOTE
    places = np.flatnonzero(quotes)
    opening, closing = places[::2], places[1::2]
    begins = (opening == 0) | marks[opening - 1]
    ended = marks[closing + 1] | (view[closing + 1] == ord("\r"))
    inside = np.logical_xor.accumulate(quotes)
    if len(opening) > len(closing) or not begins.all() or not ended.all() or bool((inside & ends).any()):
        return False
    marks &= ~inside
    return True


def _unquoted(
    buffer: bytes, starts: NDArray[np.int64], stops: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return where cells are without the quotes around them."""
    view = np.frombuffer(buffer, np.uint8)
    stops = stops - (view[stops - 1] == ord("\r"))
    quoted = view[starts] == _QUOTE
    return starts + quoted, stops - quoted


def _without_empty(
    view: NDArray[np.uint8], edges: NDArray[np.int64], lines: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the same without empty lines; the next cell then begins with newlines, and they are stripped."""
    places = 1 + np.flatnonzero(view[edges[1:]] == _NEWLINE)
    ends = edges[places]
    length = np.diff(ends, prepend=-1)
    empty = (length == 1) | ((length == 2) & (view[ends - 1] == ord("\r")))
    return np.delete(edges, places[empty]), lines[~empty]


def _is_utf8(buffer: bytes) -> bool:
    try:
        buffer.decode()
    except UnicodeDecodeError:
        return False
    return True
