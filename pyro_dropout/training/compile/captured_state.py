"""What a model reads besides its arguments: variables of enclosing functions, globals, attributes of objects.

A compiled step holds fixed what it read while it was traced. Tensors that can be found again are passed to it at every
step; numbers, flags and the rest are compared with what they were, and a step whose surroundings have changed is
recompiled. What is out of reach here (the body of an imported package, a file) is not watched.
"""

import functools
import sys
import types
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from operator import getitem
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pyro_dropout.engines.program import Found

_MOST = 50_000  # the most objects that are looked into
_LARGE = 2**20  # the largest numpy array that is compared at every step
_BY_TEXT = {"globals", "vars", "eval", "exec", "__dict__", "__globals__", "modules", "import_module", "__import__"}
_PRIMITIVES = (bool, int, float, complex, str, bytes, type(None))
_SKIPPED = ("torch", "pyro", "numpy", "scipy", "builtins", "pandas", "matplotlib", "tqdm", "pyro_dropout")


@dataclass(slots=True, eq=False)
class Place:
    """Where a value is found: an attribute (``getattr``) or an item (``getitem``) of a holder."""

    get: Callable[[Any, Any], Any]
    holder: Any
    key: Any
    name: str

    def read(self) -> Any:
        """Return the value that is there now; ``Place`` itself if there is none any more."""
        try:
            return self.get(self.holder, self.key)
        except (AttributeError, KeyError, IndexError, ValueError):
            return Place


class CapturedState:
    """Everything that can be reached from a model, a guide and a loss without running them.

    Attributes:
        tensors: the tensors that were found, without those that are ``trained``, with a place for each.
        unwatched: what cannot be watched, and why; empty if everything can.
    """

    def __init__(self, roots: Sequence[object], trained: Iterable[Tensor]) -> None:
        self._watched: list[tuple[Place, Callable[[Any], bool]]] = []  # with whether a value is still the same
        self._named = {"cell_contents"}  # by all code that was seen
        self.tensors: list[tuple[Place, Tensor]] = []
        self.unwatched = ""
        known, met = set(map(id, trained)), dict[int, object]()
        waiting: deque[tuple[object, str]] = deque((root, "") for root in roots)
        while waiting and not self.unwatched:
            holder, name = waiting.popleft()
            if id(holder) in met:
                continue
            outermost = len(met) < len(roots)
            met[id(holder)] = holder
            if isinstance(holder, types.FunctionType) and (outermost or not _is_library(holder)):
                self._named |= set(_names(holder.__code__))
            if len(met) > _MOST:
                self.unwatched = f"more than {_MOST:,} objects can be reached from it, so they cannot all be watched"
            for place in _places(holder, name, outermost):
                value = place.read()
                if isinstance(value, Tensor):
                    self.tensors += [] if id(value) in known else [(place, value)]
                elif value is not Place and self._meet(place, value):
                    waiting.append((value, place.name))

    def _meet(self, place: Place, value: Any) -> bool:
        """Watch a value that is no tensor, and return whether to look into it."""
        if isinstance(value, _PRIMITIVES):
            self._watched.append((place, functools.partial(_equal, value)))
        elif isinstance(value, array):
            self._watched.append((place, functools.partial(_equal, array(value.typecode, value))))
        elif isinstance(value, np.ndarray):
            if value.size > _LARGE:
                self.unwatched = f"{place.name} is a numpy array of {value.size} numbers; use a tensor"
            self._watched.append((place, functools.partial(np.array_equal, value.copy())))
        elif not isinstance(value, type | types.ModuleType) or not _is_library(value):
            length = _length(value)
            self._watched.append((place, lambda now: now is value and _length(value) == length))
            return True
        return False

    def watch(self, lifted: Iterable[Found]) -> None:
        """Watch all tensors except those that a step receives from now on, each from the place that is given here."""
        given = {id(tensor): place for place, tensor in lifted}
        for place, tensor in self.tensors:
            own = given.get(id(tensor))
            if own is not None:  # by another name it must stay the same tensor: the step may have read that one
                self._watched.append((place, functools.partial(_found_at, own)))
            elif not tensor.is_inference():
                self._watched.append((place, functools.partial(_untouched, tensor, tensor._version)))

    def changed(self) -> Place | None:
        """Return a place that has changed; None if none has."""
        return next((place for place, same in self._watched if not same(place.read())), None)

    def may_forget(self, place: Place) -> bool:
        """Whether no code that was seen names what is there: a counter that is compared with 100 matters at 100."""
        key, holder = place.key, place.holder
        seen = isinstance(holder, dict) or not _is_library(type(holder))
        return seen and isinstance(key, str) and key not in self._named and not key.startswith("__")

    def forget(self, places: Iterable[Place]) -> None:
        """Stop watching these places: changes there have not changed the program."""
        gone = {(id(place.holder), place.key) for place in places}
        self._watched = [row for row in self._watched if (id(row[0].holder), row[0].key) not in gone]


def _equal(before: Any, now: Any) -> bool:
    same = now is before or (type(now) is type(before) and now == before)
    return bool(same or (before != before and now != now))  # a NaN equals a NaN here


def _found_at(place: Any, now: object) -> bool:
    return now is place.read()


def _untouched(tensor: Tensor, version: int, now: object) -> bool:
    return now is tensor and tensor._version == version


def _length(value: object) -> int:
    return len(value) if isinstance(value, dict | list | set | deque) else -1


def _is_library(value: object) -> bool:
    """Whether a function, class or module belongs to Python or to an installed package, not to the user's script."""
    name = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
    root = str(name or "builtins").split(".")[0]
    if root in _SKIPPED or root in sys.stdlib_module_names:
        return root != "__main__"
    file = getattr(sys.modules.get(str(name)), "__file__", None) or ""
    return "site-packages" in file


def _places(value: object, name: str, outermost: bool) -> Iterator[Place]:
    """Yield the places in a value."""
    at = f"{name}." if name else ""
    if isinstance(value, types.MethodType):
        yield Place(getattr, value, "__self__", f"{at}self")
        yield Place(getattr, value, "__func__", name)
    elif isinstance(value, types.FunctionType):
        yield from _variables(value, at)
        if outermost or not _is_library(value):
            yield from _globals(value)
    elif isinstance(value, functools.partial):
        for part in ("func", "args", "keywords"):
            yield Place(getattr, value, part, name)
    elif isinstance(value, property | staticmethod | classmethod):
        yield Place(getattr, value, "fget" if isinstance(value, property) else "__func__", name)
    elif isinstance(value, ContextVar | weakref.ref):
        yield Place(_held, value, None, name)
    elif isinstance(value, dict | list | tuple | deque):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield Place(getitem, value, key, f"{name}[{key!r}]")
    elif isinstance(value, type):  # as it is written there: a property, and not what it returns
        for key in vars(value):
            if not key.startswith("__") and not isinstance(vars(value)[key], types.MemberDescriptorType):
                yield Place(_written, value, key, f"{at}{key}")
    elif not isinstance(value, types.ModuleType | torch.Generator):
        if hasattr(value, "__dict__"):
            yield from _of_module(value, at) if isinstance(value, nn.Module) else _attributes(value, at)
        if not _is_library(type(value)):
            for key in (key for kind in type(value).__mro__ for key in _slots(kind)):
                yield Place(getattr, value, key, f"{at}{key}")
            yield Place(getattr, value, "__class__", f"{at}{type(value).__name__}")


def _held(value: ContextVar[Any] | weakref.ref[Any], key: None) -> object:
    """Return what a context variable or a weak reference stands for now."""
    return value() if isinstance(value, weakref.ref) else value.get(None)


def _written(kind: type, key: str) -> object:
    """Return what a class has under a name, without asking its descriptors."""
    return vars(kind)[key]


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def _attributes(value: object, at: str) -> Iterator[Place]:
    for key in vars(value):
        yield Place(getattr, value, key, f"{at}{key}")


def _of_module(module: nn.Module, at: str) -> Iterator[Place]:
    """Yield what a module holds besides its buffers: its attributes, its submodules, its parameters."""
    ours = type(module).__module__.startswith(("pyro_dropout.", "pyro.infer.autoguide"))
    for key, value in vars(module).items():
        if key in ("_buffers", "_pyro_context") or "_hook" in key or key.startswith("_non_persistent"):
            continue
        if key in ("_modules", "_parameters"):  # only parameters that are not trained
            for child in value:
                yield Place(getitem, value, child, f"{at}{child}")
        # A guide's internal state does not change; its settings may be changed by a user.
        elif not ours or (not key.startswith("_") and isinstance(value, _PRIMITIVES)):
            yield Place(getattr, module, key, f"{at}{key}")


def _variables(function: types.FunctionType, at: str) -> Iterator[Place]:
    """Yield the variables of enclosing functions, and the default values of arguments."""
    for key, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        yield Place(getattr, cell, "cell_contents", f"{at}{key}")
    for part in ("__defaults__", "__kwdefaults__", "__wrapped__"):
        if getattr(function, part, None) is not None:
            yield Place(getattr, function, part, f"{at}{function.__name__}")
    yield from _attributes(function, at)


def _globals(function: types.FunctionType) -> Iterator[Place]:
    """Yield the globals that the code of a function names, and the attributes of modules.

    A text, such as the name of a site, names a global only where code looks globals up by text.
    """
    names, own = set(_names(function.__code__)), set(_names(function.__code__, texts=False))
    for key in sorted((names if own & _BY_TEXT else own) & function.__globals__.keys()):
        value = function.__globals__[key]
        if isinstance(value, types.ModuleType):
            if not _is_library(value):
                for inner in sorted(names & vars(value).keys()):
                    yield Place(getattr, value, inner, f"{key}.{inner}")
        elif not (isinstance(value, type | types.FunctionType | types.BuiltinFunctionType) and _is_library(value)):
            yield Place(getitem, function.__globals__, key, key)


def _names(code: types.CodeType, texts: bool = True) -> Iterator[str]:
    yield from code.co_names
    yield from (each for each in code.co_consts if texts and isinstance(each, str))
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names(inner, texts)
