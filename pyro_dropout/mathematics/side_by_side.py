"""Eigendecompositions of several matrices: one after another on a CPU, side by side on a GPU, which one leaves idle."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]
_THREADS = 8


def eigh_each(matrices: Sequence[Tensor]) -> list[Pair]:
    """Return eigenvalues and eigenvectors of symmetric matrices, as ``torch.linalg.eigh`` does of each; no gradients.

    Example:
        >>> import torch
        >>> [values.tolist() for values, _ in eigh_each([2 * torch.eye(2), torch.zeros(1, 1)])]
        [[2.0, 2.0], [0.0]]
    """
    with torch.no_grad():
        if len(matrices) < 2 or not all(matrix.is_cuda for matrix in matrices):
            return [_eigh(matrix) for matrix in matrices]
        _eigh(matrices[0].new_zeros(1, 1))  # torch loads its solvers at the first call, which must be one thread's
        with ThreadPoolExecutor(min(_THREADS, len(matrices))) as pool:
            begun = [(matrix, torch.cuda.current_stream(matrix.device)) for matrix in matrices]
            return list(pool.map(_on_own_stream, *zip(*begun, strict=True)))


def _eigh(matrix: Tensor) -> Pair:
    values, vectors = torch.linalg.eigh(matrix)
    return values, vectors


def _on_own_stream(matrix: Tensor, waiting: torch.cuda.Stream) -> Pair:
    """Decompose a matrix on a stream of its own, after what is queued on another one, which waits for the result."""
    own = torch.cuda.Stream(matrix.device)
    own.wait_stream(waiting)
    with torch.no_grad(), torch.cuda.stream(own):
        found = _eigh(matrix)
    waiting.wait_stream(own)
    for tensor in found:
        tensor.record_stream(waiting)
    return found
