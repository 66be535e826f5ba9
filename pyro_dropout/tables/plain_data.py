"""Dataclasses from plain data, such as that of a JSON file: each value must have the type that its field declares.

Nothing is built from a file before this check, and nothing but numbers, texts, tuples and dataclasses can be.
"""

import functools
import math
from dataclasses import MISSING, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
_hints = functools.cache(get_type_hints)  # a record may hold thousands of one class


def built(kind: type[T], found: object) -> T:
    """Return a dataclass; raise ``KeyError`` or ``TypeError`` with the name of the first field that is wrong."""
    hints: dict[str, Any] = _hints(kind)  # type: ignore[arg-type]
    if not isinstance(found, dict) or found.keys() - hints.keys():
        raise TypeError(repr(next(iter(found.keys() - hints.keys()), "")) if isinstance(found, dict) else kind.__name__)
    for field in fields(kind):  # type: ignore[arg-type]
        if field.name not in found and field.default is MISSING:
            raise KeyError(field.name)
    return kind(**{name: _typed(hints[name], value, name) for name, value in found.items()})


def _typed(hint: Any, value: Any, name: str) -> Any:
    """Return a value as the type of a field; raise ``TypeError`` with the field's name if it has another."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        for part in parts:
            try:
                return _typed(part, value, name)
            except TypeError:
                continue
    elif origin is Literal and any(type(value) is type(each) and value == each for each in parts):
        return value
    elif origin is tuple and isinstance(value, list | tuple):
        kinds = parts[:1] * len(value) if parts[-1] is Ellipsis else parts
        if len(kinds) == len(value):
            return tuple(_typed(kind, each, name) for kind, each in zip(kinds, value, strict=True))
    elif is_dataclass(hint):
        return built(hint, value)  # type: ignore[arg-type]
    elif hint is float and type(value) in (int, float) and math.isfinite(value):
        return float(value)
    elif hint in (bool, int, str, NoneType) and type(value) is hint:
        return value
    raise TypeError(repr(name))
