"""The cells of a column of texts as one array of bytes, so that a whole column is judged at once.

A cell becomes a text of Python when it is asked for.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import overload

import numpy as np
from numpy.typing import NDArray

from pyro_dropout.tables.cells import MISSING, Cell, cell_of
from pyro_dropout.tables.plain_numbers import Bytes, plain_numbers

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

PADDING = 64  # bytes that must follow the texts of a buffer
_LONGEST = PADDING  # bytes of a cell; columns with longer ones are lists
_SPACE, _DOUBT = (np.zeros(256, np.bool_) for _ in range(2))
_SPACE[[9, 10, 11, 12, 13, 28, 29, 30, 31, 32]] = True  # what str.strip removes
_DOUBT[:] = _SPACE
_DOUBT[128:] = True  # there are wide spaces, too
_GAP = np.zeros(256, np.bool_)  # how a word for a missing value may begin
_GAP[[ord(case) for word in MISSING if word for case in (word[0], word[0].upper())]] = True
_GAP_LENGTH = max(map(len, MISSING))
_CASES = {bytes(case) for word in MISSING for case in product(*zip(word.encode(), word.upper().encode(), strict=True))}
_GAPS = np.sort(np.array(sorted(_CASES), "S8").view("<u8"))
_SOME = 2**12  # cells that usually have all categories of a column
_MASKS = np.array([256**count - 1 for count in range(9)], "<u8")  # that keep the first bytes of eight
_STEPS = 4  # spaces on each side of a cell that are removed from all cells at once
_MIX = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Distinct:
    """The different cells of a column that are not missing, in the order in which they appear.

    Attributes:
        cells: one of each.
        rows: where each appears first.
        counts: how often each appears.
        codes: of each row of the column, the place of its cell among ``cells``; -1 if it is missing.
    """

    cells: Sequence[Cell]
    rows: Ints
    counts: Ints
    codes: Ints

    def spread(self, chosen: Sequence[bool] | Bools) -> Bools:
        """Return for each row whether its cell is one of the chosen; a missing cell is not."""
        return np.append(np.asarray(chosen, np.bool_), False)[self.codes]


class Texts(Sequence[Cell]):
    """A column of texts, None where the value is missing.

    Args:
        array: the texts in UTF-8, each filled up with zeros to a multiple of eight bytes.
        missing: which of them are missing.

    Example:
        >>> texts = texts_of([" oak", "n/a", "elm", "oak"])
        >>> texts, texts.distinct.cells, texts.distinct.codes.tolist()
        (['oak', None, 'elm', 'oak'], ['oak', 'elm'], [0, -1, 1, 0])
    """

    def __init__(self, array: Bytes, missing: Bools) -> None:
        self.array, self.missing = array, missing

    def __len__(self) -> int:
        return len(self.missing)

    @overload
    def __getitem__(self, row: int) -> Cell: ...

    @overload
    def __getitem__(self, row: slice) -> list[Cell]: ...

    def __getitem__(self, row: int | slice) -> Cell | list[Cell]:
        if isinstance(row, slice):
            return list(Texts(self.array[row], self.missing[row]))
        return None if self.missing[row] else bytes(self.array[row]).decode()

    def __iter__(self) -> Iterator[Cell]:
        for text, gap in zip(self.array.tolist(), self.missing.tolist(), strict=True):
            yield None if gap else text.decode()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Texts | list) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))

    def take(self, rows: Ints) -> "Texts":
        """Return the column with only these rows."""
        return _Taken(self, rows)

    def without(self, gone: Bools) -> "Texts":
        """Return the column with more missing cells."""
        return Texts(self.array, self.missing | gone)

    @property
    def known(self) -> Bytes:
        """The texts that are not missing."""
        return self.array[~self.missing] if self.missing.any() else self.array

    @functools.cached_property
    def numbers(self) -> Floats | None:
        """The column's numbers, NaN where missing; None unless all texts are plain numbers that float64 holds."""
        values = plain_numbers(self.known)
        if values is None or len(values) == len(self):
            return values
        numbers = np.full(len(self), np.nan)
        numbers[~self.missing] = values
        return numbers

    @functools.cached_property
    def distinct(self) -> Distinct:
        """The different cells of the column."""
        known = np.flatnonzero(~self.missing)
        array = self.known
        words = array.view("<u8").reshape(len(array), array.itemsize // 8)
        keys = words[:, 0].copy()
        for place in range(1, words.shape[1]):
            keys = (keys ^ (keys >> np.uint64(29))) * _MIX + words[:, place]
        met, places = _places(keys)
        one = np.empty(len(met), np.int64)
        one[places] = np.arange(len(array))  # a row of each
        if words.shape[1] > 1 and not np.array_equal(words, words[one][places]):  # two texts with one key
            _, one, places = np.unique(array, return_index=True, return_inverse=True)
        codes = np.full(len(self), -1)
        codes[known] = places
        return _ordered([bytes(text).decode() for text in array[one].tolist()], codes)


class _Taken(Texts):
    """Some rows of a column. What is known of the column is not computed again."""

    def __init__(self, whole: Texts, rows: Ints) -> None:
        self._whole, self._rows = whole, rows
        self.missing = whole.missing[rows]

    @functools.cached_property
    def array(self) -> Bytes:  # type: ignore[override]
        return self._whole.array[self._rows]

    @functools.cached_property
    def numbers(self) -> Floats | None:
        numbers = self._whole.numbers
        return Texts(self.array, self.missing).numbers if numbers is None else numbers[self._rows]

    @functools.cached_property
    def distinct(self) -> Distinct:
        return _ordered(self._whole.distinct.cells, self._whole.distinct.codes[self._rows])


def _places(keys: NDArray[np.uint64]) -> tuple[NDArray[np.uint64], Ints]:
    """Return the different keys in order, and the place of each key among them."""
    met = np.unique(keys[:_SOME])
    if len(met):
        places = np.searchsorted(met, keys)
        if np.array_equal(met[np.minimum(places, len(met) - 1)], keys):
            return met, places
    return np.unique(keys, return_inverse=True)


def _ordered(cells: Sequence[Cell], codes: Ints) -> Distinct:
    """Return the cells that codes refer to, in the order in which they appear."""
    rows = np.full(len(cells) + 1, len(codes))  # one more for missing cells, whose code is -1
    rows[codes[::-1]] = np.arange(len(codes))[::-1]  # the last that is written stays: the first row
    order = np.argsort(rows[:-1], kind="stable")
    order = order[: np.count_nonzero(rows[:-1] < len(codes))]
    place = np.full(len(cells) + 1, -1)
    place[order] = np.arange(len(order))
    counts = np.bincount(codes + 1, minlength=len(cells) + 1)[1:]
    return Distinct([cells[k] for k in order.tolist()], rows[order], counts[order], place[codes])


# --- making them ------------------------------------------------------------------------------------------------------


def texts_of(texts: Sequence[str]) -> Sequence[Cell]:
    """Return texts as cells, without the spaces around them, and None for those that mean a missing value."""
    try:
        encoded = list(map(str.encode, texts))
    except UnicodeEncodeError:  # some encodings allow half of a pair of UTF-16
        return list(map(cell_of, texts))
    stops = np.cumsum(np.fromiter(map(len, encoded), np.int64, len(encoded)))
    starts = np.concatenate([np.zeros(1, np.int64), stops[:-1]])[: len(stops)]
    return cells_in(b"".join([*encoded, bytes(PADDING)]), starts, stops)


def cells_in(buffer: bytes, starts: Ints, stops: Ints) -> Sequence[Cell]:
    """Return the same of the texts between these places of a buffer in UTF-8, which has ``PADDING`` at its end."""
    view = np.frombuffer(buffer, np.uint8)
    lengths = stops - starts
    first = view[starts]
    edge = np.flatnonzero((_DOUBT[first] | _DOUBT[view[stops - 1]]) & (lengths > 0))
    if len(edge):
        starts, lengths = starts.copy(), lengths.copy()
        starts[edge], lengths[edge] = _stripped(buffer, view, starts[edge], lengths[edge])
        first = view[starts]
    longest = int(lengths.max(initial=1))
    if longest > _LONGEST:
        ends = (starts + lengths).tolist()
        return [cell_of(buffer[start:end].decode()) for start, end in zip(starts.tolist(), ends, strict=True)]
    words = np.empty((len(starts), -(-longest // 8)), "<u8")
    eights = np.ndarray(len(view) - 7, "<u8", buffer, 0, 1)
    for place in range(words.shape[1]):
        words[:, place] = eights[starts + 8 * place] & _MASKS[np.clip(lengths - 8 * place, 0, 8)]
    array: Bytes = words.view(f"S{8 * words.shape[1]}")[:, 0]
    missing = lengths == 0
    maybe = np.flatnonzero(_GAP[first] & (lengths <= _GAP_LENGTH))
    if len(maybe):
        found = words[maybe, 0]
        missing[maybe] |= _GAPS[np.minimum(np.searchsorted(_GAPS, found), len(_GAPS) - 1)] == found
    return Texts(array, missing)


def _stripped(buffer: bytes, view: NDArray[np.uint8], starts: Ints, lengths: Ints) -> tuple[Ints, Ints]:
    """Return where texts start and how long they are without the spaces around them."""
    for _ in range(_STEPS):
        before = _SPACE[view[starts]] & (lengths > 0)
        starts, lengths = starts + before, lengths - before
        lengths = lengths - (_SPACE[view[starts + lengths - 1]] & (lengths > 0))
    doubt = (_DOUBT[view[starts]] | _DOUBT[view[starts + lengths - 1]]) & (lengths > 0)
    for row in np.flatnonzero(doubt).tolist():
        text = buffer[starts[row] : starts[row] + lengths[row]].decode()
        starts[row] += len(text.encode()) - len(text.lstrip().encode())
        lengths[row] = len(text.strip().encode())
    return starts, lengths


def joined(parts: Sequence[Sequence[Cell]]) -> Sequence[Cell]:
    """Return the cells of several columns one after another."""
    texts = [part for part in parts if isinstance(part, Texts)]
    if len(texts) < len(parts) or not parts:
        return [cell for part in parts for cell in part]
    return Texts(np.concatenate([each.array for each in texts]), np.concatenate([each.missing for each in texts]))


def part(cells: Sequence[Cell], start: int, stop: int) -> Sequence[Cell]:
    """Return the cells of some consecutive rows of a column."""
    return Texts(cells.array[start:stop], cells.missing[start:stop]) if isinstance(cells, Texts) else cells[start:stop]


# --- of any column ----------------------------------------------------------------------------------------------------


def missing_in(cells: Sequence[Cell]) -> Bools:
    """Return which cells of a column are missing."""
    return cells.missing if isinstance(cells, Texts) else np.array([cell is None for cell in cells], np.bool_)


def distinct_in(cells: Sequence[Cell]) -> Distinct:
    """Return the different cells of a column; in a list, which may hold 1 and 1.0, each counts as different.

    Example:
        >>> distinct_in(["oak", None, 1, 1.0]).cells
        ['oak', 1, 1.0]
    """
    if isinstance(cells, Texts):
        return cells.distinct
    rows = np.flatnonzero(~missing_in(cells))
    codes = np.full(len(cells), -1)
    codes[rows] = np.arange(len(rows))
    return Distinct([cell for cell in cells if cell is not None], rows, np.ones_like(rows), codes)


def numbers_in(cells: Sequence[Cell]) -> Floats | None:
    """Return the numbers of a column of texts that are all plain numbers, NaN where missing; None for any other."""
    return cells.numbers if isinstance(cells, Texts) else None


def blanked(cells: Sequence[Cell], gone: Bools) -> Sequence[Cell]:
    """Return a column in which more cells are missing."""
    if not gone.any():
        return cells
    if isinstance(cells, Texts):
        return cells.without(gone)
    return [None if lost else cell for cell, lost in zip(cells, gone.tolist(), strict=True)]


def taken(cells: Sequence[Cell], rows: Ints) -> Sequence[Cell]:
    """Return a column with only these rows, an array."""
    return cells.take(rows) if isinstance(cells, Texts) else [cells[row] for row in rows.tolist()]
