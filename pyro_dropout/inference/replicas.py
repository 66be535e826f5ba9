"""What the replicas of a fleet must have in common: one step is traced for the first, and taken by all."""

from typing import Any

import torch

from pyro_dropout.mathematics.errors import PyroDropoutError


def check_alike(replicas: list[tuple[Any, Any]], settings: list[dict[str, Any]]) -> None:
    """Raise an error unless all replicas have the structure of the first one."""

    def structure(pair: tuple[Any, Any]) -> Any:
        tensors = [(n, tuple(t.shape), t.dtype) for part in pair for n, t in part.state_dict().items()]
        guide = pair[1]
        kinds = [type(guide.posterior(name)).__name__ for name in getattr(guide, "_sites", {})]
        # One step is traced for all, so what is no tensor (an activation, its slope) must be the same too.
        layers = [(type(each).__name__, each.extra_repr()) for each in pair[0].modules()]
        return type(guide).__name__, tensors, kinds, layers

    first = structure(replicas[0])
    for pair, setting in zip(replicas, settings, strict=True):
        if structure(pair) != first:
            raise PyroDropoutError(
                f"the replica with {setting} has another structure than the one with {settings[0]}: other shapes, other"
                " layers, or a guide of another kind (keep=1 makes a layer a point). Put them in two fleets."
            )


def check_pure(graph: torch.fx.GraphModule) -> None:
    """Raise an error if a step changes its inputs in place, as BatchNorm does with its statistics."""
    for node in graph.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.is_mutable and _is_input(node.args[0]):
            raise PyroDropoutError(
                "a fleet cannot hold layers that change their buffers while they train, such as BatchNorm in train();"
                " use another normalisation, eval(), or one training for each."
            )


def _is_input(node: Any) -> bool:
    """Whether a node is an input of its graph, or shares memory with one: a view, or what an operation changed."""
    while isinstance(node, torch.fx.Node) and node.op == "call_function":
        schema = getattr(node.target, "_schema", None)
        if schema is None or not any(each.alias_info is not None for each in schema.returns):
            return False
        node = node.args[0]
    return isinstance(node, torch.fx.Node) and node.op in ("placeholder", "get_attr")
