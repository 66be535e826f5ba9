"""Tensors that a traced program holds: passed in at every step where they can be found again, rejected otherwise.

A tensor that the model makes from Python numbers while it runs is a literal, and stays. One that existed before is
neither an argument nor a parameter nor a buffer; a compiled step that held it would not notice changes to it.
"""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from pyro_dropout.engines.aliasing import owner, written_by
from pyro_dropout.errors import PyroDropoutError

_aten = torch.ops.aten
_LITERAL = {_aten.lift_fresh_copy.default, _aten.lift_fresh.default, _aten.lift.default}


@runtime_checkable
class Place(Protocol):
    """Where a tensor is found at every step: a variable, an attribute, or an item of a container."""

    name: str

    def read(self) -> Any:
        """Return what is there now."""


Found = tuple[Place, Tensor]  # where a tensor is, and the tensor that was there first


def lift_constants(graph: torch.fx.GraphModule, outside: Sequence[Found]) -> list[Found]:
    """Turn the tensors that a program holds into additional inputs, and return where each is found."""
    lifted: list[Found] = []
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    last = placeholders[-1] if placeholders else None
    for node in [node for node in graph.graph.nodes if node.op == "get_attr"]:
        held = getattr(graph, str(node.target))
        if not isinstance(held, Tensor) or all(user.target in _LITERAL for user in node.users):
            continue
        same = [(place, tensor) for place, tensor in outside if _is(tensor, held)]
        found = min(same, key=lambda pair: pair[1] is not held, default=None)  # the very tensor, before a view of it
        if found is None:
            raise PyroDropoutError(
                f"it uses a tensor of shape {tuple(held.shape)} that is not an argument, a parameter or a buffer, and"
                " that cannot be found again, so a compiled step would hold its values fixed. Pass it to the model as"
                " an argument, or register it as a buffer"
            )
        with graph.graph.inserting_after(last) if last is not None else graph.graph.inserting_before():
            given = graph.graph.placeholder(f"outside_{len(lifted)}")
        given.meta = dict(node.meta)
        node.replace_all_uses_with(given)
        graph.graph.erase_node(node)
        last = given
        lifted.append(found)
    places = dict(zip(graph.graph.find_nodes(op="placeholder")[len(placeholders) :], lifted, strict=True))
    for node in graph.graph.nodes:
        for each in written_by(node):
            if owner(each) in places:
                raise PyroDropoutError(
                    f"it changes {places[owner(each)][0].name!r}, a tensor that is not a buffer, which a compiled step"
                    " would leave as it is. Register it as a buffer"
                )
    graph.recompile()
    return lifted


def _is(tensor: Tensor, held: Tensor) -> bool:
    """Whether two tensors are the same object, or view the same memory in the same way."""
    return tensor is held or (alike(tensor, held) and tensor.numel() > 0 and tensor.data_ptr() == held.data_ptr())


def alike(now: object, then: Tensor) -> bool:
    """Whether ``now`` is a tensor of the same shape, type, device and layout in memory."""
    if not isinstance(now, Tensor) or now.shape != then.shape or now.stride() != then.stride():
        return False
    return now.dtype == then.dtype and now.device == then.device
