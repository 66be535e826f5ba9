"""The log determinant of small positive definite matrices, with its gradient, in a few operations that fuse."""

import torch
from torch import Tensor

from pyro_dropout.mathematics.shapes import Float
from pyro_dropout.protocols import Context

# Above this size the sweeps, one per column, cost more than a solver.
_SWEEPS = 32


class _GramLogDet(torch.autograd.Function):
    """log det(I + AᵀA), whose slope in A is 2A(I + AᵀA)⁻¹: one product, where autograd would need two."""

    generate_vmap_rule = True

    @staticmethod
    def forward(directions: Tensor) -> tuple[Tensor, Tensor]:
        return gram_log_det_and_inverse(directions)

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(inputs[0], output[1])

    @staticmethod
    def backward(ctx: Context, slope: Tensor, _: Tensor) -> Tensor:
        directions, inverse = ctx.saved_tensors
        weights = 2 * slope[..., None, None] * inverse
        # The gradient lies in memory as A does: by row, or column by column.
        by_column = directions.stride(-1) > 1
        found: Tensor = (weights @ directions.mT).mT if by_column else directions @ weights
        return found


class _LogDet(torch.autograd.Function):
    """log det G, whose slope is G⁻¹; both come from one elimination."""

    generate_vmap_rule = True

    @staticmethod
    def forward(matrix: Tensor) -> tuple[Tensor, Tensor]:
        return _log_det_and_inverse(matrix)

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Context, slope: Tensor, _: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        found: Tensor = slope[..., None, None] * inverse
        return found


def gram_log_det_and_inverse(directions: Tensor) -> tuple[Tensor, Tensor]:
    """Return log det(I + AᵀA) and (I + AᵀA)⁻¹, without gradients."""
    gram = directions.mT @ directions
    return _log_det_and_inverse(gram + torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device))


def _log_det_and_inverse(matrix: Tensor) -> tuple[Tensor, Tensor]:
    if matrix.is_cuda and matrix.shape[-1] <= _SWEEPS:
        return _swept(matrix)
    cholesky = cholesky_or_nan(matrix)
    return 2 * cholesky.diagonal(dim1=-2, dim2=-1).log().sum(-1), torch.cholesky_inverse(cholesky)


def cholesky_or_nan(matrix: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch n n"]:
    """Return the lower Cholesky factors; nan where a matrix is not positive definite in its precision.

    torch raises an error instead, for all replicas of a fleet if one of them diverges; or leaves numbers half computed.
    """
    factor, failed = torch.linalg.cholesky_ex(matrix)
    found: Tensor = torch.where((failed == 0)[..., None, None], factor, torch.nan)
    return found


def _swept(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return log det G and G⁻¹ by Gauss-Jordan sweeps: on a GPU, a solver's launches cost more than the arithmetic."""
    index = torch.arange(matrix.shape[-1], device=matrix.device)
    log_det = torch.zeros_like(matrix[..., 0, 0])
    least = 4 * torch.finfo(matrix.dtype).eps * matrix.diagonal(dim1=-2, dim2=-1)  # a pivot may not round below this
    for k in range(matrix.shape[-1]):
        pivot = torch.maximum(matrix[..., k, k], least[..., k])[..., None]
        log_det = log_det + pivot.squeeze(-1).log()
        # One sweep exchanges the k-th unknown with the k-th right-hand side: after all of them, G has become G⁻¹.
        own = index == k
        column = matrix[..., :, k]
        row = torch.where(own, 1.0, matrix[..., k, :]) / pivot
        rest = torch.where(own, 0.0, matrix) - column[..., :, None] * row[..., None, :]
        matrix = torch.where(own[:, None], row[..., None, :], rest)
    return log_det, matrix


def log_det(matrix: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch"]:
    """Return log det of positive definite matrices; the gradient is their inverse, and there is no second gradient."""
    result: Tensor = _LogDet.apply(matrix)[0]  # type: ignore[no-untyped-call]
    return result


def gram_log_det(directions: Float[Tensor, "*batch K R"]) -> Float[Tensor, "*batch"]:
    """Return log det(I + AᵀA), which is log det(I + AAᵀ), for A with few columns; there is no second gradient."""
    result: Tensor = _GramLogDet.apply(directions)[0]  # type: ignore[no-untyped-call]
    return result


def semidefinite_root(matrix: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch n n"]:
    """Return L with L Lᵀ equal to a covariance matrix, which may be singular, or zero.

    Example:
        >>> import torch
        >>> matrix = torch.ones(2, 2)
        >>> root = semidefinite_root(matrix)
        >>> torch.allclose(root @ root.T, matrix)
        True
    """
    root: Tensor
    root, failed = torch.linalg.cholesky_ex(matrix)
    bad = failed > 0
    if bool(bad.any()):
        values, vectors = torch.linalg.eigh(matrix[bad])
        root = root.clone()
        root[bad] = vectors * values.clamp_min(0).sqrt().unsqueeze(-2)
    return root
