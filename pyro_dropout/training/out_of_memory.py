"""Out-of-memory errors of a training step."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from pyro_dropout.errors import OutOfMemoryError

Result = TypeVar("Result")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: that of a GPU or, where the system says so, that of the CPU."""
    known = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return known or (isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error))


def unless_out_of_memory(work: Callable[[], Result]) -> Result | None:
    """Return the result of ``work``; None, with its memory released, if memory runs out."""
    try:
        return work()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    # Only here is the traceback released, which holds the tensors of the failed work.
    torch.cuda.empty_cache()
    return None


@contextmanager
def explained(points: int, less: str = "a smaller batch_size") -> Iterator[None]:
    """Within this context steps have some points each; torch's out-of-memory error is one that says what needs less."""
    try:
        yield
        return
    except (RuntimeError, MemoryError) as cause:
        if not is_out_of_memory(cause):
            raise
        said = str(cause).split(". ")[0]
    raise OutOfMemoryError(
        f"memory runs out in a step of {points} points: {said}. Use {less}, a smaller network, fewer particles"
        " (ELBO(num_particles=...)), or another device."
    )
