"""The arguments of a step, split into tensors and numbers, and the structure that holds them.

Arguments are trees: dicts, lists, tuples, named tuples and dataclasses of tensors, numbers and text, nested as you
like. Every tensor and every float in them is an input of a compiled step; everything else is part of its structure.
"""

import copy
import dataclasses
import enum
from collections.abc import Hashable, Iterable, Iterator, Mapping, MutableMapping

import torch
from torch import Tensor

from pyro_dropout.protocols import Tree

_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_PLAIN = (bool, int, str, bytes, complex, type(None), type(...), slice, range, enum.Enum, *_OF_TORCH)


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

    def __init__(self, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        self.args, self.kwargs = args, kwargs
        self.tensors: list[Tensor] = []
        self.floats: list[float] = []
        self.objects: list[object] = []
        self.unknown = ""
        self.key: Hashable = (
            tuple([self._key(value, (k + 1,)) for k, value in enumerate(args)]),
            tuple([(name, self._key(value, (name,))) for name, value in sorted(kwargs.items())]) if kwargs else (),
        )

    def _key(self, value: object, path: tuple[object, ...]) -> Hashable:
        """Return the structure of a value, and collect its leaves."""
        kind = type(value)
        if isinstance(value, Tensor):
            self.tensors.append(value)
            if value.requires_grad:
                self.unknown = self.unknown or f"{_told(path)} requires a gradient, which a compiled step does not give"
            return (kind, value.shape, value.stride(), value.dtype, value.device)
        if type(value) is dict:  # the usual case, quickly
            return self._node(kind, value.items(), path)
        if type(value) is float:
            self.floats.append(value)
            return float
        if isinstance(value, _PLAIN):
            return (kind, (value.start, value.stop, value.step) if isinstance(value, slice) else value)
        parts = _parts(value)
        if parts is not None:
            return self._node(kind, parts, path)
        if callable(value):  # compared by identity, and searched as surroundings
            self.objects.append(value)
            return (kind, id(value))
        if not self.unknown:
            self.unknown = (
                f"{_told(path)} is a {kind.__module__}.{kind.__qualname__}, which cannot be searched for"
                " tensors; pass tensors, numbers, or dicts, lists, tuples and dataclasses of them"
            )
        return (kind, id(value))

    def _node(self, kind: type, parts: Iterable[tuple[object, object]], path: tuple[object, ...]) -> Hashable:
        return (kind, tuple([(name, self._key(part, (*path, name))) for name, part in parts]))

    def rebuilt(
        self, tensors: Iterator[Tensor], floats: Iterator[float | Tensor]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        """Return arguments of the same structure with other tensors and floats."""

        def fill(value: object) -> object:
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


def _told(path: tuple[object, ...]) -> str:
    """Return where a value was found, such as ``argument 1['x']``."""
    return f"argument {path[0]!r}" + "".join(f"[{name!r}]" for name in path[1:])


def _parts(value: object) -> list[tuple[object, object]] | None:
    """Return the named parts of a tree's node; None where a value is not one."""
    if isinstance(value, Mapping):
        return list(value.items()) if isinstance(value, MutableMapping) else None
    if isinstance(value, list | tuple):
        return list(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return [(name, getattr(value, name)) for name in names if hasattr(value, name)]
    return None


def _with_parts(value: Tree, parts: dict[object, object]) -> object:
    """Return a copy of a tree's node with other parts."""
    if type(value) is dict:
        return parts
    if type(value) in (list, tuple):
        return type(value)(parts.values())
    if isinstance(value, tuple):
        made: type = getattr(type(value), "_make", type(value))  # named tuples
        return made(list(parts.values()))
    found = copy.copy(value)
    if isinstance(value, list):
        found[:] = parts.values()
        return found
    for name, part in parts.items():
        if isinstance(value, MutableMapping):
            found[name] = part
        else:
            object.__setattr__(found, str(name), part)  # frozen dataclasses too, and without their __post_init__
    return found
