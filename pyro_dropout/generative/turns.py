"""Threads take turns: the random generators, Pyro's handlers and its parameter store belong to the whole process.

So do the modes and the buffers of a network. Whatever runs a model takes ``RUNNING``, for as long as it changes any of
these.
"""

import functools
import os
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class Turn:
    """A lock that a thread may take again while it has it, and takes back only after a thread that waits for it.

    With ``threading.RLock`` alone, a thread that predicts in a loop would take the lock back before any other wakes up.

    Example:
        >>> from pyro_dropout.generative.turns import Turn
        >>> turn = Turn()
        >>> with turn, turn:
        ...     print(turn.take_if_free())
        False
    """

    def __init__(self) -> None:
        self._lock, self._next = threading.RLock(), threading.Lock()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._alone)

    def _alone(self) -> None:
        """Forget the other threads in a child process, which has none that could give the lock back."""
        self._next = threading.Lock()
        if not self._lock._is_owned():  # type: ignore[attr-defined]
            self._lock = threading.RLock()

    def __enter__(self) -> None:
        if self._lock._is_owned():  # type: ignore[attr-defined]
            self._lock.acquire()
            return
        with self._next:  # held by the thread that is next, until it has the lock
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.give_back()

    def take_if_free(self) -> bool:
        """Take the lock if no thread has it, nor this one; return whether it did."""
        return not self._lock._is_owned() and self._lock.acquire(blocking=False)  # type: ignore[attr-defined]

    def give_back(self) -> None:
        """Give the lock back."""
        self._lock.release()


RUNNING = Turn()


def one_at_a_time(run: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Let a function that runs a model wait until no other thread does."""

    @functools.wraps(run)
    def alone(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        with RUNNING:
            return run(*args, **kwargs)

    return alone
