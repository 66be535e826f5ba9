"""The checker that every annotated function of the package runs through in the tests."""

import random
from collections.abc import Callable
from typing import Any, Self, get_args

from beartype import BeartypeConf, beartype
from beartype._check.code import codemain

# Of a list, beartype checks one element, which it draws. With Python's own generator every check would change the
# random state of the program that is tested: a network that draws nothing would seem to.
assert hasattr(codemain, "getrandbits"), "beartype draws from somewhere else now; give it a generator of its own there"
codemain.getrandbits = random.Random(0).getrandbits  # type: ignore[attr-defined]

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
