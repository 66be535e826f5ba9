"""A recorded function of the same tensors at every call, as a list of calls that write into memory of their own.

Replayed one by one, half of the operations of a small step are views, which compute nothing, and many others compute
the same at every step. On a tape every result has its own place in memory: views of it are made once, what depends on
nothing that changes is computed at the start of a round of calls, and the rest is written over and over again. A place
is used again as soon as nothing that follows reads it.
"""

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from pyro_dropout.engines.aliasing import is_mutable, is_random, owner, shares_memory
from pyro_dropout.engines.generated.formulas import filled_with, name_of
from pyro_dropout.engines.torch_internals import OpOverload
from pyro_dropout.engines.written_calls import written

_MOST = 2**26  # bytes of all results together; what lies between operations matters for small steps alone


class NoTapeError(RuntimeError):
    """A graph does what a tape cannot."""


class Tape:
    """A graph of tensor operations on a CPU, for inputs that are the same tensors at every call.

    Attributes:
        results: the outputs; every call writes over them.
        calls: how many operations a call runs.
    """

    def __init__(self, graph: fx.GraphModule, inputs: Sequence[Tensor], changing: Iterable[int]) -> None:
        self._once: list[Callable[[], object]] = []
        self._each: list[Callable[[], object]] = []
        nodes = list(graph.graph.nodes)
        shapes = [node.meta.get("val") for node in nodes if node.op == "call_function"]
        if sum(value.nbytes for value in shapes if isinstance(value, Tensor)) > _MOST:
            raise NoTapeError("the results of all operations together are too large")
        places = [node for node in nodes if node.op == "placeholder"]
        given = dict(zip(places, inputs, strict=True))
        given |= {node: getattr(graph, str(node.target)) for node in nodes if node.op == "get_attr"}
        if any(value.device.type != "cpu" or value.layout is not torch.strided for value in given.values()):
            raise NoTapeError("a tensor is not on the CPU")
        # Nothing here has a gradient. Where torch is told so, an operation begins a tenth sooner.
        self._mode = torch.no_grad if any(value.requires_grad for value in given.values()) else torch.inference_mode
        self._values: dict[fx.Node, Any] = dict(given)
        self._known = {_memory(value) for value in given.values()}
        changed = {owner(each) for node in nodes if is_mutable(node) for each in node.all_input_nodes}
        self._moving = changed | {places[k] for k in changing}
        before = [(value, value.clone()) for node, value in given.items() if node in changed]
        self._places: dict[fx.Node, Tensor] = {}  # those that can be used again
        self._free: dict[object, list[Tensor]] = {}
        last = {owner(each): k for k, node in enumerate(nodes) for each in (node, *node.all_input_nodes)}
        with torch.no_grad():
            try:
                for k, node in enumerate(nodes):
                    if node.op == "call_function":
                        self._add(node)
                    for each in [each for each in self._places if last[each] == k and node.op != "output"]:
                        place = self._places.pop(each)
                        self._free.setdefault(_layout(place), []).append(place)
            finally:
                for value, kept in before:
                    value.copy_(kept)
        self.results: list[Tensor] = [self._values[node] for node in nodes[-1].args[0]]
        self.calls = len(self._each)

    def begin(self) -> None:
        """Compute what stays the same within a round of calls."""
        with self._mode():
            for call in self._once:
                call()

    def __call__(self) -> list[Tensor]:
        """Run the operations, and return the outputs."""
        with self._mode():
            for call in self._each:
                call()
        return self.results

    def _add(self, node: fx.Node) -> None:
        """Run an operation, and note the call that writes over its result."""
        operation, values = node.target, self._values
        filled: Any = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        args, named = filled
        if self._moves(node):
            self._moving.add(node)
        if operation is operator.getitem:
            values[node] = args[0][args[1]]
            return
        if not isinstance(operation, OpOverload):
            raise NoTapeError(f"{operation} is no operation of torch")
        if torch.Tag.inplace_view in operation.tags:
            raise NoTapeError(f"{operation} gives a tensor another shape")
        values[node] = operation(*args, **named)
        if is_mutable(node):
            if any(each.alias_info is None for each in operation._schema.returns):
                raise NoTapeError(f"{operation} both writes into a tensor and makes a new one")
            self._each.append(partial(operation, *args, **named))
        elif not shares_memory(node):
            own = list(_tensors(values[node]))
            if not own or any(_memory(each) in self._known for each in own if each.numel()):
                raise NoTapeError(f"{operation} makes no tensor of its own")
            found = values[node]
            if isinstance(found, Tensor) and node in self._moving:
                known = self._free.get(_layout(found))
                values[node] = self._places[node] = found = known.pop() if known else found
            self._known.update(map(_memory, _tensors(found)))
            call = written(operation, args, named, found if isinstance(found, list | tuple) else [found])
            call()
            (self._each if node in self._moving else self._once).append(call)

    def _moves(self, node: fx.Node) -> bool:
        """Whether a result may differ from one call of a round to the next."""
        if node in self._moving or is_mutable(node) or is_random(node):
            return True
        if isinstance(node.target, OpOverload) and node.target.namespace != "aten":
            return True  # one of a user may do more than it says
        if filled_with(name_of(node), node.args) is not None:
            return False  # like a tensor that moves, but always the same number
        return any(each in self._moving for each in node.all_input_nodes)


def _memory(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()


def _layout(value: Tensor) -> object:
    return value.shape, value.stride(), value.dtype


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)
