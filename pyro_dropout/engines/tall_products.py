"""One pass over a tall matrix A on a GPU: A·η, the sums of squares along its rows, and AᵀA.

A low-rank step needs these three for a matrix that fits no cache, and each alone would read all of it. Here a thread
keeps a row in registers and all R(R + 1)/2 products of its columns with it, in full float32. Triton comes with torch
where there is a GPU, and is imported when a tensor on a GPU first needs it.
"""

import functools
from typing import Any, no_type_check

import torch
from torch import Tensor

# The products that a thread keeps take R(R + 1)/2 registers; above this rank they would spill.
MOST_COLUMNS = 16

_ROWS = 32  # rows that one program takes at a time, one per thread; one warp, which waits for no other
_PROGRAMS = 2112  # at most: sixteen for each processor of an H200


@torch.library.custom_op("pyro_dropout::one_pass", mutates_args=())
def one_pass(a: Tensor, eta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return A·η, (K,), Σ A² along rows, (K,), and parts of AᵀA that are still to be summed, (parts, R, R).

    Args:
        a: A, (K, R), contiguous.
        eta: η, (R,).
    """
    products, squares, parts = _places(a)
    if a.is_cuda:
        _kernel()[(len(parts),)](a, eta, products, squares, parts, *a.shape, _ROWS, num_warps=1)
    else:
        products, squares, parts = a @ eta, a.square().sum(-1), (a.mT @ a).expand_as(parts) / len(parts)
    return products, squares, parts.contiguous()


@one_pass.register_fake
def _places(a: Tensor, eta: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    rows, columns = a.shape
    programs = min(_PROGRAMS, -(-rows // _ROWS))
    return a.new_empty(rows), a.new_empty(rows), a.new_empty(programs, columns, columns)


@functools.cache
def _kernel() -> Any:
    import triton
    import triton.language as tl

    @triton.jit
    @no_type_check
    def walk(a, eta, products, squares, parts, K, R: tl.constexpr, ROWS: tl.constexpr):
        program = tl.program_id(0)
        sums = ()
        for _ in tl.static_range(R * (R + 1) // 2):
            sums = sums + (tl.zeros((ROWS,), dtype=tl.float32),)  # noqa: RUF005 - Triton knows tuples by +
        for start in range(program * ROWS, K, tl.num_programs(0) * ROWS):
            rows = start + tl.arange(0, ROWS)
            inside = rows < K
            columns = ()
            for r in tl.static_range(R):
                columns = columns + (tl.load(a + rows * R + r, mask=inside, other=0.0),)  # noqa: RUF005
            product = tl.zeros((ROWS,), dtype=tl.float32)
            square = tl.zeros((ROWS,), dtype=tl.float32)
            more = ()
            for r in tl.static_range(R):
                product += columns[r] * tl.load(eta + r)
                square += columns[r] * columns[r]
                for s in tl.static_range(r + 1):
                    more = more + (sums[r * (r + 1) // 2 + s] + columns[r] * columns[s],)  # noqa: RUF005
            sums = more
            tl.store(products + rows, product, mask=inside)
            tl.store(squares + rows, square, mask=inside)
        for r in tl.static_range(R):
            for s in tl.static_range(r + 1):
                total = tl.sum(sums[r * (r + 1) // 2 + s], 0)
                tl.store(parts + (program * R + r) * R + s, total)
                tl.store(parts + (program * R + s) * R + r, total)

    return walk
