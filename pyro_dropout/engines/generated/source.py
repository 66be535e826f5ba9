"""A recorded step as plain C: the source of its library, and the calls that take the step."""

import ctypes
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, fx

from pyro_dropout.engines.generated.functions import functions
from pyro_dropout.engines.generated.library import function_of
from pyro_dropout.engines.generated.order import Loop, Order, Segment
from pyro_dropout.engines.generated.statement import Memory, Place, Statement
from pyro_dropout.engines.generated.translation import Translation

_WIDE = 2**8  # terms of a sum from which it is added up in double precision


class Source:
    """A program in C: one function for each segment, of pointers to the memories that it uses.

    Attributes:
        text: the source.
    """

    def __init__(self, graph: fx.GraphModule, given: Sequence[Tensor]) -> None:
        translation = Translation(graph, given)
        self._given, self._results = given, translation.results
        self._order = order = Order(translation)
        self._memories: list[list[Memory]] = []  # what the pointers of each function point to
        functions_ = []
        for number, segment in enumerate(order.segments):
            used = _used(segment, order.stored)
            checks = translation.bounds if number == 0 else []
            used += [rows.memory for rows, _ in checks if rows.memory not in used]
            self._memories.append(list(dict.fromkeys(used)))
            if self._memories[-1]:
                functions_.append(self._function(number, segment, checks))
        self.text = functions() + "\n" + "\n".join(functions_)

    def bound(self, library: ctypes.CDLL) -> tuple[list[Callable[[], object]], list[Tensor]]:
        """Return the calls that take the step, with its library, and the results that they leave.

        The step is taken once: which call of torch writes into memory is found by trying.
        """
        own = {memory: torch.empty(memory.shape.shape, dtype=memory.shape.dtype) for memory in self._order.stored}

        def whole(memory: Memory) -> Tensor:
            return own[memory] if memory.given is None else self._given[memory.given]

        def tensor(place: Place) -> Tensor:
            base = whole(place.memory)
            return base.as_strided(place.size, place.stride, base.storage_offset() + place.offset)

        calls: list[Callable[[], object]] = []

        def add(call: Callable[[], object]) -> None:
            call()
            calls.append(call)

        for draw in self._order.draws:
            add(draw.bound(tensor))
        for number, segment in enumerate(self._order.segments):
            if self._memories[number]:
                add(function_of(library, f"segment{number}", [whole(each) for each in self._memories[number]]))
            for call in segment.calls:
                add(call.bound(tensor))
        return calls, [tensor(each) for each in self._results]

    def _function(self, number: int, segment: Segment, checks: Sequence[tuple[Place, int]]) -> str:
        self._names = {memory: f"m{k}" for k, memory in enumerate(self._memories[number])}
        lines = [f"int segment{number}(void *const *p) {{"]
        lines += [f"{memory.c_type} *{name} = p[{k}];" for k, (memory, name) in enumerate(self._names.items())]
        for rows, count in checks:
            at = f"{self._names[rows.memory]}[{rows.offset} + i * {rows.stride[0]}]"
            lines.append(f"for (long i = 0; i < {rows.size[0]}; i++) if ({at} < -{count} || {at} >= {count}) return 1;")
        for loop in segment.loops:
            lines += ["{", *_Body(loop, self._order, self._names).lines, "}"]
        return "\n".join([*lines, "return 0;", "}"])


class _Body:
    """The lines of one loop."""

    def __init__(self, loop: Loop, order: Order, names: dict[Memory, str]) -> None:
        self._order, self._names = order, names
        self._temporary: dict[Statement, str] = {}
        self._loads: dict[object, str] = {}
        self._before: list[str] = []
        self._body: list[str] = []
        self._stores: list[str] = []
        self._after: list[str] = []  # the inner loop
        self._sums: list[str] = []
        accesses = [place for s in loop.statements for place in (s.write, *s.reads)]
        accesses += [place.rows for place in accesses if place.rows is not None]
        self._size, self._merged = _merged(loop.size, accesses)
        for statement in loop.statements:
            self._add(statement)
        self.lines = self._whole()

    def _whole(self) -> list[str]:
        inner = [*self._body, *self._stores]
        if not self._size:
            return [*self._before, *inner, *self._after]
        *outer, last = range(len(self._size))
        head = [f"for (long i{k} = 0; i{k} < {self._size[k]}; i{k}++) {{" for k in outer]
        sums = [line for line, _ in self._local]
        adds = f" reduction(+:{','.join(name for _, name in self._local)})" if self._local else ""
        loop = [f"#pragma omp simd{adds}", f"for (long i{last} = 0; i{last} < {self._size[last]}; i{last}++) {{"]
        return [*self._before, *head, *sums, *loop, *inner, "}", *self._after, *["}"] * len(outer)]

    @property
    def _local(self) -> list[tuple[str, str]]:
        return [(line, line.split()[-3]) for line in self._sums]  # "long long s0 = 0;"

    def _add(self, statement: Statement) -> None:
        names = [self._load(place) for place in statement.reads]
        memory = statement.write.memory
        value, c_type = statement.expression(names), memory.c_type
        if statement.adds:
            self._sum(statement, value)
            return
        name = f"t{len(self._temporary)}"
        self._temporary[statement] = name
        # A truth value is kept as a whole number of the width of a float, which vectorises.
        self._body.append(f"const {'int' if c_type == 'unsigned char' else c_type} {name} = {value};")
        if statement.last:
            self._stores.append(f"{self._at(statement.write)} = {name};")
        elif memory in self._order.stored:
            self._body.append(f"{self._at(statement.write)} = {name};")

    def _sum(self, statement: Statement, value: str) -> None:
        memory = statement.write.memory
        strides = self._merged[_key(statement.write)]
        total = memory.shape.numel()
        self._before.append(f"for (long k = 0; k < {total}; k++) {self._names[memory]}[k] = 0;")
        if strides and strides[-1]:
            self._body.append(f"{self._at(statement.write)} += {value};")
            return
        name = f"s{len(self._sums)}"
        wide = bool(self._size) and self._size[-1] >= _WIDE and memory.c_type == "float"
        self._sums.append(f"{'double' if wide else memory.c_type} {name} = 0;")
        self._body.append(f"{name} += {value};")
        self._after.append(f"{self._at(statement.write)} += {name};")
        if not self._size:
            self._before.append(self._sums[-1])

    def _load(self, place: Place) -> str:
        for writer in place.memory.written:
            if writer in self._temporary and self._order.forwards(writer, place):
                return self._temporary[writer]
        key = (_key(place), place.rows and _key(place.rows))
        if key not in self._loads:
            at, c_type = self._at(place), place.memory.c_type
            name = f"l{len(self._loads)}"
            line = f"const {'int' if c_type == 'unsigned char' else c_type} {name} = {at};"
            fixed = place.rows is None and not any(self._merged[_key(place)])
            (self._before if fixed else self._body).append(line)
            self._loads[key] = name
        return self._loads[key]

    def _at(self, place: Place) -> str:
        terms = [str(place.offset)]
        terms += [f"i{k} * {stride}" for k, stride in enumerate(self._merged[_key(place)]) if stride]
        if place.rows is not None:
            row = self._load(place.rows)
            terms.append(f"({row} < 0 ? {row} + {place.row_count} : {row}) * {place.row_stride}")
        return f"{self._names[place.memory]}[{' + '.join(terms)}]"


def _key(place: Place) -> object:
    return id(place.memory), place.size, place.stride, place.offset, place.row_stride


def _merged(size: Sequence[int], places: Iterable[Place]) -> tuple[list[int], dict[object, list[int]]]:
    """Return the sizes of the fewest loops that pass over all places in order, and the strides of each place."""
    strides = {
        _key(place): [stride for each, stride in zip(place.size, place.stride, strict=True) if each != 1]
        for place in places
    }
    left = list(size)
    for dim in range(len(left) - 2, -1, -1):
        if all(each[dim] == each[dim + 1] * left[dim + 1] for each in strides.values()):
            left[dim] *= left.pop(dim + 1)
            for each in strides.values():
                each.pop(dim)
    return left, strides


def _used(segment: Segment, stored: set[Memory]) -> list[Memory]:
    """Return the memories that a segment reads or writes."""
    statements = [s for loop in segment.loops for s in loop.statements]
    places = [place for s in statements for place in (s.write, *s.reads)]
    places += [place.rows for place in places if place.rows is not None]
    return [place.memory for place in places if place.memory.given is not None or place.memory in stored]
