"""What the replicas of a fleet have in common: one computation is traced for the first, and mapped over all.

A replica with the seed s as its anchor solves the problem of the member of an anchored ``Ensemble`` that has this seed:
its priors are moved to a draw from them, and its targets perturbed. Its noise belongs to the rows of all data,
whichever of them it trains on.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap
from tqdm.auto import tqdm

from pyro_dropout.engines.aliasing import owner
from pyro_dropout.engines.program import traced
from pyro_dropout.engines.torch_internals import TreeSpec, tree_flatten, tree_leaves, tree_unflatten
from pyro_dropout.errors import PyroDropoutError, RangeError, ShapeError
from pyro_dropout.generative.inputs import AnyInputs
from pyro_dropout.generative.model_call import ModelCall
from pyro_dropout.generative.own_noise import drawn_in_place, noise_of
from pyro_dropout.generative.trial_run import quietly
from pyro_dropout.guides.base import SiteGuide
from pyro_dropout.guides.ensemble import Ensemble
from pyro_dropout.guides.points import is_gaussian, prior_of
from pyro_dropout.mathematics.checks import check_seed, describe
from pyro_dropout.protocols import Tree
from pyro_dropout.training.checkpoints.posterior_file import settings_of
from pyro_dropout.training.checkpoints.tensor_file import digest
from pyro_dropout.training.compile.functional import Buffers
from pyro_dropout.training.ensemble.anchoring import Problem, perturbation, temperature_of
from pyro_dropout.training.loss.learned_widths import learned_sites

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
    replicas = [_checked(build(**row)) for row in tqdm(rows, disable=not progress, unit="replica")]
    first = _structure(replicas[0])
    for replica, row in zip(replicas, rows, strict=True):
        if _structure(replica) != first:
            raise PyroDropoutError(
                f"the replica with {row} differs in structure from the one with {rows[0]}: other shapes, other layers,"
                " or a guide of another kind (keep=1 makes a layer a point). Put them in two fleets."
            )
    return rows, replicas


def _checked(built: object) -> Replica:
    if isinstance(built, tuple) and any(isinstance(part, Ensemble) for part in built):
        raise PyroDropoutError("an ensemble is a fleet of members already; train it with fit(model, ensemble, x, y).")
    if not isinstance(built, tuple) or len(built) != 2 or not all(isinstance(part, nn.Module) for part in built):
        raise PyroDropoutError(
            "build must return (model, guide), both of them modules (a BayesianNet and its guide); it returned"
            f" {type(built).__name__}."
        )
    return built


def _structure(replica: Replica) -> tuple[object, ...]:
    model, guide = replica
    tensors = [(name, t.shape, t.dtype) for part in replica for name, t in part.state_dict().items()]
    kinds = [type(guide.posterior(name)).__name__ for name in getattr(guide, "_sites", {})]
    # One step is traced for all, so settings that are not tensors (an activation, its slope) must be the same too.
    layers = [(type(layer).__name__, layer.extra_repr()) for layer in model.modules()]
    return type(guide).__name__, tensors, kinds, layers


def tensors_in(replica: Replica) -> list[Tensor]:
    """Return the parameters and the buffers of a replica."""
    return [tensor for part in replica for tensor in (*part.parameters(), *part.buffers())]


def told_settings(buffers: list[Tensor], pair: Replica) -> list[str]:
    """Return digests of the stacked buffers of a fleet, without prior widths that were found from data."""
    names, told = Buffers(*pair).names, settings_of(*pair)
    fixed = (name in told or "prior_scale/" not in name for name in names)
    return [digest(buffer) for buffer, stays in zip(buffers, fixed, strict=True) if stays]


def over_replicas(
    solo: Callable[..., Tree],
    example: tuple[Tree, ...],
    in_dims: tuple[int | Sequence[int | None] | None, ...],
    pair: Replica,
    at_once: Callable[[], int | None] = lambda: None,
) -> Callable[..., Tree]:
    """Return a computation of one replica as one of all: traced for the first, and mapped over what differs.

    Args:
        solo: the computation, a function of trees of tensors.
        example: the first replica's inputs.
        in_dims: for each input, or each tensor in it, 0, or None if all replicas share it.
        pair: the first replica, (model, guide).
        at_once: returns how many are computed at once; None for all.
    """
    leaves, shape = tree_flatten(example)
    outputs: list[TreeSpec] = []

    def flat(*inputs: Tensor) -> list[Tensor]:
        result, spec = tree_flatten(solo(*tree_unflatten(inputs, shape)))
        outputs.append(spec)
        return result

    with quietly(*pair):
        graph = traced(flat, leaves)
    _check_pure(graph)
    dims: list[int | None] = []
    for each, dim in zip(example, in_dims, strict=True):
        dims += dim if isinstance(dim, Sequence) else [dim] * len(tree_leaves(each))
    _check_draws(graph, dims, pair[1])

    def together(*inputs: Tree) -> Tree:
        mapped = vmap(graph, in_dims=tuple(dims), randomness="different", chunk_size=at_once())
        try:
            return tree_unflatten(mapped(*tree_flatten(inputs)[0]), outputs[0])
        except RuntimeError as cause:
            raise drawn_in_place(noise_of(pair[0]), cause) or cause from None

    return together


def _check_pure(graph: torch.fx.GraphModule) -> None:
    """Raise an error if a step changes its inputs in place, as BatchNorm does with its statistics."""
    for node in graph.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.is_mutable and _is_input(node.args[0]):
            raise PyroDropoutError(
                "a fleet cannot hold layers that change their buffers while they train, such as BatchNorm in train();"
                " use another normalisation, eval(), or separate training runs."
            )


def _check_draws(graph: torch.fx.GraphModule, dims: Sequence[int | None], guide: Any) -> None:
    """Raise an error if random numbers are written into a tensor that all replicas would share."""
    inputs = iter(dims)
    own: set[object] = set()  # nodes with a value for each replica
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            differs = next(inputs) is not None
        else:
            differs = any(each in own for each in node.all_input_nodes)
        if node.op == "call_function" and torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            if not differs and node.target._schema.is_mutable:
                raise PyroDropoutError(
                    f"a fleet cannot draw in place ({node.target}), as the model or its {type(guide).__name__} does:"
                    " all replicas would share the numbers. Write rsample with torch.rand or torch.randn instead, or"
                    " train without a fleet."
                )
            differs = True
        if differs:
            own.add(node)


def _is_input(node: object) -> bool:
    """Whether a node is an input of its graph, or shares memory with one: a view, or an in-place result."""
    return isinstance(node, torch.fx.Node) and owner(node).op in ("placeholder", "get_attr")


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


# --- anchors ----------------------------------------------------------------------------------------------------------


def anchored(
    replica: Replica,
    seeds: Sequence[int] | Tensor,
    count: int,
    call: tuple[Tensor, Tensor, int],
    batch: int,
    loss: object,
) -> tuple[Problem, float]:
    """Draw the anchors and the noise of all replicas, each from its own seed.

    Args:
        replica: the first; all have its sites.
        seeds: one for each replica.
        count: how many replicas there are.
        call: all data and how many of them a replica sees, (x, y, n).
        batch: points in a mini-batch.
        loss: of a replica.

    Returns:
        What was drawn, and T.
    """
    listed = seeds.tolist() if isinstance(seeds, Tensor) else seeds
    if not isinstance(listed, Sequence) or len(listed) != count:
        got = len(listed) if isinstance(listed, Sequence) else describe(seeds)
        raise ShapeError(f"anchors must be a list of seeds, one for each of {count} replicas; got {got}.")
    for seed in listed:
        check_seed(seed)
    model, guide = replica
    if learned_sites(model):
        raise PyroDropoutError("anchors are drawn from the prior, whose widths must be fixed; it has learn=True.")
    if not isinstance(guide, SiteGuide):
        raise PyroDropoutError(f"anchors need a guide of this package; got {type(guide).__name__}.")
    for name in guide._sites:
        if not is_gaussian(prior_of(guide, name)):
            raise PyroDropoutError(
                f"site {name!r} has a prior that is not Gaussian, so a replica of a fleet cannot be anchored there."
                " Train an Ensemble instead."
            )
    heat = temperature_of(loss, guide, ModelCall(model, call), batch)
    problem = perturbation(guide, listed, ModelCall(model, call), batch, heat)
    if problem["weights"]:
        raise PyroDropoutError(
            "replicas of a fleet are anchored by noise in their targets, which needs a Gaussian likelihood. Train an"
            " Ensemble instead: its members weight the data points."
        )
    return problem, heat
