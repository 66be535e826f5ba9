"""What belongs to the whole process: the states of its random generators, and whose turn it is.

The states of torch's generators (on every device in use), Python's and numpy's are saved, restored and seeded. They,
Pyro's handlers and its parameter store are one for all threads, and so are the modes and the buffers of a network:
whatever runs a model takes ``RUNNING``, for as long as it changes any of these.
"""

import contextlib
import functools
import os
import random
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import NamedTuple, ParamSpec, TypeVar

import numpy as np
import torch
from pyro.poutine.runtime import _DIM_ALLOCATOR, _PYRO_STACK
from pyro.util import get_rng_state, set_rng_state
from torch import Tensor, nn

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Value = TypeVar("Value")


class RandomState(NamedTuple):
    """The states of all generators."""

    shared: dict[str, object]  # torch's on the CPU, Python's and numpy's
    on_gpus: list[Tensor]


def random_state() -> RandomState:
    """Return the states of all generators."""
    return RandomState(get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [])


def set_random_state(state: RandomState) -> None:
    """Restore the states of all generators."""
    set_rng_state(state.shared)
    if state.on_gpus:
        torch.cuda.set_rng_state_all(state.on_gpus)
    elif torch.cuda.is_initialized():  # only since then: as torch.manual_seed had left them
        torch.cuda.manual_seed_all(torch.initial_seed())


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed the generators of the CPU and of ``device``; ``torch.manual_seed`` would seed all other devices too."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - a model may draw from the generator that all share


@contextlib.contextmanager
def forked() -> Iterator[None]:
    """Restore the states of all generators on leaving the context; other threads that run models wait."""
    with RUNNING:
        state = random_state()
        try:
            yield
        finally:
            set_random_state(state)


def generators_stay(run: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Let a function with an argument ``seed`` leave all generators as they were, if a seed is given."""

    @functools.wraps(run)
    def same(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        with contextlib.nullcontext() if kwargs.get("seed") is None else forked():
            return run(*args, **kwargs)

    return same


@contextlib.contextmanager
def seeded(seed: int | None, device: torch.device) -> Iterator[None]:
    """Draw random numbers from a seed, and restore the generators on exit; without a seed, do nothing."""
    if seed is not None and device.type == "cuda":
        torch.cuda.init()  # otherwise its generator has no state yet to restore
    with contextlib.nullcontext() if seed is None else forked():
        if seed is not None:
            seed_generators(int(seed), device)
        yield


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
