"""Products of matrices, in tiles that a thread holds in registers; several threads may share the terms of a tile."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from math import ceil, prod

from pyro_dropout.engines.cuda.values import Indices, Shape, flat_index, indices_of, power_of_two

_LATENCY = 25  # cycles from one term to the next, of a thread that waits for memory
_ALONE = 2.2  # cycles of an instruction, if few others are under way
_ISSUED = 4  # groups of lanes that begin an instruction in one cycle
_TURNED = 16  # terms from which threads begin with different ones, so that they read different banks of memory


@dataclass
class Tile:
    """A product of matrices, (..., m, k) and (..., k, n), whose threads have ``rows`` x ``columns`` elements each.

    The elements of a thread lie far apart, so that neighbouring threads read neighbouring columns.

    Attributes:
        shape: of the product.
        inner: number of terms.
        rows, columns: of a tile.
        lanes: threads that share the terms of one tile.
        threads: of a block.
    """

    shape: Shape
    inner: int
    rows: int
    columns: int
    lanes: int
    threads: int
    kind: str = ""
    _terms: list[str] = field(default_factory=list)

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
        groups = min(self.count * self.lanes, self.threads) / 32 / _ISSUED
        return passes * (terms * max(_LATENCY + _ALONE * work, groups * work) + joined * max(_ALONE, groups))

    def write(self, left: Callable[[Indices], str], right: Callable[[Indices], str], kind: str) -> None:
        """Take note of the expressions of both factors, at indices of a tile."""
        self.kind, batch = kind, tuple("0" if n == 1 else f"tb{k}" for k, n in enumerate(self.shape[:-2]))
        term = "0" if self.inner == 1 else "tk"
        for i in range(self.rows):
            row = "0" if self.shape[-2] == 1 else f"tm{i}"
            self._terms.append(f"const {kind} tx{i} = {left((*batch, row, term))};")
        for j in range(self.columns):
            column = "0" if self.shape[-1] == 1 else f"tn{j}"
            self._terms.append(f"const {kind} ty{j} = {right((*batch, term, column))};")
        self._terms += [f"ta{i}_{j} += tx{i} * ty{j};" for i, j in self._pairs]

    @property
    def _pairs(self) -> list[tuple[int, int]]:
        return list(product(range(self.rows), range(self.columns)))

    def lines(self, name: str) -> list[str]:
        """Return the lines that compute the product."""
        *batch, m, n = self.shape
        row, column = f"te / {self.across} % {self.down}", f"te % {self.across}"
        rows = [f"tm{i} = {self._within(row, i, self.down, m)}" for i in range(self.rows)]
        columns = [f"tn{j} = {self._within(column, j, self.across, n)}" for j in range(self.columns)]
        where = indices_of(f"(te / {self.across * self.down})", tuple(batch))
        outer = [f"tb{k} = {at}" for k, at in enumerate(where) if batch[k] != 1]
        sums = ", ".join(f"ta{i}_{j} = 0" for i, j in self._pairs)
        made = [
            f"for (int base = 0; base < {self.count}; base += {self.threads // self.lanes}) {{",
            f"const int te = base + tid / {self.lanes}, lane = tid % {self.lanes};",
            f"const bool in = te < {self.count};",
            f"const int {', '.join([*rows, *columns, *outer])};",
            f"{self.kind} {sums};",
            "if (in) {",
            *self._loop(),
            "}",
        ]
        away = self.lanes
        while away > 1:
            away //= 2
            made += [f"ta{i}_{j} += NEIGHBOUR(ta{i}_{j}, {away});" for i, j in self._pairs]
        at = tuple("0" if size == 1 else f"tb{k}" for k, size in enumerate(batch))
        for i, j in self._pairs:
            inside = [f"{row} + {i * self.down} < {m}"] if i else []
            inside += [f"{column} + {j * self.across} < {n}"] if j else []
            place = flat_index((*at, f"tm{i}", f"tn{j}"), self.shape)
            made.append(f"if ({' && '.join(['in', 'lane == 0', *inside])}) {name}[{place}] = ta{i}_{j};")
        return ["{", *made, "} }"]

    @staticmethod
    def _within(first: str, number: int, apart: int, size: int) -> str:
        """Return the index of an element of a tile, or the last one where the tile goes beyond the matrix."""
        if number == 0:
            return first
        return f"({first} + {number * apart} < {size} ? {first} + {number * apart} : {size - 1})"

    def _loop(self) -> list[str]:
        if self.lanes > 1 or self.inner < _TURNED:
            return [f"for (int tk = lane; tk < {self.inner}; tk += {self.lanes}) {{", *self._terms, "}"]
        turn = f"tk = tk + 1 == {self.inner} ? 0 : tk + 1"
        return [f"for (int t = 0, tk = te % {self.inner}; t < {self.inner}; ++t, {turn}) {{", *self._terms, "}"]


def best_tile(shape: Shape, inner: int, threads: int, lanes: int) -> Tile:
    """Return the tile of a product that is likely to be fastest."""
    most = min(lanes, power_of_two(max(1, inner // 4)))
    shared = [1 << k for k in range(most.bit_length())]
    sizes = [(rows, columns) for rows in (1, 2, 4) for columns in (1, 2, 4)]
    fitting = [(r, c) for r, c in sizes if r <= max(shape[-2], 1) and c <= max(shape[-1], 1)]
    made = [Tile(shape, inner, r, c, g, threads) for (r, c), g in product(fitting, shared)]
    return min(made, key=lambda tile: tile.cycles)
