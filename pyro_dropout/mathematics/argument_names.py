"""Second names of arguments: those that Pyro and scikit-learn use, beside ours; and those that will go."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from pyro_dropout.errors import warn_caller

Called = TypeVar("Called", bound=Callable[..., Any])  # a function, or a class with its constructor
GONE_IN = "2.0"


def also(**names: str) -> Callable[[Called], Called]:
    """Let arguments be given by other names too, as in ``also(num_samples="samples")``; both is a ``TypeError``."""
    return functools.partial(_renamed, names, False)


def formerly(**names: str) -> Callable[[Called], Called]:
    """Do the same for names that will be removed, as in ``formerly(old="new")``: each use warns."""
    return functools.partial(_renamed, names, True)


def _renamed(names: dict[str, str], warn: bool, called: Called) -> Called:
    if isinstance(called, type):  # a class: by its constructor, and the class stays itself
        called.__init__ = _renamed(names, warn, called.__init__)  # type: ignore[misc]
        return called
    label = called.__qualname__.removesuffix(".__init__")
    taken = inspect.signature(called).parameters.values()
    places = [each.name for each in taken if each.kind is each.POSITIONAL_OR_KEYWORD]

    @functools.wraps(called)
    def with_names(*args: object, **kwargs: object) -> object:
        for name in names.keys() & kwargs.keys():
            ours = names[name]
            if ours in kwargs or ours in places[: len(args)]:
                raise TypeError(f"{label}() got both {name!r} and {ours!r}, two names of one argument; give one.")
            if warn:
                said = f"the argument {name!r} of {label}() will be removed in version {GONE_IN}; use {ours!r}."
                warn_caller(said, DeprecationWarning)
            kwargs[ours] = kwargs.pop(name)
        return called(*args, **kwargs)

    return with_names  # type: ignore[return-value]
