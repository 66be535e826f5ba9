"""Memory that an eager or a recorded step frees stays with the process, for the next step.

The C library of Linux gets a block of 128 KiB or more from the system and returns it as soon as it is freed. Such a
step frees some dozen of them, so every step would fault in the same pages again. The library raises its limit to the
size of the largest block that it has returned, up to 32 MiB: freeing one large block is enough.
"""

import functools

import torch
from torch import Tensor

_SMALLEST, _LARGEST = 2**17, 2**25  # bytes: the limit at first, and at most


@functools.cache
def _raise_limit() -> None:
    block = torch.empty(_LARGEST - 2**16, dtype=torch.uint8)
    del block


def keep_freed_memory(values: list[Tensor]) -> None:
    """Raise the limit once in a process, if temporaries of the size of these tensors lie between the two limits.

    Example:
        >>> import torch
        >>> from pyro_dropout.engines.malloc_threshold import keep_freed_memory
        >>> keep_freed_memory([torch.zeros(1000, 1000)])
    """
    if any(value.device.type != "cuda" and _SMALLEST <= value.nbytes < _LARGEST for value in values):
        _raise_limit()
