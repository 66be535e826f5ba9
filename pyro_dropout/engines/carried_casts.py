"""Parameters in half precision that one step hands to the next, for a chain of steps.

A step with products in bfloat16 begins by casting every weight. The kernel that updates a weight has it at hand, so the
next step's copy is written there, instead of being read and written once more.
"""

import torch
from torch import Tensor
from torch.fx import Graph, Node

_CAST = torch.ops.aten._to_copy.default
_HALF = (torch.bfloat16, torch.float16)

Carried = list[tuple[int, torch.dtype]]


def carry_casts(graph: Graph, count: int) -> Carried:
    """Make casts of the first ``count`` inputs of a step inputs of their own, and those of its results outputs.

    Args:
        graph: of a step whose first inputs and outputs are the parameters, before and after it.
        count: how many.

    Returns:
        For each new input and output, in order, which parameter it is and its type.
    """
    places = [node for node in graph.nodes if node.op == "placeholder"]
    (end,) = (node for node in graph.nodes if node.op == "output")
    results, last = list(end.args[0]), places[-1]
    carried: Carried = []
    for k, place in enumerate(places[:count]):
        for dtype in _HALF:
            casts = [user for user in place.users if _is_cast(user, dtype)]
            if not casts or not isinstance(results[k], Node):
                continue
            with graph.inserting_after(last):
                last = graph.placeholder(f"carried_{len(carried)}")
            last.meta = dict(casts[0].meta)
            with graph.inserting_before(end):
                results.append(graph.call_function(_CAST, (results[k],), {"dtype": dtype}))
            results[-1].meta = dict(casts[0].meta)
            for cast in casts:
                cast.replace_all_uses_with(last)
                graph.erase_node(cast)
            carried.append((k, dtype))
    end.args = (results,)
    return carried


def cast(inputs: list[Tensor], carried: Carried) -> list[Tensor]:
    """Return the copies that a first step needs."""
    return [inputs[k].to(dtype) for k, dtype in carried]


def _is_cast(node: Node, dtype: torch.dtype) -> bool:
    return node.target is _CAST and node.kwargs == {"dtype": dtype}
