"""Loops over elements, shared among the threads of a block, and the barriers between them.

A thread computes the elements tid, tid + T, ... of a tensor; of a sum, a few neighbouring threads share the terms. What
is one number is computed by all threads, each for itself, so that none waits. A barrier stands only where a thread
reads what another one has written.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import torch

from pyro_dropout.references.nuts.kernel.values import Indices, Shape, Value, c_type, flat_index, indices_of

_REDUCTIONS = {  # how two terms are joined, and where the sum starts; "lowest" and "highest" stand for numbers
    "sum": ("({0} + {1})", "0"),
    "prod": ("({0} * {1})", "1"),
    "max": ("larger({0}, {1})", "lowest"),
    "min": ("smaller({0}, {1})", "highest"),
    "any": ("({0} | {1})", "false"),  # not ||, which would leave out what threads do together
    "all": ("({0} & {1})", "true"),
}
_TERMS = 4  # terms of a sum that one thread takes, if there are enough threads


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
        reads: tensors made by other loops, and whether all are read only where this loop writes.
    """

    name: str
    shape: Shape
    over: Shape | None
    kind: str
    dtype: torch.dtype
    text: str = ""
    reads: dict[str, bool] = field(default_factory=dict)

    @property
    def in_register(self) -> bool:
        """Whether it is one number, which each thread has for itself."""
        return prod(self.shape) == 1

    @property
    def key(self) -> object:
        """Loops with the same key can be written as one."""
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
        self.places: dict[str, tuple[int, torch.dtype]] = {}  # the tensors in shared memory: sizes and types

    def stored(self, name: str, value: Value, over: Shape | None = None, kind: str = "") -> Value:
        """Let a loop compute a tensor, and return it as what the loop has written.

        Args:
            name: of the result.
            value: the elements; for a sum, the terms, whose last indices are those of ``over``.
            over: the dimensions that are summed.
            kind: how.
        """
        shape = value.shape if over is None else value.shape[: len(value.shape) - len(over)]
        loop = self._now = Loop(name, shape, over, kind, value.dtype)
        own = tuple("0" if size == 1 else f"i{k}" for k, size in enumerate(shape))
        terms = () if over is None else tuple("0" if size == 1 else f"r{k}" for k, size in enumerate(over))
        loop.text = value.at(own + terms)
        self._now = None
        self._loops[name] = loop
        if not loop.in_register:
            self.places[name] = loop_size(shape), value.dtype
        return Value(shape, value.dtype, lambda at: self._read(loop, at), name=name)

    def has(self, name: str | None) -> bool:
        """Whether a loop computes the tensor of this name."""
        return name in self._loops

    def _read(self, loop: Loop, at: Indices) -> str:
        mine = self._now
        if mine is not None:
            own = mine.over is None and loop.over is None and mine.key == loop.key
            own = own and [i for i in at if i != "0"] == [f"i{k}" for k, size in enumerate(mine.shape) if size != 1]
            mine.reads[loop.name] = own and mine.reads.get(loop.name, True)
        return loop.name if loop.in_register else f"{loop.name}[{flat_index(at, loop.shape)}]"

    def written(self) -> list[str]:
        """Return the lines of all loops, in an order with few barriers."""
        left = dict(self._loops)
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
                lines += self._block(group)
            else:
                lines.append("BARRIER;")
                visible |= fresh
                fresh = set()
        return lines

    def _ready(self, loop: Loop, left: dict[str, Loop], visible: set[str], fresh: set[str]) -> bool:
        for name, own in loop.reads.items():
            if name in left:
                return False
            if name in visible or self._loops[name].in_register:
                continue
            if not (own and name in fresh):
                return False
        return True

    def _block(self, loops: Sequence[Loop]) -> list[str]:
        first = loops[0]
        if first.in_register:
            return [line for loop in loops for line in self._number(loop)]
        if first.over is None:
            body = [f"{{ {_named('i', loop.shape)} {loop.name}[i] = {loop.text}; }}" for loop in loops]
            return [f"for (int i = tid; i < {loop_size(first.shape)}; i += {self._threads}) {{", *body, "}"]
        return self._sums(loops)

    def _number(self, loop: Loop) -> list[str]:
        kind = c_type(loop.dtype)
        if loop.over is None:
            return [f"const {kind} {loop.name} = {loop.text};"]
        lanes, terms = self._lanes, loop_size(loop.over)
        lanes = min(lanes, _power(terms))
        return [
            f"{kind} {loop.name} = {self._start(loop)};",
            f"for (int r = tid % {lanes}; r < {terms}; r += {lanes}) {{",
            _named("r", loop.over),
            f"{loop.name} = {self._joined(loop, loop.name, loop.text)};",
            "}",
            *self._across(loop, loop.name, lanes),
        ]

    def _sums(self, loops: Sequence[Loop]) -> list[str]:
        first = loops[0]
        assert first.over is not None
        count, terms = loop_size(first.shape), loop_size(first.over)
        lanes = min(self._lanes, _power(max(1, terms // _TERMS)))
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


def _power(number: int) -> int:
    """Return the largest power of 2 that is not above a number."""
    return 1 << (max(number, 1).bit_length() - 1)
