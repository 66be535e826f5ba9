"""Loops as lines of C: a thread computes the elements tid, tid + T, ... of a tensor.

Of a sum, a few neighbouring threads share the terms, and of a product the tiles. What follows a sum or a product
element by element is computed where it has just been made.
"""

from collections.abc import Mapping, Sequence
from math import prod

from pyro_dropout.engines.cuda.tiles import written
from pyro_dropout.engines.generated.loops import Loop, Loops
from pyro_dropout.engines.generated.values import Shape, c_type, indices_of, power_of_two

_REDUCTIONS = {  # how two terms are joined, and where the sum starts; "lowest" and "highest" stand for numbers
    "sum": ("({0} + {1})", "0"),
    "prod": ("({0} * {1})", "1"),
    "max": ("larger({0}, {1})", "lowest"),
    "min": ("smaller({0}, {1})", "highest"),
    "any": ("({0} | {1})", "false"),  # not ||, which would leave out what threads do together
    "all": ("({0} & {1})", "true"),
}
TERMS = 4  # terms of a sum that one thread takes, if there are enough threads
_AHEAD = 4  # elements that a thread computes before it stores them, so that it waits for memory once
STORED = 6  # about how many operations it takes to store an element, wait, and read it again


class LoopText(Loops):
    """Writes loops down."""

    def __init__(self, threads: int, lanes: int) -> None:
        super().__init__()
        self._threads, self._lanes = threads, lanes
        self._begins: dict[object, int] = {}  # the first thread of loops of one kind since a barrier
        self._busy = 0  # threads that have had something to do since then

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
            return int(loop.tile.count * loop.tile.lanes)
        if loop.shared:
            return loop.shape[0] * self._lanes
        return prod(loop.shape) * (1 if loop.over is None else self._lanes_of(loop))

    def _lanes_of(self, loop: Loop) -> int:
        """Return how many threads share the terms of one sum."""
        count, terms = prod(loop.shape), prod(loop.over or ())
        few = power_of_two(max(1, self._threads // max(count, 1)))
        return min(self._lanes, power_of_two(max(1, terms // TERMS)), few)

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
        size = prod(loops[0].shape)
        short = sum(loop.cost for loop in loops) < STORED * 2
        ahead = min(_AHEAD * (2 if short else 1), -(-size // self._threads))
        lines = ["UNROLLED(1)", f"for (int base = tid; base < {size}; base += {ahead * self._threads}) {{"]
        ends: list[str] = []
        for k in range(ahead):
            place = "base" if k == 0 else f"(base + {k * self._threads} < {size} ? base + {k * self._threads} : base)"
            found, stores = self._each(loops, {}, f"j{k}", f"q{k}_")
            lines += [f"const int j{k} = {place};", *found]
            ends += stores
        return [*lines, *ends, "}"]

    def _each(
        self, loops: Sequence[Loop], made: Mapping[str, str], at: str, prefix: str
    ) -> tuple[list[str], list[str]]:
        """Return the lines that compute one element of some tensors, and those that store it; some are ``made``."""
        known, lines, stores = dict(made), list[str](), list[str]()
        for loop, text, target in self._expressions(loops, known, prefix):
            name = known[loop.name]
            if loop.name not in made:
                lines.append(f"{c_type(loop.dtype)} {name};")
                lines.append(f"{{ const int i = {at}; {_named('i', loop.shape)} {name} = {text}; }}")
            if target is not None:
                stores.append(f"{target}[{at}] = {name};")
        return lines, stores

    def _followed(self, loops: Sequence[Loop], heads: Sequence[Loop], values: Sequence[str], at: str) -> list[str]:
        """Return the lines that take an element of sums or products where they have just been made."""
        made = {loop.name: value for loop, value in zip(heads, values, strict=True)}
        lines, stores = self._each(loops, made, at, "q_")
        return [*lines, *stores]

    def _number(self, loop: Loop) -> list[str]:
        kind = c_type(loop.dtype)
        if loop.over is None:
            return [f"const {kind} {loop.name} = {loop.text};"]
        lanes, terms = self._lanes, prod(loop.over)
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
        terms, lines = prod(loops[0].over or ()), list[str]()
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
        count, terms = prod(first.shape), prod(first.over)
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


def _named(prefix: str, shape: Shape) -> str:
    """Return the line that names the indices of an element, whose number is named ``prefix``."""
    pairs = zip(indices_of(prefix, shape), shape, strict=True)
    return " ".join(f"const int {prefix}{k} = {i};" for k, (i, size) in enumerate(pairs) if size != 1)
