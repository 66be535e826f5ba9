"""Records the tensor operations of a function on a CPU as they run: what ``make_fx`` records, in a tenth of the time.

``make_fx`` runs each operation a second time on tensors without values, and loads torch's compiler for that. Here an
operation runs once, and the shape of its result is read off. What needs more than that (a value that is read, a result
whose shape depends on values, a class of tensors of its own) is left to ``make_fx``.
"""

import functools
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate

from pyro_dropout.engines.torch_internals import (
    LazyGraphModule,
    OpOverload,
    TorchDispatchMode,
    has_cpu_kernel,
    is_wrapped,
)

_aten = torch.ops.aten
_PLAIN = (int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_READS_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def record(function: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor]) -> fx.GraphModule | None:
    """Return the tensor operations of a function of tensors on a CPU; None where ``make_fx`` is needed."""
    recorder = Recorder()
    if not all(recorder.add_input(value) for value in inputs):
        return None
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)  # what it keeps was made by operations that would not be recorded
    try:
        with recorder:
            results = function(*inputs)
    except NotRecordedError:
        return None
    finally:
        torch.set_autocast_cache_enabled(cached)
    return recorder.finished(results)


class NotRecordedError(RuntimeError):
    """An operation needs more than a record of what has run."""


class Mode(TorchDispatchMode):
    """A mode for which torch does not load its compiler, in two seconds, to keep it away."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class Recorder(Mode):
    """A graph of the operations that run in this context."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph, self.root = fx.Graph(), nn.Module()
        self._known: dict[int, tuple[weakref.ref[Tensor], fx.Node]] = {}
        self._held: dict[int, tuple[Tensor, str]] = {}
        self._failed = False

    def add_input(self, value: object) -> bool:
        """Make a tensor the next input of the graph; return whether it can be."""
        if not isinstance(value, Tensor) or not _is_plain(value):
            return False
        self._note(value, self.graph.placeholder(f"arg{len(self.graph.nodes)}_1"))
        return True

    def finished(self, results: Sequence[Tensor]) -> fx.GraphModule | None:
        """Return the graph with these results; None if something could not be recorded."""
        try:
            self.graph.output([self._node(value) for value in results])
        except NotRecordedError:
            return None
        return None if self._failed else LazyGraphModule(self.root, self.graph)  # no Python of it until it runs

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload) or not (_can_be_recorded(func) or _chooses_by_number(func, args)):
            raise self._not_recorded()
        if func is _aten.lift_fresh.default:
            func = _aten.lift_fresh_copy.default  # the literal is copied at every call, in case it is written into
        given = map_aggregate(args, self._noted), map_aggregate(kwargs, self._noted)
        result = func(*args, **kwargs)
        node = self.graph.create_node("call_function", func, *given, name=func.overloadpacket.__name__)
        self._note_all(result, node)
        return result

    def _not_recorded(self) -> NotRecordedError:
        self._failed = True  # also where the function catches the error
        return NotRecordedError("this operation cannot be recorded as it runs")

    def _noted(self, value: Any) -> Any:
        """Return an argument, or the node of a tensor."""
        if isinstance(value, Tensor):
            return self._node(value)
        if not isinstance(value, _PLAIN):
            raise self._not_recorded()
        return value

    def _node(self, value: object) -> fx.Node:
        """Return the node of a tensor; one that existed before is held by the graph."""
        if not isinstance(value, Tensor) or not _is_plain(value):
            raise self._not_recorded()
        known = self._known.get(id(value))
        if known is not None and known[0]() is value:
            return known[1]
        if id(value) not in self._held:
            name = f"_tensor_constant{len(self._held)}"
            setattr(self.root, name, value)
            self._held[id(value)] = (value, name)
        node = self.graph.get_attr(self._held[id(value)][1])
        node.meta["val"] = _shape_of(value)
        return node

    def _note_all(self, result: object, node: fx.Node) -> None:
        if isinstance(result, Tensor):
            self._note(result, node)
        elif isinstance(result, list | tuple):
            node.meta["val"] = [_shape_of(each) if isinstance(each, Tensor) else None for each in result]
            for k, each in enumerate(result):
                if each is not None:
                    self._note_all(each, self.graph.call_function(operator.getitem, (node, k)))
        elif result is not None:
            raise self._not_recorded()

    def _note(self, value: Tensor, node: fx.Node) -> None:
        if not _is_plain(value):
            raise self._not_recorded()
        node.meta["val"] = _shape_of(value)
        self._known[id(value)] = (weakref.ref(value), node)


@functools.cache
def _can_be_recorded(operation: OpOverload) -> bool:
    """Whether an operation reads no values, and is not one that autograd takes apart, as it does not in inference."""
    return has_cpu_kernel(operation) and _READS_VALUES.isdisjoint(operation.tags)


def _chooses_by_number(operation: OpOverload, args: Any) -> bool:
    """Whether this chooses elements by their numbers; a choice by truth values has a shape that depends on them."""
    if operation is not _aten.index.Tensor:
        return False
    return all(each is None or each.dtype in (torch.int64, torch.int32) for each in args[1])


def _is_plain(value: Tensor) -> bool:
    if type(value) not in (Tensor, nn.Parameter) or value.device.type != "cpu":
        return False
    return value.layout is torch.strided and not is_wrapped(value)


def _shape_of(value: Tensor) -> Tensor:
    """Return a tensor without values, of the same shape, strides and type."""
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
