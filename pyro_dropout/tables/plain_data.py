"""Dataclasses from plain data, such as that of a JSON file: each value must have the type that its field declares.

Nothing is built from a file before this check, and nothing but numbers, texts, tuples and dataclasses can be.
"""

import functools
import math
from dataclasses import MISSING, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


def built(kind: type[T], found: object) -> T:
    """Return a dataclass; raise ``KeyError`` or ``TypeError`` with the name of the first field that is wrong.

    Args:
        kind: the class.
        found: {field: value}, with lists for tuples. Fields with a default may be absent.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class Tree:
        ...     height: float
        ...     names: tuple[str, ...] = ()
        >>> built(Tree, {"height": 3, "names": ["oak"]})
        Tree(height=3.0, names=('oak',))
        >>> built(Tree, {"height": "tall"})
        Traceback (most recent call last):
        TypeError: 'height'
    """
    if not isinstance(found, dict) or not is_dataclass(kind):
        raise TypeError(f"a record of the kind {kind.__name__}")
    hints, known = _hints(kind), {field.name: field for field in fields(kind)}
    for name in found:
        if name not in known:
            raise TypeError(repr(name))
    for name, field in known.items():
        if name not in found and field.default is MISSING and field.default_factory is MISSING:
            raise KeyError(name)
    made: T = kind(**{name: _typed(hints[name], value, name) for name, value in found.items()})
    return made


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    """Return the types of a dataclass's fields; a record may hold thousands of one class."""
    return get_type_hints(kind)


def _typed(hint: Any, value: object, name: str) -> Any:
    """Return a value as the type of a field; raise ``TypeError`` with the field's name if it has another."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        for part in parts:
            try:
                return _typed(part, value, name)
            except TypeError:
                continue
    elif origin is Literal:
        if any(type(value) is type(each) and value == each for each in parts):
            return value
    elif origin is tuple and isinstance(value, list | tuple):
        kinds = parts[:1] * len(value) if parts[-1] is Ellipsis else parts
        if len(kinds) == len(value):
            return tuple(_typed(kind, each, name) for kind, each in zip(kinds, value, strict=True))
    elif is_dataclass(hint):
        return built(hint, value)  # type: ignore[arg-type]
    elif hint is float:
        if type(value) in (int, float) and math.isfinite(value):  # type: ignore[arg-type]
            return float(value)  # type: ignore[arg-type]
    elif hint in (bool, int, str, NoneType) and type(value) is hint:
        return value
    raise TypeError(repr(name))
