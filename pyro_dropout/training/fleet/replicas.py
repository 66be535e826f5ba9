"""What the replicas of a fleet must have in common: one step is traced for the first, and used by all."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from pyro_dropout.mathematics.errors import PyroDropoutError, ShapeError

Replica = tuple[Any, Any]  # a model and its guide, both modules


def check_settings(build: object, settings: object) -> None:
    """Raise an error unless ``settings`` gives the arguments of each replica, and ``build`` can be called."""
    if not callable(build) or not isinstance(settings, Mapping):
        raise PyroDropoutError(
            "a fleet needs build, a function that makes one replica, and settings, {argument: one value for each"
            f" replica}}; got {type(build).__name__} and {type(settings).__name__}."
        )
    lengths = {name: len(values) if hasattr(values, "__len__") else 0 for name, values in settings.items()}
    if len(set(lengths.values())) != 1 or 0 in lengths.values():
        raise ShapeError(f"settings must have one value for each replica under every name; got lengths {lengths}.")


def as_replica(built: object) -> Replica:
    """Return what ``build`` made; raise if it is not a model and its guide."""
    if not isinstance(built, tuple) or len(built) != 2 or not all(isinstance(part, nn.Module) for part in built):
        raise PyroDropoutError(
            "build must return (model, guide), both of them modules (a BayesianNet and its guide); it returned"
            f" {type(built).__name__}."
        )
    return built


def check_alike(replicas: list[Replica], settings: list[dict[str, object]]) -> None:
    """Raise an error unless all replicas have the structure of the first one."""
    first = _structure(replicas[0])
    for replica, setting in zip(replicas, settings, strict=True):
        if _structure(replica) != first:
            raise PyroDropoutError(
                f"the replica with {setting} differs in structure from the one with {settings[0]}: other shapes, other"
                " layers, or a guide of another kind (keep=1 makes a layer a point). Put them in two fleets."
            )


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
