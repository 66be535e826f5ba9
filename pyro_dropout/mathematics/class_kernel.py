"""The moments of classes under Gaussian outputs, in one kernel on a GPU: nothing but the moments is written.

Whole operations would write the outputs at every quasi-random point, read them again for each moment, and take half as
long as a large network. Triton comes with torch where there is a GPU, and is imported when it is first needed.
"""

import functools
import importlib.util
from contextlib import nullcontext
from typing import Any, no_type_check

import torch
from torch import Tensor

_MOST_CLASSES = 32  # more would not stay in the registers of a program
_HELD = 4096  # outputs that a program looks at together
_WARPS = 4


def has_class_kernel(affine: Tensor) -> bool:
    """Whether the kernel takes these outputs; ``affine`` is (L, m) of each point, (N, C, C + 1)."""
    return (
        affine.is_cuda
        and affine.dtype == torch.float32
        and 1 < affine.shape[-2] <= _MOST_CLASSES
        and len(affine) > 0
        and importlib.util.find_spec("triton") is not None
    )


def class_moments(affine: Tensor, z: Tensor) -> dict[str, Tensor]:
    """Return the means over t of the softmax p of f = (L, m)(z_t, 1), and what else a prediction of classes has.

    Args:
        affine: (L, m) of each point, (N, C, C + 1), in float32.
        z: standard normal points and a row of ones, (C + 1, T); T is a power of two.

    Returns:
        "mean" and "spread" of p, (N, C); its mean entropy "surprise", (N,); and how often each class is the most
        probable one, "votes", (N, C).
    """
    points, classes, _ = affine.shape
    rows = 1 << (classes - 1).bit_length()
    count = z.shape[-1]
    mean, spread, votes = affine.new_empty(3, points, classes)
    surprise = affine.new_empty(points)
    tile = min(count, _HELD // rows)
    with torch.cuda.device(affine.device) if affine.is_cuda else nullcontext():
        _kernel()[(points,)](
            affine.contiguous(), z.contiguous(), mean, spread, surprise, votes, count, classes, rows, tile,
            num_warps=_WARPS,
        )  # fmt: skip
    return {"mean": mean, "spread": spread, "surprise": surprise, "votes": votes}


@functools.cache
def _kernel() -> Any:
    import triton
    import triton.language as tl

    @triton.jit
    @no_type_check
    def moments(affine, z, mean, spread, surprise, votes, T, C: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr):
        point = tl.program_id(0).to(tl.int64)
        c = tl.arange(0, ROWS)
        real = c < C
        own = affine + point * C * (C + 1) + c * (C + 1)
        middle = tl.load(own + C, mask=real, other=float("-inf"))
        weights = tl.exp(middle - tl.max(middle, 0))
        # Differences to p at the mean output lose no digits when they are squared.
        start = weights / tl.sum(weights, 0)
        sums = tl.zeros((ROWS,), dtype=tl.float32)
        squares = tl.zeros((ROWS,), dtype=tl.float32)
        won = tl.zeros((ROWS,), dtype=tl.float32)
        entropy = 0.0
        for first in range(0, T, TILE):
            t = first + tl.arange(0, TILE)
            f = tl.zeros((ROWS, TILE), dtype=tl.float32)
            for k in tl.static_range(C + 1):
                f += tl.load(own + k, mask=real, other=0.0)[:, None] * tl.load(z + k * T + t)[None, :]
            f = tl.where(real[:, None], f, float("-inf"))
            top = tl.max(f, 0)
            below = f - top[None, :]
            e = tl.exp(below)
            total = tl.sum(e, 0)
            p = e / total[None, :]
            entropy += tl.sum(tl.log(total) - tl.sum(p * tl.where(e > 0, below, 0.0), 0), 0)
            won += tl.sum(tl.where(below == 0, 1.0, 0.0), 1)
            apart = p - start[:, None]
            sums += tl.sum(apart, 1)
            squares += tl.sum(apart * apart, 1)
        shift = sums / T
        place = point * C + c
        tl.store(mean + place, start + shift, mask=real)
        variance = squares / T - shift * shift
        tl.store(spread + place, tl.where(variance < 0, 0.0, variance), mask=real)
        tl.store(votes + place, won / T, mask=real)
        tl.store(surprise + point, entropy / T)

    return moments
