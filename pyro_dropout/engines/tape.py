"""A recorded function of the same tensors at every call, as a list of calls that write into memory of their own.

Replayed one by one, half of the operations of a small step are views, which compute nothing, and many others compute
the same at every step. On a tape every result has its own place in memory: views of it are made once, what depends on
nothing that changes is computed at the start of a round of calls, and the rest is written over and over again. A place
is used again as soon as nothing that follows reads it.
"""

import operator
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from pyro_dropout.engines.simplify_graph import is_mutable, is_random
from pyro_dropout.engines.torch_internals import OpOverload
from pyro_dropout.engines.written_calls import Call, written

_aten = torch.ops.aten
_MOST = 2**26  # bytes of all results together; what lies between operations matters for small steps alone
_CONSTANT = {
    *(_aten.ones.default, _aten.zeros.default, _aten.full.default, _aten.scalar_tensor.default, _aten.arange.default),
    *(_aten.ones_like.default, _aten.zeros_like.default, _aten.full_like.default, _aten.eye.default),
    *(_aten.new_zeros.default, _aten.new_ones.default, _aten.new_full.default, _aten.arange.start_step),
}
_EACH, _ONCE, _NEVER = range(3)  # when something is computed: at every call, once a round, when the tape is made


class NoTapeError(RuntimeError):
    """A graph does what a tape cannot."""


class Tape:
    """A graph of tensor operations on a CPU, for inputs that are the same tensors at every call.

    Args:
        graph: the operations, as they were recorded. They are run twice, and what they write into is put back.
        inputs: the tensors.
        changing: which of them change between two calls of a round, by their numbers.

    Attributes:
        results: the outputs; every call writes over them.
        calls: how many operations a call runs.

    Raises:
        NoTapeError: the graph does what a tape cannot, or needs too much memory.

    Example:
        >>> from pyro_dropout.engines.recorder import record
        >>> x, y = torch.ones(3), torch.ones(3)
        >>> tape = Tape(record(lambda x, y: [(y.exp() * x.view(1, 3)).sum()], [x, y]), [x, y], changing=[0])
        >>> tape.begin()
        >>> x.fill_(2.0) is x, tape()[0].item(), tape.calls
        (True, 16.309690475463867, 2)
    """

    def __init__(self, graph: fx.GraphModule, inputs: Sequence[Tensor], changing: Iterable[int]) -> None:
        self._once: list[Call] = []
        self._each: list[Call] = []
        nodes = list(graph.graph.nodes)
        shapes = [node.meta.get("val") for node in nodes if node.op == "call_function"]
        if sum(value.nbytes for value in shapes if isinstance(value, Tensor)) > _MOST:
            raise NoTapeError("the results of all operations together are too large")
        given = _given(graph, nodes, inputs)
        # Nothing here has a gradient. Where torch is told so, an operation begins a tenth sooner.
        self._plain = not any(value.requires_grad for value in given.values())
        with torch.no_grad():
            facts = _Facts(nodes, given, [inputs[k] for k in changing])
            try:
                self.results = self._laid_out(nodes, given, facts)
                self._try_out()
            finally:
                facts.put_back()
        self.calls = len(self._each)

    def _try_out(self) -> None:
        """Run all calls once, as they will run; raise if torch warns of one, as it does of results in wrong shapes."""
        try:
            with warnings.catch_warnings(action="error"):
                self.begin()
                self()
        except Warning as cause:
            raise NoTapeError("torch warns of an operation on the tape") from cause

    def begin(self) -> None:
        """Compute what stays the same within a round of calls."""
        with torch.inference_mode(self._plain), torch.no_grad():
            for function, args, named in self._once:
                function(*args, **named)

    def __call__(self) -> list[Tensor]:
        """Run the operations, and return the outputs."""
        with torch.inference_mode(self._plain), torch.no_grad():
            for function, args, named in self._each:
                function(*args, **named)
        return self.results

    def _laid_out(self, nodes: list[fx.Node], given: dict[fx.Node, Tensor], facts: "_Facts") -> list[Tensor]:
        """Give every result its place, note the calls that write there, and return the outputs."""
        values: dict[fx.Node, Any] = dict(given)
        free: dict[object, list[Tensor]] = {}
        places: dict[int, Tensor] = {}  # by owner, those that can be used again
        for k, node in enumerate(nodes):
            operation, args, named = _filled(node, values)
            if node.op == "output":
                return list(args[0])
            if node.target is operator.getitem:
                values[node] = args[0][args[1]]
            elif node.op == "call_function" and facts.shows(node):
                values[node] = operation(*args, **named)
                if is_mutable(node):
                    self._each.append((operation, args, named))
            elif node.op == "call_function":
                when = facts.when[node]
                several = isinstance(facts.values[node], list | tuple)
                found = facts.values[node] if several else [facts.values[node]]
                own = [each if each is None else _place(each, free if when == _EACH else {}) for each in found]
                if when == _EACH:
                    places.update(zip(facts.owners(node), _tensors(own), strict=True))
                call = written(node, args, named, own)
                if call is not None:
                    call[0](*call[1], **call[2])
                    {_EACH: self._each, _ONCE: self._once, _NEVER: []}[when].append(call)
                values[node] = own if several else own[0]
            for owner in facts.done.get(k, ()):
                if owner in places:
                    place = places.pop(owner)
                    free.setdefault(_layout(place), []).append(place)
        raise NoTapeError("the graph has no output")


class _Facts:
    """What is known of each node after one run: whose memory it shows, and when it has to be computed.

    Attributes:
        values: what each node gave.
        when: when it is to be computed.
        done: the owners of memory that no node after this one reads, by the number of the node.
    """

    def __init__(self, nodes: list[fx.Node], given: dict[fx.Node, Tensor], changing: list[Tensor]) -> None:
        self.values: dict[fx.Node, Any] = dict(given)
        self.when: dict[fx.Node, int] = {}
        self._written: set[int] = set()
        self._kept: list[tuple[Tensor, Tensor]] = []
        self._known = {_memory(value) for value in given.values()}
        self._shows: set[fx.Node] = set()
        last: dict[int, int] = {}
        try:
            for k, node in enumerate(nodes):
                if node.op == "call_function":
                    self._run(node, list(given.values()))
                for each in (node, *node.all_input_nodes):
                    last.update(dict.fromkeys(self.owners(each), len(nodes) if node.op == "output" else k))
        except BaseException:
            self.put_back()
            raise
        moving = {_memory(value) for value in changing} | self._written
        for node in nodes:
            if node.op != "output":
                self.when[node] = self._when(node, moving)
        self.done: dict[int, list[int]] = {}
        for owner, k in last.items():
            self.done.setdefault(k, []).append(owner)

    def _run(self, node: fx.Node, given: list[Tensor]) -> None:
        operation, args, named = _filled(node, self.values)
        if is_mutable(node):
            changed = {_memory(each) for each in _tensors([args, named])}
            self._kept += [(each, each.clone()) for each in given if _memory(each) in changed - self._written]
            self._written |= changed
        elif not isinstance(node.target, OpOverload) and node.target is not operator.getitem:
            raise NoTapeError(f"{node.target} is no operation of torch")
        result = operation(*args, **named)
        self.values[node] = result
        found = [_memory(each) for each in _tensors(result)]
        if not found or any(each.numel() == 0 or each.layout is not torch.strided for each in _tensors(result)):
            raise NoTapeError("a result is empty, or no tensor")
        several = result if isinstance(result, list | tuple) else [result]
        if not all(each is None or isinstance(each, Tensor) for each in several):
            raise NoTapeError("a result is neither a tensor nor nothing")
        old = [each in self._known for each in found]
        if any(old) and not all(old):
            raise NoTapeError("some results of an operation are views, and others are not")
        if all(old):
            self._shows.add(node)
        self._known.update(found)

    def shows(self, node: fx.Node) -> bool:
        """Whether a result lies in memory that was there before."""
        return node in self._shows

    def owners(self, node: fx.Node) -> list[int]:
        """Return what stands for the memory of a node's results."""
        return [_memory(each) for each in _tensors(self.values.get(node, ()))]

    def _when(self, node: fx.Node, moving: set[int]) -> int:
        if moving.intersection(self.owners(node)) or is_mutable(node) or is_random(node):
            return _EACH
        if node.op != "call_function":
            return _ONCE
        if isinstance(node.target, OpOverload) and node.target.namespace != "aten":
            return _EACH  # one of a user may do more than it says
        if node.target in _CONSTANT:
            return _NEVER
        return min((self.when[each] for each in node.all_input_nodes), default=_EACH)

    def put_back(self) -> None:
        """Undo what the run has written into the inputs."""
        for value, before in self._kept:
            value.copy_(before)


def _given(graph: fx.GraphModule, nodes: list[fx.Node], inputs: Sequence[Tensor]) -> dict[fx.Node, Tensor]:
    """Return the tensors that are there before a call: inputs, and those that the graph holds."""
    places = [node for node in nodes if node.op == "placeholder"]
    found = dict(zip(places, inputs, strict=True))
    found |= {node: getattr(graph, str(node.target)) for node in nodes if node.op == "get_attr"}
    if any(value.device.type != "cpu" or value.layout is not torch.strided for value in found.values()):
        raise NoTapeError("a tensor is not on the CPU")
    return found


def _filled(node: fx.Node, values: dict[fx.Node, Any]) -> tuple[Any, Any, Any]:
    """Return the target and the arguments of a node, with values in place of nodes."""
    args, named = fx.map_arg((node.args, node.kwargs), values.__getitem__)
    return node.target, args, named


def _memory(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _place(like: Tensor, free: dict[object, list[Tensor]]) -> Tensor:
    """Return memory for a result: that of one which is not needed any more, or new one."""
    known = free.get(_layout(like))
    return known.pop() if known else torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)


def _layout(value: Tensor) -> object:
    return value.shape, value.stride(), value.dtype
