"""Calls of torch that write the result of an operation into memory that is there already.

Which function takes ``out=``, under which name and how fast, differs from operation to operation. Every call that is
found here has been compared with the operation itself; where none gives the same bits, its result is copied.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from pyro_dropout.engines.fast_dispatch import FUNCTIONS
from pyro_dropout.engines.simplify_graph import is_random
from pyro_dropout.engines.torch_internals import OpOverload, function_named

Call = tuple[Callable[..., object], tuple[Any, ...], dict[str, Any]]

_aten = torch.ops.aten
_DRAWS = {
    **dict.fromkeys((_aten.randn.default, _aten.randn_like.default), "normal_"),
    **dict.fromkeys((_aten.rand.default, _aten.rand_like.default), "uniform_"),
}
_COPIES = {_aten.clone.default, _aten._to_copy.default, _aten.lift_fresh_copy.default}
_WITH_NUMBER = {
    getattr(getattr(_aten, name), overload)
    for name in ("add", "sub", "mul", "div")
    for overload in ("Tensor", "Scalar")
}
_OVER_ALL = {_aten.sum.default: torch.sum, _aten.mean.default: torch.mean}


def written(
    node: fx.Node, args: tuple[Any, ...], named: dict[str, Any], places: Sequence[Tensor | None]
) -> Call | None:
    """Return the call that writes what an operation gives into ``places``; None if anything may stand there.

    Args:
        node: the operation.
        args: its arguments, with tensors in place of nodes.
        named: its named arguments.
        places: a tensor for each of its results, of the same shape, strides and type; None where it gives nothing.

    Example:
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> x, place = torch.ones(3), torch.empty(3)
        >>> (node,) = make_fx(lambda x: x + 1)(x).graph.find_nodes(op="call_function", target=_aten.add.Tensor)
        >>> function, args, named = written(node, (x, 1), {}, [place])
        >>> function(*args, **named) is place, place
        (True, tensor([2., 2., 2.]))
    """
    operation: Any = node.target
    if operation in _DRAWS:
        return getattr(places[0], _DRAWS[operation]), (), {}
    if "empty" in operation.__name__:
        return None
    copied = _copying(operation, places), args, named
    if is_random(node) or len(places) > 1 or operation.namespace != "aten":
        return copied
    (place,), expected = places, operation(*args, **named)
    if place is None or not isinstance(expected, Tensor):
        return copied
    for function, own, others in _candidates(operation, args, named, place):
        place.zero_() if expected.any() else place.fill_(1)
        try:
            with warnings.catch_warnings(action="error"):  # torch warns before it gives a result another shape
                function(*own, **others)
        except (RuntimeError, TypeError, Warning):
            continue
        if place.shape == expected.shape and _same(place, expected):
            return function, own, others
    return copied


def _candidates(operation: OpOverload, args: tuple[Any, ...], named: dict[str, Any], place: Tensor) -> Iterator[Call]:
    """Yield calls that may write the result of an operation into ``place``, the fastest first."""
    packet = operation.overloadpacket
    name = packet.__name__
    if operation in _COPIES:
        yield place.copy_, args[:1], {}
    if operation in _OVER_ALL:
        yield _OVER_ALL[operation], (args[0], list(range(args[0].dim()))), {"out": place}
    function = FUNCTIONS.get(operation) or function_named(name)
    if function is not None:
        held = tuple(_as_tensor(each, place) for each in args) if operation in _WITH_NUMBER else args
        for own in (held, args):
            yield function, own, {**named, "out": place}
    for overload in packet.overloads():
        each = getattr(packet, overload)
        outs = [argument.name for argument in each._schema.arguments if argument.is_out]
        if len(outs) == 1:
            yield each, args, {**named, outs[0]: place}


def _as_tensor(value: Any, like: Tensor) -> Any:
    """Return a number as a tensor: torch would make one at every call."""
    if isinstance(value, bool | complex) or not isinstance(value, int | float) or not like.is_floating_point():
        return value
    return torch.tensor(value, dtype=like.dtype)


def _copying(operation: OpOverload, places: Sequence[Tensor | None]) -> Callable[..., object]:
    def copied(*args: Any, **named: Any) -> None:
        found = operation(*args, **named)
        for place, each in zip(places, [found] if isinstance(found, Tensor) else found, strict=True):
            if place is not None:
                place.copy_(each)

    return copied


def _same(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left, right) or torch.allclose(left, right, rtol=0, atol=0, equal_nan=True)
