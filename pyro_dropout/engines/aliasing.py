"""What an operation in a graph does to memory: whether it writes into a tensor, or shows a tensor's memory."""

import functools
import operator

import torch
from torch import fx

from pyro_dropout.engines.torch_internals import OpOverload

VIEWS = {
    *("detach", "alias", "view", "_unsafe_view", "expand", "unsqueeze", "squeeze", "select", "t", "transpose"),
    *("permute", "slice", "diagonal", "unbind", "split", "split_with_sizes"),
}
_NOT_BY_VALUES = {torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def name_of(node: fx.Node) -> str:
    """Return the name of an operation, without its overload; empty if it is none of torch's own."""
    schema = getattr(node.target, "_schema", None)
    return schema.name.removeprefix("aten::") if schema is not None else ""


def written_by(node: fx.Node) -> list[fx.Node]:
    """Return the arguments that an operation writes into."""
    if not isinstance(node.target, OpOverload):
        return []
    pairs = zip(node.target._schema.arguments, node.args, strict=False)
    written = (value for told, value in pairs if told.alias_info is not None and told.alias_info.is_write)
    return [each for value in written for each in (value if isinstance(value, list | tuple) else [value])]  # type: ignore[misc]


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


@functools.cache
def can_be_called(operation: OpOverload) -> bool:
    """Whether an operation makes new tensors from the values of others, and nothing else."""
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
