"""A recorded step without what numbers alone decide: factors that are 1, terms that are 0, sums of a single number.

Distributions compute with general formulas. A mixture of one component has the weight 1 and its logarithm 0, and sums
over one component; a step repeats all of that. To leave it out changes no number.
"""

import math
import operator
from typing import Any

import torch
from torch import Tensor, fx

from pyro_dropout.engines.torch_internals import OpOverload

_aten = torch.ops.aten
_MOST = 2**16  # elements of what is computed here to look at it
_HERE = ("cpu", "meta")  # what was recorded on a CPU has shapes alone
_FACTORIES = {
    *(_aten.ones.default, _aten.zeros.default, _aten.full.default, _aten.scalar_tensor.default),
    *(_aten.ones_like.default, _aten.zeros_like.default, _aten.full_like.default),
}
_NEUTRAL = {
    **dict.fromkeys((_aten.mul.Tensor, _aten.mul.Scalar, _aten.div.Tensor, _aten.div.Scalar), 1),
    **dict.fromkeys((_aten.add.Tensor, _aten.add.Scalar, _aten.sub.Tensor, _aten.sub.Scalar), 0),
}
_EITHER_SIDE = {_aten.mul.Tensor, _aten.add.Tensor}
_SUMS = {_aten.sum.default, _aten.sum.dim_IntList, _aten.mean.default, _aten.mean.dim}
_JOINS = {_aten.stack.default, _aten.cat.default}


class Literals:
    """The tensors in a graph that are computed from numbers alone, and what they make superfluous.

    Example:
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> from pyro_dropout.engines.simplify_graph import simplify_graph
        >>> made = make_fx(lambda x: (x + torch.ones(3).log()).view(3, 1).sum(1).exp())(torch.zeros(3))
        >>> simplify_graph(made.graph)
        >>> [node.target.__name__ for node in made.graph.nodes if node.op == "call_function"]
        ['exp.default']
    """

    def __init__(self) -> None:
        self._values: dict[fx.Node, Any] = {}

    def note(self, node: fx.Node) -> None:
        """Compute a node, if numbers alone decide what it is; nothing may write into it, or be drawn by it."""
        val = node.meta.get("val")
        operation: Any = node.target
        if isinstance(val, Tensor) and (val.device.type not in _HERE or not 0 < val.numel() <= _MOST):
            return
        given = node.all_input_nodes
        made = operation in _FACTORIES and isinstance(val, Tensor)
        known = bool(given) and all(each in self._values for each in given)
        ours = operation is operator.getitem or (isinstance(operation, OpOverload) and operation.namespace == "aten")
        if not ours or not (made or known):
            return
        shown = {each: _empty(each) if made else self._values[each] for each in given}
        args, named = fx.map_arg((node.args, node.kwargs), shown.__getitem__)
        with torch.no_grad():
            self._values[node] = operation(*args, **named)

    def same(self, node: fx.Node) -> fx.Node | None:
        """Return the operand that a sum or a product equals, because the other operand is 0 or 1."""
        operation: Any = node.target
        neutral = _NEUTRAL.get(operation)
        if neutral is None or len(node.args) != 2 or node.kwargs:
            return None
        left, right = node.args
        pairs = [(left, right), (right, left)] if node.target in _EITHER_SIDE else [(left, right)]
        for value, other in pairs:
            if isinstance(value, fx.Node) and _layout(value) == _layout(node) and self._is(other, neutral):
                return value
        return None

    def _is(self, value: object, number: int) -> bool:
        if isinstance(value, fx.Node):
            known = self._values.get(value)
            return isinstance(known, Tensor) and bool((known == number).all())
        return isinstance(value, int | float) and value == number


def single(node: fx.Node) -> fx.Node | None:
    """Return the tensor of which this sum, mean or stack of one is only another view; None if it is none of these.

    Example:
        >>> graph = fx.Graph()
        >>> x = graph.placeholder("x")
        >>> x.meta["val"] = torch.zeros(3, 1)
        >>> node = graph.call_function(_aten.sum.dim_IntList, (x, [1]))
        >>> node.meta["val"] = torch.zeros(3)
        >>> single(node)
        x
    """
    if node.kwargs or node.target not in _SUMS | _JOINS:
        return None
    value: Any = node.args[0]
    if node.target in _JOINS:
        value = value[0] if len(value) == 1 else None
    if not isinstance(value, fx.Node):
        return None
    before, after = value.meta.get("val"), node.meta.get("val")
    if not isinstance(before, Tensor) or not isinstance(after, Tensor) or before.dtype != after.dtype:
        return None
    alike = math.prod(before.shape) == math.prod(after.shape) > 0
    return value if alike and before.is_contiguous() and after.is_contiguous() else None


def _empty(node: fx.Node) -> Tensor:
    val = node.meta["val"]
    return torch.empty_strided(val.shape, val.stride(), dtype=val.dtype)


def _layout(node: fx.Node) -> object:
    value = node.meta.get("val")
    return (value.shape, value.stride(), value.dtype, value.device) if isinstance(value, Tensor) else node
