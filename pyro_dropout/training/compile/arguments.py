"""The arguments of a step, split into tensors and numbers, and the structure that holds them.

Arguments are trees: dicts, lists, tuples, named tuples and dataclasses of tensors, numbers and text, nested as you
like. Every tensor and every float in them is an input of a compiled step; everything else is part of its structure.
"""

import copy
import dataclasses
import enum
from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_PLAIN = (bool, int, str, bytes, complex, type(None), type(...), slice, range, enum.Enum, *_OF_TORCH)
_KEPT = (nn.Module, type)  # compared by identity, and searched as surroundings


class Arguments:
    """The arguments of one call.

    Args:
        args: positional arguments.
        kwargs: keyword arguments.

    Attributes:
        tensors: all tensors, in order.
        floats: all Python floats, in order.
        key: the structure: two calls with equal keys differ in the values of tensors and floats only.
        objects: functions and modules among the arguments, which are known by identity.
        unknown: what cannot be searched for tensors, and why; empty if everything can.

    Example:
        >>> import torch
        >>> from pyro_dropout.training.compile.arguments import Arguments
        >>> first, second = (Arguments(({"x": torch.full((2,), k), "rate": k},), {}) for k in (1.0, 2.0))
        >>> first.key == second.key, second.floats, len(second.tensors)
        (True, [2.0], 1)
        >>> first.rebuilt(iter([torch.zeros(2)]), iter([0.5]))[0]
        ({'x': tensor([0., 0.]), 'rate': 0.5},)
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args, self.kwargs = args, kwargs
        self.tensors: list[Tensor] = []
        self.floats: list[float] = []
        self.objects: list[Any] = []
        self.unknown = ""
        self.key: Hashable = (
            tuple([self._key(value, ("", k + 1)) for k, value in enumerate(args)]),
            tuple([(name, self._key(value, ("", name))) for name, value in sorted(kwargs.items())]) if kwargs else (),
        )

    def _key(self, value: Any, path: tuple[Any, ...]) -> Hashable:
        """Return the structure of a value, and collect its leaves."""
        kind = type(value)
        if kind is Tensor or isinstance(value, Tensor):
            self.tensors.append(value)
            if value.requires_grad:
                self.unknown = self.unknown or f"{_told(path)} requires a gradient, which a compiled step does not give"
            return (kind, value.shape, value.stride(), value.dtype, value.device)
        if kind is dict:
            return (kind, tuple([(name, self._key(part, (path, name))) for name, part in value.items()]))
        if kind is float:
            self.floats.append(value)
            return float
        if isinstance(value, _PLAIN):
            return (kind, (value.start, value.stop, value.step) if isinstance(value, slice) else value)
        parts = _parts(value)
        if parts is not None:
            return (kind, tuple([(name, self._key(part, (path, name))) for name, part in parts]))
        if isinstance(value, _KEPT) or callable(value):
            self.objects.append(value)
            return (kind, id(value))
        if not self.unknown:
            self.unknown = (
                f"{_told(path)} is a {kind.__module__}.{kind.__qualname__}, which cannot be searched for"
                " tensors; pass tensors, numbers, or dicts, lists, tuples and dataclasses of them"
            )
        return (kind, id(value))

    def rebuilt(self, tensors: Iterator[Any], floats: Iterator[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments of the same structure with other tensors and floats."""

        def fill(value: Any) -> Any:
            if isinstance(value, Tensor):
                return next(tensors)
            if type(value) is float:
                return next(floats)
            if isinstance(value, _PLAIN):
                return value
            parts = _parts(value)
            return value if parts is None else _with_parts(value, {name: fill(part) for name, part in parts})

        args = tuple(fill(value) for value in self.args)
        named = {name: fill(value) for name, value in sorted(self.kwargs.items())}
        return args, {name: named[name] for name in self.kwargs}


def _told(path: tuple[Any, ...]) -> str:
    """Return where a value was found, such as ``argument 1['x']``."""
    above, name = path
    return f"{_told(above)}[{name!r}]" if above else f"argument {name!r}"


def _parts(value: Any) -> list[tuple[Any, Any]] | None:
    """Return the named parts of a tree's node; None where a value is not one."""
    if isinstance(value, Mapping):
        return list(value.items()) if isinstance(value, MutableMapping) else None
    if isinstance(value, list | tuple):
        return list(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value) if _has(value, field)]
    return None


def _has(value: Any, field: "dataclasses.Field[Any]") -> bool:
    return hasattr(value, field.name)


def _with_parts(value: Any, parts: dict[Any, Any]) -> Any:
    """Return a copy of a tree's node with other parts."""
    if type(value) is dict:
        return parts
    if type(value) in (list, tuple):
        return type(value)(parts.values())
    if isinstance(value, tuple):
        made: Callable[..., Any] = getattr(type(value), "_make", type(value))  # named tuples
        return made(list(parts.values()))
    found = copy.copy(value)
    if isinstance(value, list):
        found[:] = parts.values()
    elif isinstance(value, MutableMapping):
        for name, part in parts.items():
            found[name] = part
    else:
        for name, part in parts.items():
            object.__setattr__(found, name, part)  # frozen dataclasses too, and without their __post_init__
    return found
