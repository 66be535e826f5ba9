"""Loops over elements, shared among the threads of a block, and the barriers between them.

A thread computes the elements tid, tid + T, ... of a tensor; of a sum, a few neighbouring threads share the terms. What
is one number is computed by all threads, each for itself, so that none waits; if it is a long sum, they share its
terms. A product of matrices is computed in tiles that a thread holds in registers. A barrier stands only where a thread
reads what another one has written. What is no longer read makes room for what comes later.
"""

import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from math import prod

import torch

from pyro_dropout.engines.cuda.layout import laid_out
from pyro_dropout.engines.cuda.tiles import Tile, best_tile, written
from pyro_dropout.engines.cuda.values import (
    Indices,
    Shape,
    Value,
    c_type,
    flat_index,
    indices_of,
    permuted,
    power_of_two,
)

_REDUCTIONS = {  # how two terms are joined, and where the sum starts; "lowest" and "highest" stand for numbers
    "sum": ("({0} + {1})", "0"),
    "prod": ("({0} * {1})", "1"),
    "max": ("larger({0}, {1})", "lowest"),
    "min": ("smaller({0}, {1})", "highest"),
    "any": ("({0} | {1})", "false"),  # not ||, which would leave out what threads do together
    "all": ("({0} & {1})", "true"),
}
_TERMS = 4  # terms of a sum that one thread takes, if there are enough threads
_LONG = 24  # terms of each lane from which all threads share a sum that is one number
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
        fixed: whether it always computes the same.
        shared: whether it is parts of one sum whose terms all threads share.
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
    fixed: bool = False
    shared: bool = False

    @property
    def named(self) -> set[str]:
        """The tensors that it reads, and numbers of the state."""
        return set(re.findall(r"\b\w+(?=\[)|\b\w+_now\b", self.text if self.tile is None else self.tile.text))

    @property
    def in_register(self) -> bool:
        """Whether it is one number, which each thread has for itself."""
        return prod(self.shape) == 1 and self.tile is None

    @property
    def by_element(self) -> bool:
        """Whether each element is computed from others alone, without a sum."""
        return self.over is None and self.tile is None and not self.in_register

    @property
    def sizes(self) -> Shape:
        """Its sides that are not one."""
        return tuple(size for size in self.shape if size != 1)

    @property
    def key(self) -> object:
        """Loops with the same key can be written as one."""
        if self.tile is not None:
            return self.shape, self.tile.rows, self.tile.columns, self.tile.lanes
        return self.shared, self.sizes, None if self.over is None else tuple(n for n in self.over if n != 1)


class Loops:
    """A list of loops, to be put in order and written down.

    Args:
        threads: number of threads, those of all processors together.
        lanes: number of threads that can exchange numbers without a barrier, a power of 2.
        processors: among how many the threads are shared out.
    """

    def __init__(self, threads: int, lanes: int, processors: int = 1) -> None:
        self._threads, self._lanes, self._processors = threads, lanes, processors
        self._loops: dict[str, Loop] = {}
        self._now: Loop | None = None
        self._places: dict[str, tuple[int, torch.dtype]] = {}  # the tensors in memory: sizes and types
        self._lives: dict[str, tuple[int, int]] = {}  # the barriers before each is written, and last read
        self._kept: set[str] = set()  # what is read after all loops
        self._begins: dict[object, int] = {}  # the first thread of loops of one kind since a barrier
        self._in_place: dict[str, str] = {}  # what loops themselves write over another one
        self._read_last: set[str] = set()  # after the last barrier
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
        # Each part is of several terms for each thread, and no part is left without one.
        parts = min(self._threads // self._lanes, prod(over or ()) // (_TERMS * self._lanes))
        if over is not None and prod(shape) == 1 and prod(over) >= _LONG * self._lanes and parts > 1:
            own = tuple("0" for _ in shape)
            terms = Value(over, value.dtype, lambda at: value.at(own + at), value.cost)
            shared = self._added(Loop(f"{name}_parts", (parts,), over, kind, value.dtype, cost=value.cost), terms)
            shared.shared = True
            some = Value((parts,), value.dtype, lambda at: self._read(shared, at))
            loop = self._added(Loop(name, shape, (parts,), kind, value.dtype), some)
        else:
            loop = self._added(Loop(name, shape, over, kind, value.dtype, cost=value.cost), value)
        return Value(shape, value.dtype, lambda at: self._read(loop, at), name=name)

    def _added(self, loop: Loop, value: Value) -> Loop:
        """Add a loop that computes elements, or sums of them."""
        self._now = loop
        own = tuple("0" if size == 1 else f"i{k}" for k, size in enumerate(loop.shape))
        terms = () if loop.over is None else tuple("0" if size == 1 else f"r{k}" for k, size in enumerate(loop.over))
        loop.text = value.at((own + terms)[-len(value.shape) :] if value.shape else ())
        self._now = None
        self._loops[loop.name] = loop
        if not loop.in_register:
            self._places[loop.name] = loop_size(loop.shape), loop.dtype
        return loop

    def product(self, name: str, left: Value, right: Value, shape: Shape, dtype: torch.dtype) -> Value:
        """Let a loop compute a product of matrices, (..., m, k) and (..., k, n), and return it."""
        across, down = -(-shape[-1] // 4), -(-shape[-2] // 4)
        left = self._plain(f"{name}l", left, across)
        turned = (*range(len(right.shape) - 2), -1, -2)  # neighbouring terms next to each other, where memory is far
        far = self._processors > 1
        right = (
            permuted(self._plain(f"{name}r", permuted(right, turned), down), turned)
            if far
            else (self._plain(f"{name}r", right, down))
        )
        loop = self._now = Loop(name, shape, None, "sum", dtype)
        loop.tile = tile = best_tile(left, right, shape, left.shape[-1], self._threads, self._lanes, self._processors)
        tile.write(left.at, right.at)
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
            own = mine.by_element and mine.sizes == loop.sizes and not loop.shared
            own = own and [i for i in at if i != "0"] == [f"i{k}" for k, size in enumerate(mine.shape) if size != 1]
            mine.reads[loop.name] = own and mine.reads.get(loop.name, True)
        return loop.name if loop.in_register else f"{loop.name}[{flat_index(at, loop.shape)}]"

    def once(self, varying: Set[str]) -> list[str]:
        """Return the lines of the loops that need none of these tensors: what they compute is always the same."""
        for loop in self._loops.values():
            loop.fixed = not loop.named & varying and all(self._loops[name].fixed for name in loop.reads)
        lines = self._lines(self._phases({name: loop for name, loop in self._loops.items() if loop.fixed}))
        self._lives = {}  # they keep their places
        return [*lines, "BARRIER;"] if lines else []

    def written(self, kept: Sequence[str] = (), over: Mapping[str, str] | None = None) -> list[str]:
        """Return the lines of all other loops, in an order with few barriers.

        Args:
            kept: what is read after them.
            over: the tensors that some of these are to be written over, by name; where no thread can still read the old
                elements of another one, the loop itself does that.
        """
        self._kept = set(kept)
        phases = self._phases({name: loop for name, loop in self._loops.items() if not loop.fixed})
        self._waits = len(phases) - 1
        self._lives.update((name, (self._lives[name][0], len(phases))) for name in kept if name in self._lives)
        self._in_place = self._overwritten(phases, over or {})
        self._read_last = {name for group in phases[-1] for loop in group for name in loop.named}
        return self._lines(phases)

    def _phases(self, left: dict[str, Loop]) -> list[list[list[Loop]]]:
        """Return loops that are written as one, one group after another, between two barriers each."""
        self._lives, visible = {}, {name for name in self._loops if name not in left}  # to all threads
        phases: list[list[list[Loop]]] = [[]]
        fresh: set[str] = set()  # to the threads that have written them, one element each
        while left:
            group = self._next(left, visible, fresh)
            if group:
                phases[-1].append(group)
                now = len(phases) - 1
                for loop in group:
                    self._lives[loop.name] = now, now
                    self._lives.update(
                        (name, (self._lives[name][0], now)) for name in loop.reads if name in self._lives
                    )
            else:
                phases.append([])
                visible, fresh = {name for name in self._loops if name not in left}, set()
        return phases

    def _lines(self, phases: Sequence[Sequence[Sequence[Loop]]]) -> list[str]:
        lines: list[str] = []
        for k, groups in enumerate(phases):
            self._busy, self._begins = 0, {}
            lines += [line for group in groups for line in self._apart(group)]
            lines += ["BARRIER;"] if k < len(phases) - 1 else []
        return lines

    def _next(self, left: dict[str, Loop], visible: set[str], fresh: set[str]) -> list[Loop]:
        """Take loops away that can be written as one, and need no barrier before; there may be none."""
        ready = [loop for loop in left.values() if self._ready(loop, left, visible, fresh)]
        group = [loop for loop in ready if loop.in_register]
        if ready and not group:
            found: dict[object, list[Loop]] = {}
            for loop in ready:
                found.setdefault(loop.key, []).append(loop)
            group = max(found.values(), key=len)
        if not group:
            return []
        first, more = group[0], group
        here = fresh if first.by_element else set()  # threads share out sums and products in ways of their own
        while more:
            for loop in more:
                del left[loop.name]
                here.add(loop.name)
            # what reads these where they are written
            rest = [] if first.in_register or first.shared else [x for x in left.values() if x.by_element]
            rest = [x for x in rest if x.sizes == first.sizes and (first.by_element or not here.isdisjoint(x.reads))]
            more = [loop for loop in rest if self._ready(loop, left, visible, here)]
            group = [*group, *more]
        return group

    def _overwritten(self, phases: Sequence[Sequence[Sequence[Loop]]], over: Mapping[str, str]) -> dict[str, str]:
        """Return which loops write over another tensor themselves, of those that are to.

        From their phase on no other loop reads that tensor; those that are written as one read their own element of it.
        """
        found: dict[str, str] = {}
        later: set[str] = set()  # read in later phases
        for groups in reversed(phases):
            for group in groups:
                heads = [loop for loop in group if not loop.by_element]
                named = {name for each in groups if each is not group for loop in each for name in loop.named}
                named |= later.union(*(loop.named for loop in heads))
                each = [loop for loop in group if loop.by_element]
                for loop in each:
                    target = over.get(loop.name)
                    if target and not {loop.name, target} & named and all(self._own_element(x, target) for x in each):
                        found[loop.name] = target
            later |= {name for group in groups for loop in group for name in loop.named}
        return found

    @staticmethod
    def _own_element(loop: Loop, name: str) -> bool:
        own = tuple("0" if size == 1 else f"i{k}" for k, size in enumerate(loop.shape))
        places = re.findall(rf"\b{name}\[([^\[\]]*[\[\]]?)", loop.text)
        return all(place == f"{flat_index(own, loop.shape)}]" for place in places)

    def is_over(self, name: str) -> bool:
        """Whether a loop has written its tensor over the one that it replaces, after ``written``."""
        return name in self._in_place

    def reads_at_the_end(self, name: str) -> bool:
        """Whether a loop after the last barrier reads a tensor, after ``written``."""
        return name in self._read_last

    @property
    def waits(self) -> int:
        """How many times all threads wait for each other, after ``written``."""
        return self._waits

    def work(self) -> float:
        """Return about how many microseconds one processor has something to do.

        This was fitted to 18 steps on an H200, with blocks of 512 threads, and is off by 15 % on average.
        """
        each, terms, tiles = 0, 0, 0.0
        for loop in self._loops.values():
            if loop.tile is not None:
                tiles += loop.tile.cycles
            elif loop.over is None:
                each += loop_size(loop.shape) * (loop.cost + 6)
            else:
                terms += loop_size(loop.shape) * loop_size(loop.over) * (loop.cost + 6)
        return 1.05e-3 * tiles + 1.2e-5 * each + 2.3e-5 * terms

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
        if loop.shared:
            return loop.shape[0] * self._lanes
        return loop_size(loop.shape) * (1 if loop.over is None else self._lanes_of(loop))

    def _lanes_of(self, loop: Loop) -> int:
        """Return how many threads share the terms of one sum."""
        count, terms = loop_size(loop.shape), loop_size(loop.over or ())
        few = power_of_two(max(1, self._threads // max(count, 1)))
        return min(self._lanes, power_of_two(max(1, terms // _TERMS)), few)

    def _block(self, loops: Sequence[Loop]) -> list[str]:
        first = loops[0]
        if first.in_register:
            return [line for loop in loops for line in self._number(loop)]
        if first.tile is not None:
            heads = [loop for loop in loops if loop.tile is not None]
            made = written([(loop.tile, c_type(loop.dtype)) for loop in heads if loop.tile is not None])
            return made(lambda values, at: self._followed(loops, heads, values, at))
        if first.shared:
            return self._shared(loops)
        return self._elements(loops) if first.over is None else self._sums(loops)

    def _elements(self, loops: Sequence[Loop]) -> list[str]:
        """Return the lines that compute tensors by elements; what one of them needs of another stays a number."""
        size = loop_size(loops[0].shape)
        short = sum(loop.cost for loop in loops) < _STORED * 2
        ahead = min(_AHEAD * (2 if short else 1), -(-size // self._threads))
        lines = ["UNROLLED(1)", f"for (int base = tid; base < {size}; base += {ahead * self._threads}) {{"]
        ends: list[str] = []
        for k in range(ahead):
            place = "base" if k == 0 else f"(base + {k * self._threads} < {size} ? base + {k * self._threads} : base)"
            found, stores = self._each(loops, {}, f"j{k}", f"q{k}_", {loop.name for loop in loops})
            lines += [f"const int j{k} = {place};", *found]
            ends += stores
        return [*lines, *ends, "}"]

    def _each(
        self, loops: Sequence[Loop], known: Mapping[str, str], at: str, prefix: str, group: set[str]
    ) -> tuple[list[str], list[str]]:
        """Return the lines that compute one element of some tensors, and those that store it.

        Args:
            loops: of the tensors.
            known: what holds this element of others.
            at: the number of the element.
            prefix: begins the names of what holds the new ones.
            group: the names of all loops that are written as one with these.
        """
        elsewhere = {name for other in self._loops.values() if other.name not in group for name in other.reads}
        known, lines, stores = dict(known), list[str](), list[str]()
        for loop in loops:
            text = loop.text
            if loop.name not in known:
                for name in known.keys() & loop.reads:
                    text = re.sub(rf"\b{name}\[[^\[\]]*\]", known[name], text)
                known[loop.name] = f"{prefix}{loop.name}"
                lines.append(f"{c_type(loop.dtype)} {known[loop.name]};")
                lines.append(f"{{ const int i = {at}; {_named('i', loop.shape)} {known[loop.name]} = {text}; }}")
            if loop.name in self._in_place or not (loop.name in elsewhere or loop.name in self._kept):
                self._places.pop(loop.name, None)
            if loop.name in elsewhere or loop.name in self._kept:
                stores.append(f"{self._in_place.get(loop.name, loop.name)}[{at}] = {known[loop.name]};")
        return lines, stores

    def _followed(self, loops: Sequence[Loop], heads: Sequence[Loop], values: Sequence[str], at: str) -> list[str]:
        """Return the lines that take an element of sums or products where they have just been made."""
        known = {loop.name: value for loop, value in zip(heads, values, strict=True)}
        lines, stores = self._each(loops, known, at, "q_", {loop.name for loop in loops})
        return [*lines, *stores]

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
        """Return the lines of parts of sums, one part for each group of lanes."""
        terms, lines = loop_size(loops[0].over or ()), list[str]()
        for k, loop in enumerate(loops):
            lines.append(f"{c_type(loop.dtype)} t{k} = {self._start(loop)};")
        sharing = loops[0].shape[0] * self._lanes
        lines.append(f"if (tid < {sharing}) for (int r = tid; r < {terms}; r += {sharing}) {{")
        for k, loop in enumerate(loops):
            lines.append(f"{{ {_named('r', loop.over or ())} t{k} = {self._joined(loop, f't{k}', loop.text)}; }}")
        lines.append("}")
        for k, loop in enumerate(loops):
            lines += self._across(loop, f"t{k}", self._lanes)
            lines.append(f"if (tid < {sharing} && tid % {self._lanes} == 0) {loop.name}[tid / {self._lanes}] = t{k};")
        return ["{", *lines, "}"]

    def _sums(self, loops: Sequence[Loop]) -> list[str]:
        heads = [loop for loop in loops if loop.over is not None]
        first = heads[0]
        assert first.over is not None
        count, terms = loop_size(first.shape), loop_size(first.over)
        lanes = self._lanes_of(first)
        abreast = self._threads // lanes
        lines = ["UNROLLED(1)", f"for (int base = 0; base < {count}; base += {abreast}) {{"]
        lines += [f"const int i = base + tid / {lanes}, lane = tid % {lanes};", f"const bool in = i < {count};"]
        inner: list[str] = []
        for k, loop in enumerate(heads):
            lines.append(f"{c_type(loop.dtype)} t{k} = {self._start(loop)};")
            inner.append(f"{{ {_named('i', loop.shape)} {_named('r', loop.over or ())}")
            inner.append(f"t{k} = {self._joined(loop, f't{k}', loop.text)}; }}")
        lines += ["if (in) {", "UNROLLED(4)", f"for (int r = lane; r < {terms}; r += {lanes}) {{", *inner, "} }"]
        for k, loop in enumerate(heads):
            lines += self._across(loop, f"t{k}", lanes)
        followed = self._followed(loops, heads, [f"t{k}" for k in range(len(heads))], "e")
        return [*lines, "if (in && lane == 0) { const int e = i;", *followed, "} }"]

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
