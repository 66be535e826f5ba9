"""Operations that stay torch's own in a step in plain C: those of linear algebra, and whatever has no formula."""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from pyro_dropout.engines.generated.formulas import VIEWS, name_of
from pyro_dropout.engines.simplify_graph import shares_memory
from pyro_dropout.engines.torch_internals import OpOverload

MOST = 40  # in one step: each takes some five microseconds
_NOT_BY_VALUES = {torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


@functools.cache
def can_be_called(operation: OpOverload) -> bool:
    """Whether an operation makes new tensors from the values of others, and nothing else.

    Example:
        >>> from pyro_dropout.engines.generated.by_torch import can_be_called
        >>> aten = torch.ops.aten
        >>> [can_be_called(each) for each in (aten.gelu.default, aten.add_.Tensor, aten.bernoulli.p)]
        [True, False, False]
    """
    schema = operation._schema
    makes = not schema.is_mutable and all(each.alias_info is None for each in schema.returns)
    known = operation.namespace == "aten" and "empty" not in operation.name()
    return makes and known and _NOT_BY_VALUES.isdisjoint(operation.tags)


def elsewhere(node: fx.Node, operation: OpOverload) -> OpOverload:
    """Return an operation; where it writes into a tensor that nothing else reads, its form that makes a new one."""
    name, _, overload = operation.name().removeprefix("aten::").partition(".")
    target = node.args[0] if node.args else None
    if not name.endswith("_") or not isinstance(target, fx.Node) or name_of(target) in VIEWS:
        return operation
    if target.op != "call_function" or list(target.users) != [node] or not _alone(target):
        return operation
    return getattr(getattr(torch.ops.aten, name[:-1], operation), overload or "default", operation)


def _alone(node: fx.Node) -> bool:
    """Whether no other operation reads the memory that a tensor lies in, but for other parts of it."""
    while shares_memory(node):
        whole = node.all_input_nodes[0]
        if node.target is not operator.getitem and list(whole.users) != [node]:
            return False
        node = whole
    return True


def told(args: Any, number_of: Callable[[fx.Node], int]) -> Any:
    """Return arguments as JSON values, with tensors by their numbers; an error if one is something else."""
    if isinstance(args, fx.Node):
        return {"tensor": number_of(args)}
    if isinstance(args, list | tuple):
        return [told(each, number_of) for each in args]
    if isinstance(args, dict):
        return {name: told(each, number_of) for name, each in args.items()}
    if isinstance(args, torch.dtype | torch.device):
        return {type(args).__name__: str(args).removeprefix("torch.")}
    if args is None or isinstance(args, bool | int | float | str):
        return args
    raise TypeError(f"{args!r} cannot be written down")


def bound_call(name: str, given: Any, tensors: Sequence[Tensor], outs: Sequence[Sequence[Any]]) -> Callable[[], None]:
    """Return a call of an operation on tensors, whose results are written into others.

    Args:
        name: of the operation, as torch prints it.
        given: its arguments and keyword arguments, as ``told`` returns them.
        tensors: the tensors among them.
        outs: for each result that is used, its number and the tensor that holds it.

    Example:
        >>> from pyro_dropout.engines.generated.by_torch import bound_call
        >>> out = torch.empty(1, 1)
        >>> given = {"args": [{"tensor": 0}], "named": {}}
        >>> bound_call("aten.cholesky_inverse.default", given, [torch.full((1, 1), 2.0)], [[0, out]])()
        >>> out
        tensor([[0.2500]])
    """
    library, packet, overload = name.split(".")
    operation = getattr(getattr(torch.ops.aten, packet), overload)
    if library != "aten" or not can_be_called(operation):
        raise ValueError(f"{name} is no call of a step")
    args, named = _filled(given["args"], tensors), _filled(given["named"], tensors)

    def run() -> None:
        found = operation(*args, **named)
        results = found if isinstance(found, list | tuple) else [found]
        for number, out in outs:
            out.copy_(results[number])

    return run


def _filled(args: Any, tensors: Sequence[Tensor]) -> Any:
    if isinstance(args, dict):
        if set(args) == {"tensor"}:
            return tensors[args["tensor"]]
        if set(args) == {"dtype"} and isinstance(args["dtype"], str):
            return getattr(torch, args["dtype"])
        if set(args) == {"device"} and isinstance(args["device"], str):
            return torch.device(args["device"])
        return {name: _filled(each, tensors) for name, each in args.items()}
    return [_filled(each, tensors) for each in args] if isinstance(args, list) else args
