"""Threads take turns: the random generators, Pyro's handlers and its parameter store belong to the whole process.

So do the modes and the buffers of a network. Whatever runs a model takes ``RUNNING``, for as long as it changes any of
these.
"""

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import ParamSpec, TypeVar

import torch
from pyro.poutine.runtime import _DIM_ALLOCATOR, _PYRO_STACK
from torch import nn

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Value = TypeVar("Value")


class Turn:
    """A lock that a thread may take again while it has it, and that a child process does not inherit from others."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._alone)

    def _alone(self) -> None:
        """Forget the other threads in a child process, which has none that could give the lock back."""
        if not self.taken_here():
            self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def take_if_free(self) -> bool:
        """Take the lock if no thread has it, nor this one; return whether it did."""
        return not self.taken_here() and self._lock.acquire(blocking=False)

    def taken_here(self) -> bool:
        """Return whether this thread has the lock."""
        return bool(self._lock._is_owned())  # type: ignore[attr-defined]


RUNNING = Turn()


def one_at_a_time(run: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Let a function that runs a model wait until no other thread does, and leave nothing behind when it fails.

    Ctrl-C raises between any two instructions, also after ``torch.no_grad()`` has switched gradients off and before its
    ``with`` block begins. The same holds of Pyro's handlers and plates, and of this lock.
    """

    @functools.wraps(run)
    def alone(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        handlers, plates = len(_PYRO_STACK), list(_DIM_ALLOCATOR._stack)
        gradients, had = torch.is_grad_enabled(), RUNNING.taken_here()
        try:
            with RUNNING:
                return run(*args, **kwargs)
        except BaseException:
            torch.set_grad_enabled(gradients)
            del _PYRO_STACK[handlers:]
            _DIM_ALLOCATOR._stack[:] = plates
            while RUNNING.taken_here() and not had:
                RUNNING.__exit__()
            raise

    return alone


def modules_stay(run: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Let a function of modules leave them with their own parameters, also if Ctrl-C ends it amid a swap of weights."""

    @functools.wraps(run)
    def whole(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        modules = [each for part in args if isinstance(part, nn.Module) for each in part.modules()]
        own = [(each._parameters, dict(each._parameters)) for each in modules]
        try:
            return run(*args, **kwargs)
        except BaseException:
            for now, before in own:
                now.update({k: v for k, v in before.items() if not isinstance(now.get(k), nn.Parameter)})
            raise

    return whole


@contextlib.contextmanager
def bound(variable: ContextVar[Value], value: Value) -> Iterator[None]:
    """Within this context a context variable has another value."""
    before = variable.get()
    try:  # Ctrl-C may come as soon as the variable is set
        variable.set(value)
        yield
    finally:
        variable.set(before)
