"""Loops over elements, shared among the threads of a block, and the barriers between them.

A thread computes the elements tid, tid + T, ... of a tensor; of a sum, a few neighbouring threads share the terms. What
is one number is computed by all threads, each for itself, so that none waits; if it is a long sum, they share its
terms. A product of matrices is computed in tiles that a thread holds in registers. A barrier stands only where a thread
reads what another one has written. What is no longer read makes room for what comes later.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import torch

from pyro_dropout.engines.cuda.layout import laid_out
from pyro_dropout.engines.cuda.tiles import Tile, best_tile
from pyro_dropout.engines.cuda.values import Indices, Shape, Value, c_type, flat_index, indices_of, power_of_two

_REDUCTIONS = {  # how two terms are joined, and where the sum starts; "lowest" and "highest" stand for numbers
    "sum": ("({0} + {1})", "0"),
    "prod": ("({0} * {1})", "1"),
    "max": ("larger({0}, {1})", "lowest"),
    "min": ("smaller({0}, {1})", "highest"),
    "any": ("({0} | {1})", "false"),  # not ||, which would leave out what threads do together
    "all": ("({0} & {1})", "true"),
}
_TERMS = 4  # terms of a sum that one thread takes, if there are enough threads
_LONG = 256  # terms from which all threads share a sum that is one number
_AHEAD = 4  # elements that a thread computes before it stores them, so that it waits for memory once
_STORED = 6  # about how many operations it takes to store an element, wait, and read it again


@dataclass(eq=False)
class Loop:
    """What computes one tensor.

    Attributes:
        name: of the tensor.
        shape: the shape of the loop over elements; empty for one number.
        over: the shape of the loop over terms; None if there is none.
        kind: how terms are joined.
        dtype: the type of the tensor.
        text: the expression of an element or a term.
        tile: how a product of matrices is computed; None if it is none.
        cost: about how many operations an element or a term takes.
        reads: tensors made by other loops, and whether all are read only where this loop writes.
    """

    name: str
    shape: Shape
    over: Shape | None
    kind: str
    dtype: torch.dtype
    text: str = ""
    tile: Tile | None = None
    cost: int = 0
    reads: dict[str, bool] = field(default_factory=dict)

    @property
    def in_register(self) -> bool:
        """Whether it is one number, which each thread has for itself."""
        return prod(self.shape) == 1 and self.tile is None

    @property
    def shared(self) -> bool:
        """Whether it is one number whose terms all threads share."""
        return self.in_register and self.over is not None and prod(self.over) >= _LONG

    @property
    def key(self) -> object:
        """Loops with the same key can be written as one."""
        if self.tile is not None:
            return self.name
        sizes = tuple(size for size in self.shape if size != 1)
        return sizes, None if self.over is None else tuple(size for size in self.over if size != 1)


class Loops:
    """A list of loops, to be put in order and written down.

    Args:
        threads: number of threads of a block.
        lanes: number of threads that can exchange numbers without a barrier, a power of 2.
    """

    def __init__(self, threads: int, lanes: int) -> None:
        self._threads, self._lanes = threads, lanes
        self._loops: dict[str, Loop] = {}
        self._now: Loop | None = None
        self._places: dict[str, tuple[int, torch.dtype]] = {}  # the tensors in memory: sizes and types
        self._lives: dict[str, tuple[int, int]] = {}  # the barriers before each is written, and last read
        self._kept: set[str] = set()  # what is read after all loops
        self._begins: dict[object, int] = {}  # the first thread of loops of one kind since a barrier
        self._waits = 0  # barriers
        self._busy = 0  # threads that have had something to do since then

    def stored(self, name: str, value: Value, over: Shape | None = None, kind: str = "") -> Value:
        """Let a loop compute a tensor, and return it as what the loop has written.

        Args:
            name: of the result.
            value: the elements; for a sum, the terms, whose last indices are those of ``over``.
            over: the dimensions that are summed.
            kind: how.
        """
        shape = value.shape if over is None else value.shape[: len(value.shape) - len(over)]
        loop = self._now = Loop(name, shape, over, kind, value.dtype, cost=value.cost)
        own = tuple("0" if size == 1 else f"i{k}" for k, size in enumerate(shape))
        terms = () if over is None else tuple("0" if size == 1 else f"r{k}" for k, size in enumerate(over))
        loop.text = value.at(own + terms)
        self._now = None
        self._loops[name] = loop
        if not loop.in_register:
            self._places[name] = loop_size(shape), value.dtype
        elif loop.shared:
            self._places[_parts(name)] = self._threads // self._lanes, value.dtype
        return Value(shape, value.dtype, lambda at: self._read(loop, at), name=name)

    def product(self, name: str, left: Value, right: Value, shape: Shape, dtype: torch.dtype) -> Value:
        """Let a loop compute a product of matrices, (..., m, k) and (..., k, n), and return it."""
        across, down = -(-shape[-1] // 4), -(-shape[-2] // 4)
        left = self._plain(f"{name}l", left, across)
        right = self._plain(f"{name}r", right, down)
        loop = self._now = Loop(name, shape, None, "sum", dtype)
        loop.tile = tile = best_tile(shape, left.shape[-1], self._threads, self._lanes)
        tile.write(left.at, right.at, c_type(dtype))
        self._now = None
        self._loops[name] = loop
        self._places[name] = loop_size(shape), dtype
        return Value(shape, dtype, lambda at: self._read(loop, at), name=name)

    def _plain(self, name: str, value: Value, times: int) -> Value:
        """Return a value that is read ``times`` times; it is stored if that is quicker than to compute it anew."""
        return self.stored(name, value) if value.cost * (times - 1) > _STORED and value.size > 1 else value

    def has(self, name: str | None) -> bool:
        """Whether a loop computes the tensor of this name."""
        return name in self._loops

    def _read(self, loop: Loop, at: Indices) -> str:
        mine = self._now
        if mine is not None:
            own = mine.over is None and loop.over is None and mine.key == loop.key and mine.tile is None
            own = own and [i for i in at if i != "0"] == [f"i{k}" for k, size in enumerate(mine.shape) if size != 1]
            mine.reads[loop.name] = own and mine.reads.get(loop.name, True)
        return loop.name if loop.in_register else f"{loop.name}[{flat_index(at, loop.shape)}]"

    def written(self, kept: Sequence[str] = ()) -> list[str]:
        """Return the lines of all loops, in an order with few barriers; what is ``kept`` is read after them."""
        left = dict(self._loops)
        now, self._lives, self._kept = 0, {}, set(kept)
        self._busy, self._begins = 0, {}
        lines: list[str] = []
        visible: set[str] = set()  # to all threads
        fresh: set[str] = set()  # to the threads that wrote them
        while left:
            moved = False
            ready = [loop for loop in left.values() if self._ready(loop, left, visible, fresh)]
            numbers = [loop for loop in ready if loop.in_register]
            if numbers:
                group = numbers
            else:
                groups: dict[object, list[Loop]] = {}
                for loop in ready:
                    groups.setdefault(loop.key, []).append(loop)
                group = max(groups.values(), key=len) if groups else []
            for loop in group:
                del left[loop.name]
                moved = True
                fresh.add(loop.name)
            if group and not group[0].in_register:  # others that read these where they are written
                more = True
                while more and group[0].over is None:
                    key = group[0].key
                    found = [x for x in left.values() if x.key == key and self._ready(x, left, visible, fresh)]
                    more = bool(found)
                    for loop in found:
                        del left[loop.name]
                        fresh.add(loop.name)
                    group = [*group, *found]
            if moved:
                lines += self._apart(group)
                for loop in group:
                    self._lives[loop.name] = now, now
                    self._lives.update((name, (self._lives[name][0], now)) for name in loop.reads)
            else:
                lines.append("BARRIER;")
                now, self._busy, self._begins = now + 1, 0, {}
                visible |= fresh
                fresh = set()
        self._lives.update((name, (self._lives[name][0], now + 1)) for name in kept)
        self._waits = now
        return lines

    def microseconds(self) -> tuple[float, float]:
        """Return about how long all loops take, after ``written``, and how long kernels of torch's compiler would.

        Both were fitted to 18 steps on an H200, with blocks of 512 threads: the first is off by 15 % on average. The
        compiler's kernels take one launch or two for each time that all threads wait here, whatever their size.
        """
        each, terms, tiles = 0, 0, 0.0
        for loop in self._loops.values():
            if loop.tile is not None:
                tiles += loop.tile.cycles
            elif loop.over is None:
                each += loop_size(loop.shape) * (loop.cost + 6)
            else:
                terms += loop_size(loop.shape) * loop_size(loop.over) * (loop.cost + 6)
        mine = 1.05e-3 * tiles + 1.2e-5 * each + 2.3e-5 * terms + 0.6 * self._waits
        return mine, 4.5 * self._waits

    def memory(self, start: int, most: int | None = None) -> tuple[list[str], int, int]:
        """Return where tensors lie, after ``written``, as ``laid_out`` does."""
        return laid_out(self._places, self._lives, start, most)

    def _ready(self, loop: Loop, left: dict[str, Loop], visible: set[str], fresh: set[str]) -> bool:
        for name, own in loop.reads.items():
            if name in left:
                return False
            if name in visible or self._loops[name].in_register:
                continue
            if not (own and name in fresh):
                return False
        return True

    def _apart(self, loops: Sequence[Loop]) -> list[str]:
        """Return the lines of some loops, which begin with threads that have had less to do since the last barrier."""
        first, lines = loops[0], self._block(loops)
        if first.in_register:
            return lines
        begin = self._begins.setdefault(
            first.key, self._busy % self._threads
        )  # loops of one kind have the same threads
        self._busy += -(-self._needed(first) // self._lanes) * self._lanes
        turned = f"(thread + {self._threads - begin}) % {self._threads}"
        return ["{ const int thread = tid; {", f"const int tid = {turned};", *lines, "} }"] if begin else lines

    def _needed(self, loop: Loop) -> int:
        """Return how many threads have something to do in a loop."""
        if loop.tile is not None:
            return loop.tile.count * loop.tile.lanes
        return loop_size(loop.shape) * (1 if loop.over is None else self._lanes_of(loop))

    def _lanes_of(self, loop: Loop) -> int:
        """Return how many threads share the terms of one sum."""
        count, terms = loop_size(loop.shape), loop_size(loop.over or ())
        few = power_of_two(max(1, self._threads // max(count, 1)))
        return min(self._lanes, power_of_two(max(1, terms // _TERMS)), few)

    def _block(self, loops: Sequence[Loop]) -> list[str]:
        first = loops[0]
        if first.tile is not None:
            return first.tile.lines(first.name)
        if first.in_register:
            shared = [loop for loop in loops if loop.shared]
            own = [line for loop in loops if not loop.shared for line in self._number(loop)]
            return [*own, *(self._shared(shared) if shared else [])]
        if first.over is None:
            return self._elements(loops)
        return self._sums(loops)

    def _elements(self, loops: Sequence[Loop]) -> list[str]:
        """Return the lines that compute tensors by elements; what one of them needs of another stays a number."""
        size, names = loop_size(loops[0].shape), {loop.name for loop in loops}
        ahead = min(_AHEAD, -(-size // self._threads))
        elsewhere = {name for other in self._loops.values() if other.name not in names for name in other.reads}
        lines, ends = [f"for (int base = tid; base < {size}; base += {ahead * self._threads}) {{"], []
        for k in range(ahead):
            place = "base" if k == 0 else f"(base + {k * self._threads} < {size} ? base + {k * self._threads} : base)"
            lines += [f"const int j{k} = {place};"]
            for loop in loops:
                text = loop.text
                for name in names & set(loop.reads):
                    text = re.sub(rf"\b{name}\[[^\[\]]*\]", f"q{k}_{name}", text)
                lines.append(f"{c_type(loop.dtype)} q{k}_{loop.name};")
                lines.append(f"{{ const int i = j{k}; {_named('i', loop.shape)} q{k}_{loop.name} = {text}; }}")
                if loop.name in elsewhere or loop.name in self._kept:
                    ends.append(f"{loop.name}[j{k}] = q{k}_{loop.name};")
                else:
                    self._places.pop(loop.name, None)
        return [*lines, *ends, "}"]

    def _number(self, loop: Loop) -> list[str]:
        kind = c_type(loop.dtype)
        if loop.over is None:
            return [f"const {kind} {loop.name} = {loop.text};"]
        lanes, terms = self._lanes, loop_size(loop.over)
        lanes = min(lanes, power_of_two(terms))
        return [
            f"{kind} {loop.name} = {self._start(loop)};",
            f"for (int r = tid % {lanes}; r < {terms}; r += {lanes}) {{",
            _named("r", loop.over),
            f"{loop.name} = {self._joined(loop, loop.name, loop.text)};",
            "}",
            *self._across(loop, loop.name, lanes),
        ]

    def _shared(self, loops: Sequence[Loop]) -> list[str]:
        """Return the lines of sums whose terms all threads share."""
        lines, ends = [], []
        for loop in loops:
            kind, name, parts = c_type(loop.dtype), loop.name, _parts(loop.name)
            terms = loop_size(loop.over or ())
            lines += [
                f"{kind} {name} = {self._start(loop)};",
                f"for (int r = tid; r < {terms}; r += {self._threads}) {{ {_named('r', loop.over or ())}",
                f"{name} = {self._joined(loop, name, loop.text)}; }}",
                *self._across(loop, name, self._lanes),
                f"if (tid % {self._lanes} == 0) {parts}[tid / {self._lanes}] = {name};",
            ]
            ends += [
                f"{name} = {self._start(loop)};",
                f"for (int r = 0; r < {self._threads // self._lanes}; ++r)",
                f"{name} = {self._joined(loop, name, f'{parts}[r]')};",
            ]
        return [*lines, "BARRIER;", *ends]

    def _sums(self, loops: Sequence[Loop]) -> list[str]:
        first = loops[0]
        assert first.over is not None
        count, terms = loop_size(first.shape), loop_size(first.over)
        lanes = self._lanes_of(first)
        abreast = self._threads // lanes
        lines = [f"for (int base = 0; base < {count}; base += {abreast}) {{"]
        lines += [f"const int i = base + tid / {lanes}, lane = tid % {lanes};", f"const bool in = i < {count};"]
        inner: list[str] = []
        for k, loop in enumerate(loops):
            lines.append(f"{c_type(loop.dtype)} t{k} = {self._start(loop)};")
            inner.append(f"{{ {_named('i', loop.shape)} {_named('r', loop.over or ())}")
            inner.append(f"t{k} = {self._joined(loop, f't{k}', loop.text)}; }}")
        lines += [f"if (in) for (int r = lane; r < {terms}; r += {lanes}) {{", *inner, "}"]
        for k, loop in enumerate(loops):
            lines += self._across(loop, f"t{k}", lanes)
            lines.append(f"if (in && lane == 0) {loop.name}[i] = t{k};")
        return [*lines, "}"]

    def _across(self, loop: Loop, name: str, lanes: int) -> list[str]:
        """Return the lines that join what neighbouring threads have."""
        lines = []
        while lanes > 1:
            lanes //= 2
            lines.append(f"{name} = {self._joined(loop, name, f'NEIGHBOUR({name}, {lanes})')};")
        return lines

    def _joined(self, loop: Loop, left: str, right: str) -> str:
        text = _REDUCTIONS[loop.kind][0].format(left, f"({c_type(loop.dtype)})({right})")
        return f"({c_type(loop.dtype)}){text}"

    def _start(self, loop: Loop) -> str:
        start = _REDUCTIONS[loop.kind][1]
        if start in ("lowest", "highest"):
            sign = "-" if start == "lowest" else ""
            floating = loop.dtype.is_floating_point
            return f"{sign}INF" if floating else f"{sign}9223372036854775807LL"
        return start


def loop_size(shape: Shape) -> int:
    """Return the number of elements of a shape."""
    return prod(shape)


def _named(prefix: str, shape: Shape) -> str:
    """Return the line that names the indices of an element, whose number is named ``prefix``."""
    pairs = zip(indices_of(prefix, shape), shape, strict=True)
    return " ".join(f"const int {prefix}{k} = {i};" for k, (i, size) in enumerate(pairs) if size != 1)


def _parts(name: str) -> str:
    """Return the name of the parts of a sum that all threads share."""
    return f"{name}_parts"
