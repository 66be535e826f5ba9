"""The inputs and outputs of a network: tensors with a row for each data point, one or several in a dict or a tuple."""

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from pyro_dropout.engines.torch_internals import (
    keystr,
    register_pytree_node,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_unflatten,
)
from pyro_dropout.errors import PyroDropoutError, RangeError, ShapeError
from pyro_dropout.mathematics.checks import check_data_finite, check_dense
from pyro_dropout.protocols import Tree


class Inputs:
    """Several tensors, each with a row for every one of N data points, that a network takes as its arguments.

    Where rows are concerned it is used as one tensor is. Numbers, strings, None and tensors without dimensions are the
    same for all points.
    """

    def __init__(self, args: tuple[Tree, ...], kwargs: dict[str, Tree]) -> None:
        self.args, self.kwargs = args, kwargs

    @property
    def given(self) -> Tree:
        """The inputs as a caller gives them: a dict, or a tuple."""
        return self.kwargs or self.args

    def leaves(self) -> list[Tensor]:
        """Return the tensors, in order."""
        return tree_leaves(self)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> "Inputs":
        """Return the same inputs with every tensor changed."""
        found: Inputs = tree_map(change, self)
        return found

    def each_row(self, change: Callable[[Tensor], Tensor]) -> "Inputs":
        """Return the same inputs with every tensor changed that has a row for each point."""
        count = len(self)
        return self.mapped(lambda leaf: change(leaf) if leaf.dim() and len(leaf) == count else leaf)

    def __len__(self) -> int:
        return next(len(leaf) for leaf in self.leaves() if leaf.dim())

    def __getitem__(self, index: slice | Tensor) -> "Inputs":
        return self.each_row(lambda leaf: leaf[index])

    def split(self, size: int) -> "list[Inputs]":
        """Return the points in parts of ``size``, as ``Tensor.split`` does."""
        return [self[start : start + size] for start in range(0, len(self), size)]

    def to(self, device: torch.device | str) -> "Inputs":
        """Return the same inputs on a device."""
        return self.mapped(lambda leaf: leaf.to(device))

    @property
    def device(self) -> torch.device:
        """The device of the first tensor."""
        return self.leaves()[0].device

    @property
    def is_cuda(self) -> bool:
        """Whether the first tensor is on a GPU."""
        return self.leaves()[0].is_cuda

    def __repr__(self) -> str:
        shown = tree_map(lambda leaf: tuple(leaf.shape) if isinstance(leaf, Tensor) else leaf, (self.args, self.kwargs))
        return f"Inputs{shown}"


AnyInputs = Tensor | Inputs
X = TypeVar("X", bound=AnyInputs)


def inputs_of(x: object, name: str = "x", whole: bool = False) -> AnyInputs:
    """Return the inputs of a network: a tensor as it is, a dict (keyword arguments) or a tuple (positional ones).

    If the network takes the ``whole`` batch, other tensors may have any length.
    """
    if isinstance(x, Inputs | Tensor):
        return x
    if not isinstance(x, Mapping | tuple):
        doors = " (only fit, predict and laplace take a DataLoader)."
        raise ShapeError(
            f"{name} must be a tensor, (N, ...), or a dict or a tuple of tensors; got {type(x).__name__}."
            + (doors if isinstance(x, DataLoader) else " Write torch.as_tensor(x).")
        )
    found = Inputs(x, {}) if isinstance(x, tuple) else Inputs((), dict(x))
    wrong = [key for key in found.kwargs if not isinstance(key, str)]
    if wrong:
        raise RangeError(f"{name} must name the network's arguments; got the key {wrong[0]!r}.")
    count: int | None = None
    for path, leaf in tree_flatten_with_path(found.given)[0]:
        label = name + keystr(path)
        if not isinstance(leaf, Tensor) and hasattr(leaf, "__len__") and not isinstance(leaf, str):
            raise ShapeError(f"{label} must be a tensor or a number; got {type(leaf).__name__}.")
        check_dense(label, leaf)
        if not isinstance(leaf, Tensor) or not leaf.dim():
            continue
        count = len(leaf) if count is None else count
        if len(leaf) != count and not whole:
            raise ShapeError(
                f"{label} must have a row for each of {count} data points, as the tensor before it has; got shape"
                f" {tuple(leaf.shape)}. Make what is the same for all points a buffer of the network; if it takes all"
                " its points at once, as a graph network does, write BayesianNet(net, whole_batch=True)."
            )
    if count is None:
        raise ShapeError(f"{name} must hold a tensor with a row for each data point; got {found}.")
    return found


def check_inputs(x: object, name: str = "x", whole: bool = False) -> AnyInputs:
    """Return the inputs of a network; raise unless they have at least one point, and floats among them are finite."""
    found = inputs_of(x, name, whole)
    if (isinstance(found, Tensor) and found.dim() == 0) or len(found) == 0:
        raise ShapeError(f"{name} must hold at least one data point, (N, ...); got shape {shown(found)}.")
    for path, leaf in tree_flatten_with_path(found if isinstance(found, Tensor) else found.given)[0]:
        if isinstance(leaf, Tensor):
            check_dense(name, leaf)
            check_data_finite(name + keystr(path), leaf)
    return found


def check_pairs(name: str, x: object, y: object) -> None:
    """Raise unless inputs and targets are dense and have the same number of points, at least one."""
    sized = (isinstance(x, Inputs) or (isinstance(x, Tensor) and x.dim()), isinstance(y, Tensor) and y.dim())
    n, m = (len(part) if size else None for part, size in zip((x, y), sized, strict=True))  # type: ignore[arg-type]
    if n != m or not n:
        got = [type(part).__name__ if size is None else f"{size} points" for part, size in ((x, n), (y, m))]
        allowed = "tensors with the same number of points, at least one"
        raise ShapeError(f"{name} must be {allowed}; got {got[0]} and {got[1]}.")
    for part, value in (("x", x), ("y", y)):
        check_dense(part if name == "x and y" else f"{name}: {part}", value)


def takes_all(model: object) -> bool:
    """Whether a network needs all its points at once (``whole_batch``), and so cannot be asked about some of them."""
    return bool(getattr(model, "whole_batch", False))


def leaves_of(x: AnyInputs) -> list[Tensor]:
    """Return the tensors in the inputs of a network."""
    return [x] if isinstance(x, Tensor) else x.leaves()


def named(x: AnyInputs) -> dict[str, Tensor]:
    """Return the tensors in the inputs of a network, by name."""
    return {f"x{k or ''}": leaf for k, leaf in enumerate(leaves_of(x))}


def copies(x: X, times: int) -> X:
    """Return all points ``times`` times, one copy after another."""
    if isinstance(x, Inputs):
        return cast(X, x.each_row(lambda leaf: copies(leaf, times)))
    return cast(X, x.repeat(times, *[1] * (x.dim() - 1)))


def call_net(net: nn.Module, x: AnyInputs) -> object:
    """Return what a network gives for its inputs."""
    return net(x) if isinstance(x, Tensor) else net(*x.args, **x.kwargs)


def _flatten(x: Inputs) -> tuple[list[Tensor], Any]:
    leaves, spec = tree_flatten((x.args, x.kwargs))
    places = [k for k, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    rest = tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    return [leaves[k] for k in places], (spec, rest, tuple(places))


def _unflatten(tensors: Iterable[Any], context: Any) -> Inputs:
    spec, rest, places = context
    leaves = list(rest)
    for k, tensor in zip(places, tensors, strict=True):
        leaves[k] = tensor
    return Inputs(*tree_unflatten(leaves, spec))


# Only tensors are leaves: torch's tracers and vmap then see nothing else.
register_pytree_node(Inputs, _flatten, _unflatten, serialized_type_name="pyro_dropout.Inputs")


Output = str | int | None


def picked(given: object, output: Output) -> object:
    """Return the part of a network's result that ``output`` names: a key, an attribute or an index."""
    if isinstance(given, Mapping):
        parts: list[Any] = [key for key in given if isinstance(key, str | int)]
    elif isinstance(given, tuple | list):
        parts = list(getattr(given, "_fields", range(len(given))))
    else:
        parts = [field.name for field in dataclasses.fields(given)] if dataclasses.is_dataclass(given) else []
    if output is None and not parts:
        return given
    if isinstance(given, Tensor):
        raise ShapeError(f"output is {output!r}, but net returns one tensor, {tuple(given.shape)}; leave output out.")
    listed = f"a {type(given).__name__} with {', '.join(map(repr, parts)) or 'no parts'}"
    if output is None:
        raise ShapeError(
            f"net returns {listed}; say which of them are its outputs, as in BayesianNet(net, output={parts[0]!r})."
        )
    try:
        if isinstance(output, str) and not isinstance(given, Mapping):
            return getattr(given, output)
        return given[output]  # type: ignore[index]  # whatever has no parts raises
    except (AttributeError, LookupError, TypeError):
        raise ShapeError(f"net has no output {output!r}; it returns {listed}.") from None


def shown(x: AnyInputs) -> object:
    """Return the shape of inputs, for a message."""
    return tuple(x.shape) if isinstance(x, Tensor) else x


# What torch says of an x of another shape or type, and Python of arguments that a network does not take.
_SHAPES = r"shapes cannot be multiplied|to have \d+ channels|input\.size\(-1\)|more than 1 value per channel"
_TYPES = r"dtype|expected scalar type|should be the same|layout|keyword arg|positional arg|multiple values|required arg"


def wrong_with(x: AnyInputs, net: nn.Module, cause: Exception) -> PyroDropoutError | None:
    """Return an error that says that x does not fit the network; None if something else is wrong."""
    ours, said = next(iter(net.parameters())).dtype, (str(cause).splitlines() or [""])[0]
    if isinstance(cause, PyroDropoutError):
        return None
    if re.search(_SHAPES, said):
        advice = ' Write DataLoader(..., drop_last=True), or BayesianNet(net, frozen_statistics="all").'
        return ShapeError(
            f"x must have the shape that net takes, (N, ...); got {shown(x)}: {said}."
            + (advice if "per channel" in said else "")
        )
    if re.search(_TYPES, said) and (isinstance(x, Inputs) or x.dtype != ours):
        got = shown(x) if isinstance(x, Inputs) else x.dtype
        takes = f"{type(net).__name__}.forward{inspect.signature(net.forward)}"
        return RangeError(f"x must be what {takes} takes, with parameters of {ours}; got {got}: {said}.")
    return None
