"""A recorded step as plain C: the source of its library, and the function that takes the step."""

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from pyro_dropout.engines.c.algebra import algebra
from pyro_dropout.engines.c.draws import draws, is_known
from pyro_dropout.engines.c.functions import C_TYPES, functions
from pyro_dropout.engines.c.translation import Translation
from pyro_dropout.engines.engine import CannotError
from pyro_dropout.engines.generated.formulas import PRODUCTS
from pyro_dropout.engines.generated.values import UnsupportedError, Value
from pyro_dropout.engines.torch_internals import OpOverload

_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)
_POINTER, _LONG = ctypes.c_void_p, ctypes.c_long
_ARGUMENTS = (_POINTER, _CALLBACK, _POINTER, _LONG, _POINTER, _POINTER, _LONG, _POINTER, _POINTER, _LONG)
_STEPS = """
int steps(void *const *p, int (*call)(int), generator *g, long n, void *row, const char *rows, long wide,
          const void *loss, char *losses, long size) {
    for (long k = 0; k < n; k++) {
        if (wide) __builtin_memcpy(row, rows + k * wide, wide);
        if (step(p, call, g)) return 1;
        if (size) __builtin_memcpy(losses + k * size, loss, size);
    }
    return 0;
}
"""
_TRUTH = "#define bool int\n#define true 1\n#define false 0"
_ROW = "static inline long row(long long i, int count) { return i < 0 ? i + count : i; }"


class Source:
    """A program in C: one function of pointers to memory, which calls torch by number.

    Attributes:
        text: the source.
        step: what it was translated from.
        memory: what the pointers are to point to.
    """

    def __init__(self, graph: fx.GraphModule, given: Sequence[Tensor], writes: int = 0) -> None:
        try:
            self.step = step = Translation(graph, given, writes)
            body = self._body(step)
        except UnsupportedError as cause:
            raise CannotError(str(cause)) from cause
        checks = [line for rows, count in step.bounds for line in _checked(rows, count)]
        drawn = [f"{fill}{C_TYPES[x.dtype][0]}(g, {name}, {x.numel()});" for name, fill, x in step.draws]
        text, self.memory = step.nests.text(drawn if is_known() else [], [*checks, *body])
        self.text = "\n".join([functions(), algebra(), draws(), _TRUTH, _ROW, text, _STEPS])

    @staticmethod
    def _body(step: Translation) -> list[str]:
        """Return the lines of all loops, and those that copy results over inputs."""
        nests = step.nests
        over = [(place, nests.kept(value)) for place, value in step.over]
        names = [value.name or "" for _, value in over]
        direct = {
            value.name or "": place.memory[0]
            for place, value in over
            if place.memory is not None and names.count(value.name or "") == 1
            if value.name not in nests.tensors  # which something else reads
        }
        nests.targets = {place.memory[0]: place for place, _ in over if place.memory is not None}
        body = nests.written([*names, *nests.tensors], direct)
        for place, value in over:
            if not nests.is_over(value.name or ""):
                body += nests.copied(place, value)
        return body


class Run:
    """Takes steps with a library, and returns results that the next one writes over.

    Attributes:
        alone: whether it calls nothing of torch, which may fail, and whose first results can be copied as they are.
    """

    def __init__(self, source: Source, library: ctypes.CDLL) -> None:
        self._memory, step = source.memory, source.step  # memory lives as long as the function
        self._pointers = (ctypes.c_void_p * len(self._memory))(*(each.data_ptr() for each in self._memory))
        self._results, self._draws = step.results, is_known() and bool(step.draws)
        self._by_torch = [] if is_known() else [getattr(place, fill) for _, fill, place in step.draws]
        self._failed = failed = list[BaseException]()
        calls = [_written(*call) for call in step.calls]

        def called(number: int) -> int:
            try:
                calls[number]()
            except BaseException as cause:  # the function in C ends, and it is raised after that
                failed.append(cause)
            return len(failed)

        self._function, self._callback = library.steps, _CALLBACK(called)
        self._function.argtypes = _ARGUMENTS
        self.alone = not calls and not self._by_torch and self._results[0].is_contiguous()

    def __call__(self) -> list[Tensor]:
        """Take a step."""
        for draw in self._by_torch:
            draw()
        self._take(1, None, None, 0, None, None, 0)
        return self._results

    def many(self, steps: int, row: Sequence[Tensor], rows: Tensor | None) -> Tensor:
        """Take steps one after another, copy what each is given to ``row``, and return their first results."""
        loss = self._results[0]
        losses = loss.new_empty((steps, *loss.shape))
        given = (None, None, 0) if rows is None else (row[0].data_ptr(), rows.data_ptr(), row[0].nbytes)
        self._take(steps, *given, loss.data_ptr(), losses.data_ptr(), loss.nbytes)
        return losses

    def _take(self, steps: int, *copied: int | None) -> None:
        state = torch.default_generator.get_state() if self._draws else None
        place = None if state is None else state.data_ptr()
        wrong = self._function(self._pointers, self._callback, place, steps, *copied)
        if state is not None:
            torch.default_generator.set_state(state)
        if self._failed:
            raise self._failed.pop(0)
        if wrong:
            raise IndexError("the number of a row is out of range")


def _written(
    operation: OpOverload, args: Sequence[Any], named: dict[str, Any], places: Sequence[Tensor | None]
) -> Callable[[], object]:
    """Return a call of torch that writes what an operation gives into ``places``."""
    name = operation.overloadpacket.__name__
    if name in PRODUCTS:
        return partial(getattr(torch, name), *args, **named, out=places[0])

    def copied() -> None:
        found = operation(*args, **named)
        for place, each in zip(places, [found] if isinstance(found, Tensor) else found, strict=False):
            if place is not None:
                place.copy_(each)

    return copied


def _checked(rows: Value, count: int) -> list[str]:
    """Return the lines that look at the numbers of rows."""
    indices = tuple(f"i{k}" for k in range(len(rows.shape)))
    heads = [f"for (long {i} = 0; {i} < {size}; {i}++)" for i, size in zip(indices, rows.shape, strict=True)]
    at = rows.at(indices)
    return [*heads, f"if ({at} < -{count} || {at} >= {count}) return 1;"]
