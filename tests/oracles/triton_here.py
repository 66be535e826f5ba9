"""Whether kernels in Triton can run here: on a GPU, or by Triton's interpreter, for which ``conftest.py`` asks."""

import functools
from typing import Any

import pytest
import torch

PLACE = "cuda" if torch.cuda.is_available() else "cpu"


def needed() -> Any:
    """Return Triton; skip what needs it where it is not installed, or has an interpreter too old for numpy."""
    triton = pytest.importorskip("triton")
    if PLACE == "cpu" and not _interprets():
        reason = "Triton's interpreter does not work with this version of numpy, and there is no GPU"
        pytest.skip(reason, allow_module_level=True)
    return triton


@functools.cache
def _interprets() -> bool:
    """Whether the interpreter can count to a number that a kernel is given."""
    import triton
    import triton.language as tl

    @triton.jit
    def count(out, most):  # type: ignore[no-untyped-def]
        for k in range(0, most, 2):
            tl.store(out, k)

    found = torch.zeros(1, dtype=torch.int32)
    try:
        count[(1,)](found, 6)
    except Exception as cause:
        if "0-dimensional" in str(cause):  # numpy 2.4 no longer turns an array of one number into that number
            return False
        raise
    return int(found) == 4
