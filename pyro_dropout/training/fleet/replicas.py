"""What the replicas of a fleet have in common: one computation is traced for the first, and mapped over all."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap
from tqdm.auto import tqdm

from pyro_dropout.engines.agreement import owner
from pyro_dropout.engines.torch_internals import TreeSpec, tree_flatten, tree_leaves, tree_unflatten
from pyro_dropout.engines.tracing import traced
from pyro_dropout.errors import PyroDropoutError, RangeError, ShapeError
from pyro_dropout.generative.inputs import AnyInputs
from pyro_dropout.generative.networks import BayesianNet
from pyro_dropout.generative.own_noise import drawn_in_place, noise_of
from pyro_dropout.generative.process_state import forked
from pyro_dropout.generative.standardised import network_in
from pyro_dropout.generative.trial_run import quietly
from pyro_dropout.guides.ensemble import Ensemble
from pyro_dropout.protocols import Tree
from pyro_dropout.training.compile.functional import unvalidated

Replica = tuple[Any, Any]  # a model and its guide, both modules


def build_replicas(
    build: Callable[..., object], settings: Mapping[str, Sequence[object]], progress: bool
) -> tuple[list[dict[str, object]], list[Replica]]:
    """Return the settings of each replica and the replicas; raise an error unless all have the same structure."""
    if not callable(build) or not isinstance(settings, Mapping):
        raise PyroDropoutError(
            "a fleet needs build, a function that makes one replica, and settings, {argument: one value for each"
            f" replica}}; got {type(build).__name__} and {type(settings).__name__}."
        )
    lengths = {name: len(values) if hasattr(values, "__len__") else 0 for name, values in settings.items()}
    if len(set(lengths.values())) != 1 or 0 in lengths.values():
        raise ShapeError(f"settings must have one value for each replica under every name; got lengths {lengths}.")
    rows = [dict(zip(settings, row, strict=True)) for row in zip(*settings.values(), strict=True)]
    replicas: list[Any] = []
    first: tuple[object, ...] = ()
    for row in tqdm(rows, disable=not progress, unit="replica"):
        made: Any = build(**row)
        if isinstance(made, tuple) and any(isinstance(part, Ensemble) for part in made):
            raise PyroDropoutError(
                "an ensemble is a fleet of members already; train it with fit(model, ensemble, x, y)."
            )
        if not isinstance(made, tuple) or len(made) != 2 or not all(isinstance(part, nn.Module) for part in made):
            raise PyroDropoutError(
                "build must return (model, guide), both of them modules (a BayesianNet and its guide); it returned"
                f" {type(made).__name__}."
            )
        replicas.append(made)
        first = first or _structure(made)
        if _structure(made) != first:
            raise PyroDropoutError(
                f"the replica with {row} differs in structure from the one with {rows[0]}: other shapes, other layers,"
                " or a guide of another kind (keep=1 makes a layer a point). Put them in two fleets."
            )
    return rows, replicas


def _structure(replica: Replica) -> tuple[object, ...]:
    model, guide = replica
    tensors = [(name, t.shape, t.dtype) for part in replica for name, t in part.state_dict().items()]
    kinds = [type(guide.posterior(name)).__name__ for name in getattr(guide, "_sites", {})]
    # One step is traced for all, so settings that are not tensors (an activation, its slope) must be the same too.
    layers = [(type(layer).__name__, layer.extra_repr()) for layer in model.modules()]
    return type(guide).__name__, tensors, kinds, layers


def check_one_function(
    replicas: Sequence[Replica],
    rows: Sequence[Mapping[str, object]],
    with_numbers_of: Callable[[int], AbstractContextManager[object]],
    x: AnyInputs,
    y: Tensor,
) -> None:
    """Raise unless the first network, ``with_numbers_of`` any other in it, gives that one's densities of some data.

    One step is traced for all: a function, a flag or a Python number that differs would silently be that of the first.
    """
    first = replicas[0][0]
    net = network_in(first)
    if not isinstance(net, BayesianNet):
        return
    with forked():
        weights = {name: torch.randn_like(net._parameter(name).detach()) for name in net.sites}

    def densities(model: Any) -> Tensor:
        with torch.no_grad(), unvalidated(), quietly(model):  # the same random numbers every time
            f = model.evaluate(weights, x)
            found: Tensor = model.likelihood.distribution(f).log_prob(model.likelihood.checked(f, y))
            return found

    for k, (model, _) in enumerate(replicas):
        with with_numbers_of(k):
            told = densities(first)
        if not torch.allclose(densities(model), told, rtol=1e-4, atol=1e-4, equal_nan=True):
            raise PyroDropoutError(
                f"the replica with {rows[k]} computes something else than the one with {rows[0]} does with its numbers:"
                " a function, a flag, a Python number or a frozen parameter differs, and one step is traced for all."
                " Make modules of functions and buffers of numbers, or put them in two fleets."
            )


def check_frozen(replicas: Sequence[Replica], rows: Sequence[Mapping[str, object]]) -> None:
    """Raise unless all replicas have the same parameters frozen, those of the guide at the same values.

    Frozen ones are no inputs of the step: it would hold those of the first replica for all.
    """
    first, *others = ([_frozen(part) for part in replica] for replica in replicas)
    for row, (model, guide) in zip(rows[1:], others, strict=True):
        same = model.keys() == first[0].keys() and guide.keys() == first[1].keys()
        if not same or not all(torch.equal(value, first[1][name].to(value)) for name, value in guide.items()):
            raise PyroDropoutError(
                f"the replica with {row} has other frozen parameters than the one with {rows[0]}, or at other values,"
                " and one step is traced for all. Freeze the same ones in all replicas, or put them in two fleets."
            )


def _frozen(part: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in part.named_parameters() if not value.requires_grad}


def over_replicas(
    solo: Callable[..., Tree],
    example: tuple[Tree, ...],
    in_dims: tuple[int | Sequence[int | None] | None, ...],
    pair: Replica,
) -> Callable[..., Tree]:
    """Return a computation of one replica as one of all: traced for the first, and mapped over what differs.

    What is no tensor in the ``example`` of its inputs stays as it is.
    """
    leaves, shape = tree_flatten(example)
    outputs: list[TreeSpec] = []

    def flat(*inputs: Tensor) -> list[Tensor]:
        own = iter(inputs)
        given = [next(own) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        result, spec = tree_flatten(solo(*tree_unflatten(given, shape)))
        outputs.append(spec)
        return result

    with quietly(*pair):
        graph = traced(flat, _tensors(example))
    dims: list[int | None] = []
    for each, dim in zip(example, in_dims, strict=True):
        dims += dim if isinstance(dim, Sequence) else [dim] * len(_tensors(each))
    _check_in_place(graph, dims, pair[1])
    mapped = vmap(graph, in_dims=tuple(dims), randomness="different")

    def together(*inputs: Tree) -> Tree:
        try:
            return tree_unflatten(mapped(*_tensors(inputs)), outputs[0])
        except RuntimeError as cause:
            raise drawn_in_place(noise_of(pair[0]), cause) or cause from None

    return together


def _tensors(tree: Tree) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _check_in_place(graph: torch.fx.GraphModule, dims: Sequence[int | None], guide: Any) -> None:
    """Raise if a step changes its inputs, as BatchNorm does with its statistics, or draws into what all share."""
    inputs = iter(dims)
    own: set[object] = set()  # nodes with a value for each replica
    for node in graph.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        mutable = schema is not None and schema.is_mutable
        at = node.args[0] if mutable else None
        if isinstance(at, torch.fx.Node) and owner(at).op in ("placeholder", "get_attr"):  # itself, or a view of one
            raise PyroDropoutError(
                "a fleet cannot hold layers that change their buffers while they train, such as BatchNorm in train();"
                " use another normalisation, eval(), or separate training runs."
            )
        if node.op == "placeholder":
            differs = next(inputs) is not None
        else:
            differs = any(each in own for each in node.all_input_nodes)
        if node.op == "call_function" and torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            if not differs and mutable:
                raise PyroDropoutError(
                    f"a fleet cannot draw in place ({node.target}), as the model or its {type(guide).__name__} does:"
                    " all replicas would share the numbers. Write rsample with torch.rand or torch.randn instead, or"
                    " train without a fleet."
                )
            differs = True
        if differs:
            own.add(node)


def stacked(rows: list[list[Tensor]]) -> list[Tensor]:
    """Return the tensors of several replicas, each stacked over them."""
    return [torch.stack(column) for column in zip(*rows, strict=True)]


def finite_rows(values: list[Tensor]) -> Tensor:
    """Return whether all parameters of each replica are finite, (E,)."""
    return torch.stack([value.reshape(len(value), -1).isfinite().all(1) for value in values]).all(0)


def rows_of(x: AnyInputs, indices: Tensor | None, count: int) -> Tensor:
    """Return the rows of x that each of some replicas sees, (E, n); raise if they are not valid."""
    if indices is None:
        return torch.arange(len(x), device=x.device).expand(count, -1).contiguous()
    whole = isinstance(indices, Tensor) and indices.dtype in (torch.int64, torch.int32, torch.int16, torch.uint8)
    if not whole or indices.dim() != 2 or len(indices) != count or not indices.shape[1]:
        tensor = isinstance(indices, Tensor)
        got = f"{tuple(indices.shape)} of {indices.dtype}" if tensor else type(indices).__name__
        raise ShapeError(
            f"indices must be a tensor of whole numbers, (E, n) = ({count}, n), one row for each replica; got"
            f" {got}. All replicas see the same number of points; mask.nonzero() turns a mask into row numbers."
        )
    least, most = int(indices.min()), int(indices.max())
    if least < 0 or most >= len(x):
        raise RangeError(f"indices must lie between 0 and {len(x) - 1}, the rows of x; got {least} to {most}.")
    return indices.to(x.device).long().contiguous()
