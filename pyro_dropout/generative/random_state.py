"""The states of the random generators of torch (on every device in use), Python and numpy: saved, restored, seeded."""

import contextlib
import functools
import random
from collections.abc import Callable, Iterator
from typing import NamedTuple, ParamSpec, TypeVar

import numpy as np
import torch
from pyro.util import get_rng_state, set_rng_state
from torch import Tensor

from pyro_dropout.generative.process_lock import RUNNING

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


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
