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
_TRUTH = "#define bool int\n#define true 1\n#define false 0"
_ROW = "static inline long row(long long i, int count) { return i < 0 ? i + count : i; }"


class Source:
    """A program in C: one function of pointers to memory, which calls torch by number.

    Attributes:
        text: the source.
    """

    def __init__(self, graph: fx.GraphModule, given: Sequence[Tensor], writes: int = 0) -> None:
        try:
            self._step = step = Translation(graph, given, writes)
            body = self._body(step)
        except UnsupportedError as cause:
            raise CannotError(str(cause)) from cause
        checks = [line for rows, count in step.bounds for line in _checked(rows, count)]
        drawn = [f"{fill}{C_TYPES[x.dtype][0]}(g, {name}, {x.numel()});" for name, fill, x in step.draws]
        text, self._memory = step.nests.text(drawn if is_known() else [], [*checks, *body])
        self.text = "\n".join([functions(), algebra(), draws(), _TRUTH, _ROW, text])

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

    def run(self, library: ctypes.CDLL) -> Callable[[], list[Tensor]]:
        """Return the function that takes a step with a library, and returns results that the next one writes over."""
        memory, results = self._memory, self._step.results
        pointers = (ctypes.c_void_p * len(memory))(*(each.data_ptr() for each in memory))
        generator, draws = torch.default_generator, is_known() and bool(self._step.draws)
        by_torch = [] if is_known() else [getattr(place, fill) for _, fill, place in self._step.draws]
        calls = [_written(*call) for call in self._step.calls]
        failed: list[BaseException] = []

        def called(number: int) -> int:
            try:
                calls[number]()
            except BaseException as cause:  # the function in C ends, and it is raised after that
                failed.append(cause)
            return len(failed)

        function, callback = library.step, _CALLBACK(called)

        def run(kept: Sequence[Tensor] = memory) -> list[Tensor]:  # memory lives as long as the function
            for draw in by_torch:
                draw()
            if draws:
                state = generator.get_state()
                wrong = function(pointers, callback, ctypes.c_void_p(state.data_ptr()))
                generator.set_state(state)
            else:
                wrong = function(pointers, callback, None)
            if failed:
                raise failed.pop(0)
            if wrong:
                raise IndexError("the number of a row is out of range")
            return results

        return run


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
