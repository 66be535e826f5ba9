"""Loops over elements, shared among the threads of a block, and the barriers between them.

A thread computes the elements tid, tid + T, ... of a tensor; of a sum, a few neighbouring threads share the terms. What
is one number is computed by all threads, each for itself, so that none waits; if it is a long sum, they share its
terms. A product of matrices is computed in tiles that a thread holds in registers. A barrier stands only where a thread
reads what another one has written. What is no longer read makes room for what comes later.
"""

import re
from collections.abc import Mapping, Sequence, Set
from math import prod

import torch

from pyro_dropout.engines.cuda.loop_text import STORED, TERMS, Loop, LoopText, loop_size
from pyro_dropout.engines.cuda.tiles import best_tile
from pyro_dropout.engines.cuda.values import WORD, Indices, Shape, Value, c_type, flat_index, permuted

_LONG = 24  # terms of each lane from which all threads share a sum that is one number


class Loops(LoopText):
    """A list of loops, to be put in order and written down."""

    def __init__(self, threads: int, lanes: int, processors: int = 1) -> None:
        super().__init__(threads, lanes)
        self._processors = processors
        self._now: Loop | None = None
        self._lives: dict[str, tuple[int, int]] = {}  # the barriers before each is written, and last read
        self._read_last: set[str] = set()  # after the last barrier
        self._waits = 0  # barriers

    def stored(self, name: str, value: Value, over: Shape | None = None, kind: str = "") -> Value:
        """Let a loop compute a tensor, and return it as what the loop has written."""
        shape = value.shape if over is None else value.shape[: len(value.shape) - len(over)]
        # Each part is of several terms for each thread, and no part is left without one.
        parts = min(self._threads // self._lanes, prod(over or ()) // (TERMS * self._lanes))
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
        return self.stored(name, value) if value.cost * (times - 1) > STORED and value.size > 1 else value

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
        """Return the lines of all other loops, in an order with few barriers."""
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


def laid_out(
    places: Mapping[str, tuple[int, torch.dtype]],
    lives: Mapping[str, tuple[int, int]],
    start: int,
    most: int | None = None,
) -> tuple[list[str], int, int]:
    """Return the lines that say where tensors lie, the words of ``memory`` with ``start``, and those of ``far``."""
    ends, taken = {"memory": start, "far": 0}, list[tuple[str, int, int, int, int]]()
    lines = []
    for name, (size, dtype) in sorted(places.items(), key=lambda each: lives.get(each[0], (-1, 0))):
        words = -(-size * dtype.itemsize // WORD)
        first, last = lives.get(name, (-1, 10**9))
        for space in ("memory", "far"):
            beside = [(a, b) for s, a, b, begin, end in taken if s == space and first <= end and begin <= last]
            place = _gap(beside, start if space == "memory" else 0, words)
            if space == "far" or most is None or place + words <= most:
                break
        taken.append((space, place, place + words, first, last))
        ends[space] = max(ends[space], place + words)
        lines.append(f"{c_type(dtype)}* {name} = ({c_type(dtype)}*)({space} + {place});")
    return lines, ends["memory"], ends["far"]


def _gap(taken: Sequence[tuple[int, int]], start: int, words: int) -> int:
    """Return the first place from ``start`` where so many words are free."""
    place = start
    for begin, end in sorted(taken):
        if place + words <= begin:
            break
        place = max(place, end)
    return place
