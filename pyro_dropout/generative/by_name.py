"""A readable error for functions that cannot be pickled.

Python pickles a function as its module and qualified name. A lambda, or a function inside another, has no name that
another process could look up, and Python's own message does not say which argument it was.
"""

import sys
from types import FunctionType

from pyro_dropout.mathematics.errors import PyroDropoutError

# These modules take any function: ``copy`` passes the same object on, the others serialise its code.
_OTHER_WAYS = {"copy", "cloudpickle", "dill"}


def check_named(owner: str, **functions: object) -> None:
    """Raise an error if a function among the arguments of the class ``owner``, by name, cannot be pickled."""
    for name, given in functions.items():
        if isinstance(given, FunctionType) and not _found(given) and not _goes_another_way():
            raise PyroDropoutError(
                f"{name} of {owner} cannot be pickled: {given.__qualname__} cannot be imported by name in another"
                " process. Define it with def at the top level of a module, or as a class with __call__ there."
            )


def _found(function: FunctionType) -> bool:
    """Whether a function can be found by its name, as unpickling requires."""
    found: object = sys.modules.get(function.__module__)
    for part in function.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is function


def _goes_another_way() -> bool:
    frame = sys._getframe(1)
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
        if _OTHER_WAYS & set(str(frame.f_globals.get("__name__", "")).split(".")):
            return True
    return False
