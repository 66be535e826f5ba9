"""Whether a program that was made of a recorded graph computes what the graph does, as far as its numbers are known."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, fx

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
    left, right = mine.double(), theirs.double()
    known = float((shaken.double() - right).nan_to_num(0.0, 0.0, 0.0).abs().amax()) if right.numel() else 0.0
    return torch.allclose(left, right, rtol=slack, atol=slack + _MORE * known, equal_nan=True)
