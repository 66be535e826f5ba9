"""Out-of-memory errors of a training step: a mini-batch that fits is found by trying."""

from collections.abc import Callable
from typing import TypeVar

import torch

from pyro_dropout.errors import OutOfMemoryError
from pyro_dropout.generative.random_state import forked

Result = TypeVar("Result")

LESS = "a smaller network, fewer particles (ELBO(num_particles=...))"  # of what memory is needed for


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


def explained(work: Callable[[], Result], step: Callable[[int], object], points: int, less: str = LESS) -> Result:
    """Run ``work``; torch's out-of-memory error becomes one that names a mini-batch that fits.

    Args:
        work: takes steps of some points each.
        step: takes the gradient of some points and discards it, to try how many fit.
        points: how many points a step of ``work`` has.
        less: what to do if not even a single point fits.
    """
    try:
        return work()
    except (RuntimeError, MemoryError) as cause:
        if not is_out_of_memory(cause):
            raise
        said = str(cause).split(". ")[0]
    # The failed step's memory is free only here, where the error is no longer referenced.
    found = _largest(step, points)
    if found is None:
        advice = f", and even in one of a single point: {said}. Use {less}, or another device."
    else:
        advice = f". A step of {found} was tried and fits: give fit(batch_size={found})."
    raise OutOfMemoryError(f"memory runs out in a step of {points} points{advice}")


def _largest(step: Callable[[int], object], points: int) -> int | None:
    """Return the largest power of two below ``points`` that a step can take, with a quarter to spare; None if none can.

    The quarter is for what a training run needs besides its step: fragmentation, prefetched batches, compiled graphs.
    """
    size = 1 << max(points - 1, 1).bit_length() - 1

    def tried() -> int:
        with forked():
            step(size + size // 4)
        return size

    torch.cuda.empty_cache()
    while size and unless_out_of_memory(tried) is None:
        size //= 2
    return size or None
