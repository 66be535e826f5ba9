"""Whether a program that was made of a recorded graph computes what the graph does, as far as its numbers are known.

And what an operation in a graph does to memory: whether it writes into a tensor, or shows a tensor's memory.
"""

import functools
import operator
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, fx

from pyro_dropout.engines.torch_internals import OpOverload

_CLOSE = {torch.float32: 1e-4, torch.float64: 1e-9}
_DIGITS = 64  # by how many units in the last place inputs are shaken
_MORE = 8  # times what that changes may be rounding, such as that of a unit of ReLU which is nearly zero
AWAY = (0.0, 0.0, 0.3, 3.0)  # how far from the start programs are compared; the second call goes on from the first


def written(graph: fx.GraphModule) -> list[int]:
    """Return the numbers of the inputs that a graph writes over, such as running statistics."""
    copied = {node.args[0] for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)}
    return [k for k, place in enumerate(graph.graph.find_nodes(op="placeholder")) if place in copied]


def agrees(
    run: Callable[[], Sequence[Tensor]],
    graph: fx.GraphModule,
    inputs: Sequence[Tensor],
    before: dict[int, Tensor],
    writes: int = 0,
    distances: Sequence[float] = AWAY,
) -> bool:
    """Whether a program writes over these inputs, and returns, what a graph does, from ``before`` and further away.

    Numbers that cancel, or that Adam divides by each other when both are nearly zero, are known to fewer digits: by
    how many is seen from inputs whose last digits differ.
    """
    expected, made = fx.Interpreter(graph).run, [node.meta.get("val") for node in graph.graph.nodes if node.args]
    # A loss in float64 of a noise in float32 is known to no more digits than that.
    least = max([0.0, *(_CLOSE.get(each.dtype, 0.0) for each in made if isinstance(each, Tensor))])
    theirs = [before[k].clone() if k in before else each for k, each in enumerate(inputs)]

    def computed(given: list[Tensor], point: int) -> list[Tensor]:
        torch.default_generator.manual_seed(point)
        new = [each.clone() for each in expected(*given)]
        for k in range(writes):
            given[k].copy_(new[k])
        return [*new[writes:], *(given[k] for k in before)]

    for point, away in enumerate(distances):
        torch.default_generator.manual_seed(point)
        for k in before:
            if theirs[k].is_floating_point():
                theirs[k].add_(torch.randn_like(theirs[k]).abs_(), alpha=away)
            inputs[k].copy_(theirs[k])
        shaken = [_shaken(each) for each in theirs]
        try:
            right = computed(theirs, point)
        except RuntimeError:  # no inverse, say: that far away there is nothing to compare
            if not away:
                raise
            return True
        try:
            near = computed(shaken, point)
        except RuntimeError:  # which says nothing of how well the others are known
            near = right
        torch.default_generator.manual_seed(point)
        mine = [*run(), *(inputs[k] for k in before)]
        if not all(_close(*each, least) for each in zip(mine, right, near, strict=True)):
            return False
    return True


def _shaken(value: Tensor) -> Tensor:
    """Return a copy of a tensor with other last digits."""
    if not value.is_floating_point():
        return value.clone()
    return value + value * torch.randn_like(value) * (_DIGITS * torch.finfo(value.dtype).eps)


def _close(mine: Tensor, theirs: Tensor, shaken: Tensor, least: float) -> bool:
    """Whether two tensors agree, as far as the second one is known: by its distance from what shaken inputs give."""
    slack = max(_CLOSE.get(mine.dtype, 1e-2), least)
    if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        return False
    known_at = shaken.isfinite() == theirs.isfinite()  # elsewhere last digits decide whether there is a number at all
    left, right, near = (each.double()[known_at] for each in (mine, theirs, shaken))
    known = float((near - right).nan_to_num(0.0, 0.0, 0.0).abs().amax()) if right.numel() else 0.0
    return torch.allclose(left, right, rtol=slack, atol=slack + _MORE * known, equal_nan=True)


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
