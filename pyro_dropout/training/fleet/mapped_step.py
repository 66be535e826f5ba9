"""The training step of a whole fleet: that of its first replica, as a graph, mapped over what differs."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from pyro_dropout.generative.trial_run import quietly
from pyro_dropout.mathematics.errors import PyroDropoutError
from pyro_dropout.protocols import Tree
from pyro_dropout.training.compile.program import traced
from pyro_dropout.training.fleet.replicas import Replica


def mapped_step(
    step: Callable[..., Tree], replica: Replica, example: tuple[Tree, ...], shared: tuple[Tensor, ...]
) -> Callable[..., Tree]:
    """Return the step of one replica as a step of all of them.

    Args:
        step: the step of ``replica``, whose inputs and outputs are trees of tensors.
        replica: the model and the guide that the step is traced with.
        example: inputs of the whole step: every tensor has the replicas first, except the shared ones.
        shared: the tensors that are the same for all.
    """
    leaves, shape = tree_flatten(example)
    dims = tuple(None if any(leaf is each for each in shared) else 0 for leaf in leaves)
    outputs: list[TreeSpec] = []

    def flat(*inputs: Tensor) -> list[Tensor]:
        result, spec = tree_flatten(step(*tree_unflatten(inputs, shape)))
        outputs.append(spec)
        return result

    with quietly(*replica):
        graph = traced(flat, [leaf if dim is None else leaf[0] for leaf, dim in zip(leaves, dims, strict=True)])
    _check_pure(graph)
    mapped = vmap(graph, in_dims=dims, randomness="different")
    return lambda *inputs: tree_unflatten(mapped(*tree_flatten(inputs)[0]), outputs[0])


def _check_pure(graph: torch.fx.GraphModule) -> None:
    """Raise an error if a step changes its inputs in place, as BatchNorm does with its statistics."""
    for node in graph.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.is_mutable and _is_input(node.args[0]):
            raise PyroDropoutError(
                "a fleet cannot hold layers that change their buffers while they train, such as BatchNorm in train();"
                " use another normalisation, eval(), or separate training runs."
            )


def _is_input(node: object) -> bool:
    """Whether a node is an input of its graph, or shares memory with one: a view, or an in-place result."""
    while isinstance(node, torch.fx.Node) and node.op == "call_function":
        schema = getattr(node.target, "_schema", None)
        if schema is None or not any(each.alias_info is not None for each in schema.returns):
            return False
        node = node.args[0]
    return isinstance(node, torch.fx.Node) and node.op in ("placeholder", "get_attr")
