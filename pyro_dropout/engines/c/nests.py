"""Loops as nests in plain C, one after another, with calls of torch between them."""

import itertools
import re
from collections.abc import Mapping, Sequence, Set
from math import prod

import torch
from torch import Tensor

from pyro_dropout.engines.c.functions import C_TYPES
from pyro_dropout.engines.generated.loops import Loop, Loops, Phases
from pyro_dropout.engines.generated.values import Indices, Shape, Value, flat_index, wrapped

_LANES = 8  # of a vector: the innermost loop of elements has as many, if one has
_PARTS = 16  # the most loops that one is taken apart into
_WIDE = 2**9  # terms of a sum from which it is added up in double precision
# A truth value in a register is a whole number of the width of a float, which vectorises.
_LOCAL = {**C_TYPES, torch.bool: "int"}


class Nests(Loops):
    """Loops and calls, and the memory that they read and write.

    Attributes:
        tensors: the memory, by name.
        calls: the lines that call a function, of torch or in C, by the name of their first result.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tensors: dict[str, Tensor] = {}
        self.calls: dict[str, str] = {}
        self.targets: dict[str, Value] = {}  # inputs that are written over
        self._writers: dict[str, Loop] = {}  # of memory that calls write

    def outside(self, name: str, tensor: Tensor) -> Value:
        """Return the elements of memory that nothing here writes before the end."""
        self.tensors[name] = tensor
        return self.view(name, tensor)

    def call(self, results: Sequence[tuple[str, Tensor]], given: Sequence[str], line: str) -> list[Value]:
        """Add a line that calls a function, which reads memory and writes its results."""
        (first, example), *_ = results
        text = " ".join(f"{name}[]" for name in given)
        loop = self._entered(Loop(first, tuple(example.shape), None, "", example.dtype, text))
        self.calls[first] = line
        self.tensors.update(results)
        self._writers.update((name, loop) for name, _ in results)
        return [self.view(name, tensor) for name, tensor in results]

    def memory(self, value: Value) -> tuple[str, Tensor]:
        """Return the memory of a value that a loop writes, or that is a view of some."""
        if value.memory is not None:
            return value.memory
        name = value.name or ""
        if name not in self.tensors:
            self.tensors[name] = torch.empty(value.shape, dtype=value.dtype)
        return name, self.tensors[name]

    def in_memory(self, value: Value) -> bool:
        """Whether a loop writes a value into memory."""
        return value.name in self._loops and not self._loops[value.name].in_register

    def view(self, name: str, tensor: Tensor) -> Value:
        """Return the elements of a view of memory."""
        base, loop = self.tensors[name], self._writer(name)
        shape, strides = tuple(tensor.shape), tensor.stride()
        offset = (tensor.data_ptr() - base.data_ptr()) // tensor.itemsize if tensor.numel() else 0

        def at(indices: Indices) -> str:
            sides = zip(indices, strides, shape, strict=True)
            terms = [
                i if stride == 1 else f"{wrapped(i)} * {stride}"
                for i, stride, n in sides
                if n != 1 and stride and i != "0"
            ]
            place = " + ".join([*[str(offset)] * bool(offset), *terms]) or "0"
            if loop is None:
                return f"{name}_now" if base.numel() == 1 else f"{name}[{place}]"
            return name if loop.in_register and name not in self._writers else f"{name}[{place}]"

        return Value(shape, tensor.dtype, at, memory=(name, tensor))

    def _writer(self, name: str) -> Loop | None:
        return self._writers.get(name) or super()._writer(name)

    def kept(self, value: Value) -> Value:
        """Return a value that a loop of its own computes."""
        return value if self.has(value.name) else self.stored(f"w{len(self._loops)}", value)

    def copied(self, place: Value, value: Value) -> list[str]:
        """Return the lines that copy what a loop has computed over an input."""
        indices = tuple("0" if size == 1 else f"i{k}" for k, size in enumerate(place.shape))
        if not any(index != "0" for index in indices):
            return [f"{place.memory[0]}[0] = {value.name};"]  # type: ignore[index]
        sides = [(f"i{k}", size) for k, size in enumerate(place.shape) if size != 1]
        return _around(sides, [f"{place.at(indices)} = {value.at(indices)};"])

    # --- the order ----------------------------------------------------------------------------------------------------

    def _ready(self, loop: Loop, left: Mapping[str, Loop], visible: Set[str], fresh: Set[str]) -> bool:
        return loop.name not in self.calls and super()._ready(loop, left, visible, fresh)

    def _phases(self, left: dict[str, Loop]) -> Phases:
        """Return groups of loops, and calls where there is nothing else to do."""
        phases = list[list[list[Loop]]]()
        while left:
            group = self._next(left, self._loops.keys() - left.keys(), set())
            if not group:
                name = next(name for name in self.calls if name in left and left.keys().isdisjoint(left[name].reads))
                group = [left.pop(name)]
            phases.append([group])
        return phases

    def _own_place(self, loop: Loop, name: str) -> str:
        return self.targets[name].at(loop.own) if name in self.targets else super()._own_place(loop, name)

    # --- the text -----------------------------------------------------------------------------------------------------

    def _lines(self, phases: Phases) -> list[str]:
        return [line for groups in phases for group in groups for line in self._nest(group)]

    def _nest(self, loops: Sequence[Loop]) -> list[str]:
        first = loops[0]
        if first.name in self.calls:
            return [self.calls[first.name]]
        if first.in_register:
            return [line for loop in loops for line in self._number(loop)]
        sums, each = [x for x in loops if x.over is not None], [x for x in loops if x.over is None]
        return [*(line for loop in sums for line in self._sum(loop)), *(self._elements(each) if each else [])]

    def _number(self, loop: Loop) -> list[str]:
        kind, name = _LOCAL[loop.dtype], loop.name
        kept = [f"{name}_m[0] = {name};"] if name in self.tensors else []
        if loop.over is None:
            return [f"const {kind} {name} = {loop.text};", *kept]
        wide = "double" if kind == "float" and prod(loop.over) >= _WIDE else kind
        (text,), sides = _merged([loop.text], "r", loop.over)
        adds = _around(sides, [f"{name}_s += {text};"], f" reduction(+:{name}_s)")
        return [f"{wide} {name}_s = 0;", *adds, f"const {kind} {name} = {name}_s;", *kept]

    def _elements(self, loops: Sequence[Loop]) -> list[str]:
        """Return the lines that compute tensors by elements; what one of them needs of another stays a number."""
        lines, stores = list[str](), list[str]()
        for loop, text, target in self._expressions(loops, {}, "q_"):
            lines.append(f"const {_LOCAL[loop.dtype]} q_{loop.name} = {_by_side(text, loop.shape)};")
            if target is not None:
                stores.append(f"{_by_side(self._own_place(loop, target), loop.shape)} = q_{loop.name};")
        inner, sides = _merged([*lines, *stores], "i", loops[0].sizes)
        wide = [side for side in reversed(sides) if side is sides[-1] or side[1] >= _LANES]
        last = min(wide, key=lambda side: sum(_far(line, side[0]) for line in inner))
        return _around([*(side for side in sides if side is not last), last], inner)

    def _sum(self, loop: Loop) -> list[str]:
        assert loop.over is not None
        text = _by_side(loop.text, loop.shape)
        (text, place), sides = _merged([text, f"{loop.name}[{_own(loop.sizes)}]"], "i", loop.sizes)
        (text,), terms = _merged([text], "r", loop.over)
        kind = _LOCAL[loop.dtype]
        kind = "double" if kind == "float" and prod(loop.over) >= _WIDE else kind
        last, term = sides[-1][0], terms[-1][0]
        if _far(text, term) <= _far(text, last):
            terms_of_one = _around(terms, [f"s += {text};"], " reduction(+:s)")
            return _around(sides, [f"{kind} s = 0;", *terms_of_one, f"{place} = s;"], None)
        start = f"for (long k = 0; k < {prod(loop.shape)}; k++) {loop.name}[k] = 0;"
        return [start, *_around([*sides[:-1], *terms], _around(sides[-1:], [f"{place} += {text};"]), None)]

    def text(self, first: Sequence[str], body: Sequence[str]) -> tuple[str, list[Tensor]]:
        """Return a function of pointers to memory, and what they point to; some lines come before it is read."""
        lines, numbers, given = list[str](), list[str](), list[Tensor]()
        for name, (_, dtype) in self._places.items():
            if name not in self.tensors:
                self.tensors[name] = torch.empty(self._loops[name].shape, dtype=dtype)
        for name, tensor in self.tensors.items():
            kind, loop = C_TYPES[tensor.dtype], self._writer(name)
            number = loop is not None and loop.in_register and name not in self._writers
            lines.append(f"{kind} *{name}{'_m' * number} = p[{len(given)}];")
            if loop is None and tensor.numel() == 1:
                numbers.append(f"const {_LOCAL[tensor.dtype]} {name}_now = {name}[0];")
            given.append(tensor)
        head = "APART int step(void *const *p, int (*call)(int), generator *g) {"
        return "\n".join([head, *lines, *first, *numbers, *body, "return 0;", "}"]), given


def _own(shape: Shape) -> str:
    """Return the number of a loop's own element."""
    return flat_index(tuple("0" if size == 1 else f"i{k}" for k, size in enumerate(shape)), shape)


def _by_side(text: str, shape: Shape) -> str:
    """Return a text with its indices numbered without sides of one."""
    order = [k for k, size in enumerate(shape) if size != 1]
    return re.sub(r"\bi(\d+)\b", lambda found: f"i{order.index(int(found[1]))}", text)


def _merged(texts: list[str], prefix: str, shape: Shape) -> tuple[list[str], list[tuple[str, int]]]:
    """Return texts for the fewest loops: neighbours that count one memory through become one. And their indices."""
    sides = [(f"{prefix}{k}", size) for k, size in enumerate(shape) if size != 1]
    for k in range(len(sides) - 2, -1, -1):
        (outer, size), (inner, below) = sides[k : k + 2]

        def one(found: re.Match[str], below: int = below, outer: str = outer) -> str:
            stride = int(found[2] or 1)
            if int(found[1]) != stride * below:
                return found[0]
            return f"{outer}_" if stride == 1 else f"{outer}_ * {stride}"

        pattern = rf"\b{outer} \* (\d+) \+ {inner}\b(?: \* (\d+))?(?! [%/*])"
        merged = [re.sub(pattern, one, text) for text in texts]
        if not any(re.search(rf"\b({outer}|{inner})\b", text) for text in merged):
            texts = [re.sub(rf"\b{outer}_(?!\w)", outer, text) for text in merged]
            sides[k : k + 2] = [(outer, size * below)]
    return texts, sides


def _around(sides: Sequence[tuple[str, int]], inner: list[str], simd: str | None = "") -> list[str]:
    """Return the lines of loops around others, of which the innermost is vectorised unless ``simd`` is None.

    Where elements come from one tensor or another, depending on an index, each part has a loop without that question.
    """
    if not sides:
        return inner
    (name, size), *rest = sides
    asked = (int(end) for line in inner for end in re.findall(rf"\b{name} (?:<|>=) (\d+)\b", line))
    ends = sorted({size, *(end for end in asked if 0 < end < size)})
    ends = ends if len(ends) <= _PARTS else [size]
    body, lines = _around(rest, inner, simd), list[str]()
    for start, end in itertools.pairwise([0, *ends]):
        lines += [f"#pragma omp simd{simd}"] * (simd is not None and not rest)
        lines += [f"for (long {name} = {start}; {name} < {end}; {name}++) {{", *body, "}"]
    return lines


def _far(text: str, index: str) -> int:
    """Return how many places in memory are far from each other for neighbouring values of an index."""
    places = re.findall(r"\[([^\[\]]*)\]", text)
    return sum(bool(re.search(rf"\b{index}\b", place)) and index not in place.split(" + ") for place in places)
