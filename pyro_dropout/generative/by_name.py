"""Functions that are pickled by their names, and what is said of those that have none to be found by.

Python pickles a function as the name of its module and its own. A lambda, or a function inside another, has no name
that another process could look up, and Python's own message does not say which argument it was.
"""

import sys
from types import FunctionType
from typing import Any

from pyro_dropout.mathematics.errors import PyroDropoutError

# These take functions as they are: ``copy`` hands the same one on, the others write its code down.
_OTHER_WAYS = {"copy", "cloudpickle", "dill"}


def check_named(owner: str, **functions: Any) -> None:
    """Raise an error if a function among the arguments of ``owner`` cannot be pickled; other arguments pass.

    Args:
        owner: the class whose arguments they are.
        functions: what was given, by the name of the argument.
    """
    nameless = [name for name, given in functions.items() if isinstance(given, FunctionType) and not _found(given)]
    if nameless and not _goes_another_way():
        given = functions[nameless[0]].__qualname__
        raise PyroDropoutError(
            f"{nameless[0]} of {owner} cannot be pickled: {given} has no name by which another process would find it."
            " Write it with def at the top of a module, or as a class with __call__ there."
        )


def _found(function: FunctionType) -> bool:
    """Whether looking a function up by its name finds it, as it must when it is read back."""
    found: Any = sys.modules.get(function.__module__)
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
