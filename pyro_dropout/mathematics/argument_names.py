"""Second names of arguments: those that Pyro and scikit-learn use, beside ours; and those that will go."""

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

Called = TypeVar("Called", bound=Callable[..., Any])  # a function, or a class with its constructor
GONE_IN = "0.2"


def also(**names: str) -> Callable[[Called], Called]:
    """Let arguments be given by other names too, as in ``also(num_samples="samples")``.

    A call with both names raises a ``TypeError``.

    Example:
        >>> from pyro_dropout.mathematics.argument_names import also
        >>> @also(num_samples="samples")
        ... def draw(samples=10):
        ...     return samples
        >>> draw(num_samples=3), draw(4)
        (3, 4)
    """
    return functools.partial(_renamed, names, False)


def formerly(**names: str) -> Callable[[Called], Called]:
    """Do the same for names that will be removed, as in ``formerly(old="new")``: each use warns.

    Example:
        >>> import warnings
        >>> from pyro_dropout.mathematics.argument_names import formerly
        >>> @formerly(keep="keep_last")
        ... def tidy(keep_last=3):
        ...     return keep_last
        >>> with warnings.catch_warnings(record=True) as said:
        ...     warnings.simplefilter("always")
        ...     print(tidy(keep=2), said[0].message)
        2 the argument 'keep' of tidy() will be removed in version 0.2; use 'keep_last'.
    """
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
                warnings.warn(said, DeprecationWarning, stacklevel=2)
            kwargs[ours] = kwargs.pop(name)
        return called(*args, **kwargs)

    return with_names  # type: ignore[return-value]
