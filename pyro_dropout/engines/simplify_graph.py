"""A recorded step without the operations that do nothing: fewer to replay one by one, and fewer to compile.

What Pyro, autograd and distributions leave in a recorded step is often said twice, a view of a view that is the tensor
itself, or a product with ones. To leave it out changes no number.
"""

import functools
import operator

import torch
from torch import Tensor, fx

from pyro_dropout.engines.torch_internals import OpOverload

_aten = torch.ops.aten
_VIEWS = {
    *(_aten.detach.default, _aten.alias.default, _aten.view.default, _aten._unsafe_view.default, _aten.expand.default),
    *(_aten.unsqueeze.default, _aten.squeeze.default, _aten.squeeze.dim, _aten.squeeze.dims),
    *(_aten.t.default, _aten.transpose.int, _aten.permute.default),
}
_WITH_ONE = {_aten.pow.Tensor_Scalar, _aten.mul.Tensor, _aten.mul.Scalar, _aten.div.Tensor, _aten.div.Scalar}
_ONES = {_aten.ones.default, _aten.ones_like.default}


def simplify_graph(graph: fx.Graph) -> None:
    """Leave out of a recorded step what changes nothing.

    Example:
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> twice = lambda x: (x[None].squeeze(0) * torch.ones(3)).exp() + (x * torch.ones(3)).exp()
        >>> made = make_fx(twice)(torch.zeros(3))
        >>> before = len(made.graph.nodes)
        >>> simplify_graph(made.graph)
        >>> _ = made.recompile()
        >>> before, len(made.graph.nodes), made(torch.zeros(3))
        (11, 4, tensor([2., 2., 2.]))
    """
    *nodes, output = graph.nodes
    written = {owner(each) for node in nodes if is_mutable(node) for each in node.all_input_nodes}
    kept = written | {owner(node) for node in output.all_input_nodes}  # two outputs stay two tensors
    ones: set[fx.Node] = set()
    known: dict[object, fx.Node] = {}
    for node in nodes:
        if (node.target in _ONES and node not in written) or (node.target in _VIEWS and node.args[0] in ones):
            ones.add(node)
        same = _original(node) if node.target in _VIEWS else None
        if same is None and owner(node) not in kept and not is_random(node):
            if _only_slice(node, written):  # its gradient is a view of the slice's
                node.target, node.args = _aten.view.default, node.args[:2]
            same = _factor(node, ones, written) or _itself(node, written) or _said_before(node, known, written)
        if same is not None and same is not node:
            node.replace_all_uses_with(same)
            graph.erase_node(node)
    graph.eliminate_dead_code()


def is_mutable(node: fx.Node) -> bool:
    """Whether an operation writes into one of its arguments."""
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def is_random(node: fx.Node) -> bool:
    """Whether an operation gives something else each time."""
    operation = node.target
    if not isinstance(operation, OpOverload):
        return False
    return torch.Tag.nondeterministic_seeded in operation.tags or "empty" in operation.__name__


def _pure(node: fx.Node) -> bool:
    """Whether this is an operation of torch itself; one of a user may draw without saying so."""
    if isinstance(node.target, OpOverload):
        return node.target.namespace == "aten"
    return node.target is operator.getitem


def owner(node: fx.Node) -> fx.Node:
    """Return the tensor whose memory a view shows, or an operation has written into."""
    while shares_memory(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def shares_memory(node: fx.Node) -> bool:
    """Whether the result lies in the memory of the first argument."""
    return _gives_memory(node.target) if isinstance(node.target, OpOverload) else node.target is operator.getitem


@functools.cache
def _gives_memory(operation: OpOverload) -> bool:
    # Parts of a tensor that torch calls unsafe lie in its memory too, although their schema does not say so.
    unsafe = operation.name().startswith("aten::unsafe_")
    return operation in _VIEWS or unsafe or any(each.alias_info is not None for each in operation._schema.returns)


def _original(view: fx.Node) -> fx.Node | None:
    """Return the tensor of which this view of a view shows everything in the same form; None if there is none."""
    node = view
    while node.target in _VIEWS:
        node = node.all_input_nodes[0]
        if _layout(node) == _layout(view):
            return node
    return None


def _factor(node: fx.Node, ones: set[fx.Node], written: set[fx.Node]) -> fx.Node | None:
    """Return the factor of a product that is the product, because the other one is 1 everywhere."""
    if node.target is not _aten.mul.Tensor:
        return None
    left, right = node.args
    for one, other in ((left, right), (right, left)):
        if one in ones and isinstance(other, fx.Node) and _layout(other) == _layout(node):
            return None if owner(other) in written else other
    return None


def _itself(node: fx.Node, written: set[fx.Node]) -> fx.Node | None:
    """Return the tensor of which this is the first power, or the product or quotient with the number 1."""
    if node.target not in _WITH_ONE or len(node.args) != 2 or node.kwargs:
        return None
    value, one = node.args
    if not isinstance(value, fx.Node) or isinstance(one, fx.Node) or one != 1 or _layout(value) != _layout(node):
        return None
    return None if owner(value) in written else value


def _only_slice(node: fx.Node, written: set[fx.Node]) -> bool:
    """Whether this writes a tensor into the only slice of another, of which it could be a view instead."""
    if node.target is not _aten.select_backward.default or len(node.args) != 4:
        return False
    slope, sizes, place, _ = node.args
    if not isinstance(slope, fx.Node) or not isinstance(sizes, list | tuple) or not isinstance(place, int):
        return False
    val = slope.meta.get("val")
    only = sizes[place] == 1 and owner(slope) not in written
    return bool(only) and isinstance(val, Tensor) and val.is_contiguous()


def _said_before(node: fx.Node, known: dict[object, fx.Node], written: set[fx.Node]) -> fx.Node | None:
    """Return the node that computes the same from the same tensors, which nothing writes into."""
    if not _pure(node) or any(owner(each) in written for each in node.all_input_nodes):
        return None
    return known.setdefault((node.target, repr(node.args), repr(node.kwargs)), node)


def _layout(node: fx.Node) -> object:
    value = node.meta.get("val")
    return (value.shape, value.stride(), value.dtype, value.device) if isinstance(value, Tensor) else node
