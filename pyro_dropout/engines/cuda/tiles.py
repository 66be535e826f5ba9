"""Products of matrices, in tiles that a thread holds in registers; several threads may share the terms of a tile."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import ceil, prod

from pyro_dropout.engines.generated.values import Indices, Shape, Value, flat_index, indices_of, power_of_two

_LATENCY = 25  # cycles from one term to the next, of a thread that waits for memory
_FARTHER = 125  # the same, where several processors share the GPU's memory
_ALONE = 2.2  # cycles of an instruction, if few others are under way
_ISSUED = 4  # groups of lanes that begin an instruction in one cycle


@dataclass
class Tile:
    """A product of matrices, (..., m, k) and (..., k, n), whose threads have ``rows`` x ``columns`` elements each.

    The elements of a thread lie far apart, so that neighbouring threads read neighbouring columns.

    Attributes:
        shape: of the product.
        inner: number of terms.
        rows, columns: of a tile.
        lanes: threads that share the terms of one tile.
        threads: of all processors.
        processors: among how many the threads are shared out.
        close: whether neighbouring terms of the left and of the right factor are neighbours in memory.
    """

    shape: Shape
    inner: int
    rows: int
    columns: int
    lanes: int
    threads: int
    processors: int = 1
    close: tuple[bool, bool] = (True, True)
    left: list[str] = field(default_factory=list)
    right: list[str] = field(default_factory=list)

    @property
    def down(self) -> int:
        """Number of tiles one below the other."""
        return ceil(self.shape[-2] / self.rows)

    @property
    def across(self) -> int:
        """Number of tiles side by side."""
        return ceil(self.shape[-1] / self.columns)

    @property
    def count(self) -> int:
        """Number of tiles."""
        return prod(self.shape[:-2]) * self.down * self.across

    @property
    def cycles(self) -> float:
        """About how long it takes."""
        work = self.rows * self.columns + 2 * (self.rows + self.columns) + 3
        terms, passes = ceil(self.inner / self.lanes), ceil(self.count * self.lanes / self.threads)
        joined = 3 * self.rows * self.columns * (self.lanes.bit_length() - 1) + 8 * self.rows * self.columns + 40
        groups = min(self.count * self.lanes, self.threads) / 32 / _ISSUED / self.processors
        if self.processors == 1:
            each = max(_LATENCY + _ALONE * work, groups * work)
        else:
            each = max(_FARTHER + _ALONE * work, groups * work, max(1.0, groups * _ISSUED) * self._lines)
        return passes * (terms * each + joined * max(_ALONE, groups))

    @property
    def _lines(self) -> int:
        """How many lines of far memory a group of lanes reads for each term: neighbours mostly share a row."""
        left = 1 if self.close[0] else self.lanes
        right = max(1, 32 // self.lanes) if self.close[1] else self.lanes
        return self.rows * left + self.columns * right

    def write(self, left: Callable[[Indices], str], right: Callable[[Indices], str]) -> None:
        """Take note of the expressions of both factors, at indices of a tile."""
        batch = tuple("0" if n == 1 else f"tb{k}" for k, n in enumerate(self.shape[:-2]))
        term = "0" if self.inner == 1 else "tk"
        self.left = [left((*batch, "0" if self.shape[-2] == 1 else f"tm{i}", term)) for i in range(self.rows)]
        self.right = [right((*batch, term, "0" if self.shape[-1] == 1 else f"tn{j}")) for j in range(self.columns)]

    @property
    def text(self) -> str:
        """The expressions of both factors."""
        return " ".join([*self.left, *self.right])

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """The elements of a tile."""
        return list(product(range(self.rows), range(self.columns)))

    def loop(self, name: str, kind: str) -> list[str]:
        """Return the lines that add up the terms of a tile, in numbers whose names begin with ``name``."""
        terms = [f"const {kind} tx{i} = {text};" for i, text in enumerate(self.left)]
        terms += [f"const {kind} ty{j} = {text};" for j, text in enumerate(self.right)]
        terms += [f"{name}_{i}_{j} += tx{i} * ty{j};" for i, j in self.pairs]
        return ["UNROLLED(4)", f"for (int tk = lane; tk < {self.inner}; tk += {self.lanes}) {{", *terms, "}"]

    @staticmethod
    def _within(first: str, number: int, apart: int, size: int) -> str:
        """Return the index of an element of a tile, or the last one where the tile goes beyond the matrix."""
        if number == 0:
            return first
        return f"({first} + {number * apart} < {size} ? {first} + {number * apart} : {size - 1})"

    def indices(self) -> list[str]:
        """Return the lines that name the indices of a tile's elements, from its number."""
        *batch, m, n = self.shape
        row, column = f"te / {self.across} % {self.down}", f"te % {self.across}"
        rows = [f"tm{i} = {self._within(row, i, self.down, m)}" for i in range(self.rows)]
        columns = [f"tn{j} = {self._within(column, j, self.across, n)}" for j in range(self.columns)]
        where = indices_of(f"(te / {self.across * self.down})", tuple(batch))
        outer = [f"tb{k} = {at}" for k, at in enumerate(where) if batch[k] != 1]
        return [f"const int {', '.join([*rows, *columns, *outer])};"]


def written(tiles: Sequence[tuple[Tile, str]]) -> Callable[[Callable[[list[str], str], list[str]]], list[str]]:
    """Return what writes products of one form down, each with its type in C.

    It is given a function of the names of an element of each, and of that element's number, which returns the lines
    that take it; the threads that share a tile take its elements in turn.
    """
    first = tiles[0][0]
    lanes, pairs, (*batch, m, n) = first.lanes, first.pairs, first.shape
    lines = [
        "UNROLLED(1)",
        f"for (int base = 0; base < {first.count}; base += {first.threads // lanes}) {{",
        f"const int te = base + tid / {lanes}, lane = tid % {lanes};",
        f"const bool in = te < {first.count};",
        *first.indices(),
    ]
    for k, (tile, kind) in enumerate(tiles):
        lines += [
            f"{kind} {', '.join(f'ta{k}_{i}_{j} = 0' for i, j in pairs)};",
            "if (in) {",
            *tile.loop(f"ta{k}", kind),
            "}",
        ]
        away = lanes
        while away > 1:
            away //= 2
            lines += [f"ta{k}_{i}_{j} += NEIGHBOUR(ta{k}_{i}_{j}, {away});" for i, j in pairs]
    at = tuple("0" if size == 1 else f"tb{k}" for k, size in enumerate(batch))

    def made(take: Callable[[list[str], str], list[str]]) -> list[str]:
        ends = []
        for begin in range(0, len(pairs), lanes):
            mine = pairs[begin : begin + lanes]
            ends += ["{", f"const int pair = {begin}{' + lane' if lanes > 1 else ''};"]
            for k, (_, kind) in enumerate(tiles):
                value = f"ta{k}_{mine[-1][0]}_{mine[-1][1]}"
                for i, j in reversed(mine[:-1]):
                    value = f"pair == {i * first.columns + j} ? ta{k}_{i}_{j} : {value}"
                ends.append(f"const {kind} tv{k} = {value};")
            ends.append(f"const int em = te / {first.across} % {first.down} + pair / {first.columns} * {first.down};")
            ends.append(f"const int en = te % {first.across} + pair % {first.columns} * {first.across};")
            ends.append(f"if (in && pair < {len(pairs)} && em < {m} && en < {n}) {{")
            ends.append(f"const int e = {flat_index((*at, 'em', 'en'), (*batch, m, n))};")
            ends += [*take([f"tv{k}" for k in range(len(tiles))], "e"), "} }"]
        return ["{", *lines, *ends, "} }"]

    return made


def best_tile(
    left: Value, right: Value, shape: Shape, inner: int, threads: int, lanes: int, processors: int = 1
) -> Tile:
    """Return the tile of a product that is likely to be fastest."""
    most = min(lanes, power_of_two(max(1, inner // 4)))
    shared = [1 << k for k in range(most.bit_length())]
    sizes = [(rows, columns) for rows in (1, 2, 4) for columns in (1, 2, 4)]
    fitting = [(r, c) for r, c in sizes if r <= max(shape[-2], 1) and c <= max(shape[-1], 1)]
    batch = ("0",) * (len(shape) - 2)
    close = is_close(left.at((*batch, "0", "tk"))), is_close(right.at((*batch, "tk", "0")))
    made = [Tile(shape, inner, r, c, g, threads, processors, close) for (r, c), g in product(fitting, shared)]
    return min(made, key=lambda tile: tile.cycles)


def is_close(text: str) -> bool:
    """Whether neighbouring terms of an expression lie next to each other: those of all tensors that it reads."""
    places = [place for place in re.findall(r"\[([^\[\]]*)\]", text) if "tk" in place]
    return all(f" + {place}".endswith(" + tk") and place.count("tk") == 1 for place in places)
