"""What an operation in a graph does to memory: whether it writes into a tensor, draws, or shows a tensor's memory."""

import functools
import operator

import torch
from torch import fx

from pyro_dropout.engines.torch_internals import OpOverload


def is_mutable(node: fx.Node) -> bool:
    """Whether an operation writes into one of its arguments."""
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def written_by(node: fx.Node) -> list[fx.Node]:
    """Return the arguments that an operation writes into."""
    if not is_mutable(node):
        return []
    pairs = zip(node.target._schema.arguments, node.args, strict=False)  # type: ignore[union-attr]
    written = (value for told, value in pairs if told.alias_info is not None and told.alias_info.is_write)
    return [each for value in written for each in (value if isinstance(value, list | tuple) else [value])]  # type: ignore[misc]


def is_random(node: fx.Node) -> bool:
    """Whether an operation gives something else each time."""
    operation = node.target
    if not isinstance(operation, OpOverload):
        return False
    return torch.Tag.nondeterministic_seeded in operation.tags or "empty" in operation.__name__


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
    # What torch calls unsafe lies in its argument's memory too, although its schema does not say so.
    unsafe = operation.name().startswith(("aten::unsafe_", "aten::_unsafe_view"))
    return unsafe or any(each.alias_info is not None for each in operation._schema.returns)
