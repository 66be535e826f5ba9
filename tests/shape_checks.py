"""The checker that every annotated function of the package runs through in the tests."""

from collections.abc import Callable
from typing import Any, Self, get_args

from beartype import BeartypeConf, beartype

# As for mypy, an int may stand where a float is asked for (the numeric tower of PEP 484).
_checker: Callable[[Any], Any] = beartype(conf=BeartypeConf(is_pep484_tower=True))


def _means_self(hint: Any) -> bool:
    return hint is Self or any(_means_self(part) for part in get_args(hint))


def checked(thing: Any) -> Any:
    """Return ``thing`` with its annotations checked at every call.

    ``Self`` is left out: methods are wrapped one at a time, before their class exists to be meant by it.
    """
    annotations = getattr(thing, "__annotations__", None)
    if annotations and not isinstance(thing, type):
        thing.__annotations__ = {name: hint for name, hint in annotations.items() if not _means_self(hint)}
    return _checker(thing)
