"""Gaussian rows N(m, diag(σ²) + V Vᵀ) in standardised coordinates, safe from σ = 1e-12 to 1e3 in float32.

Two habits keep every value and gradient finite. Division by σ is multiplication by exp(-log σ), because the derivative
of 1/σ squares a number that may be huge already. And the factor A = V/σ is kept as B·C with the size of each column in
C, so that I + AᵀA = C (C⁻² + BᵀB) C is formed from numbers near one. Nothing larger than R×R is ever factorised.
"""

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_dropout.mathematics.shapes import Float
from pyro_dropout.protocols import Context

# Above this size the sweeps, one per column, cost more than a solver.
_SWEEPS = 32


class _LogDet(torch.autograd.Function):
    """log det G, whose slope is G⁻¹; both come from one elimination."""

    generate_vmap_rule = True

    @staticmethod
    def forward(matrix: Tensor) -> tuple[Tensor, Tensor]:
        if matrix.is_cuda and matrix.shape[-1] <= _SWEEPS:
            return _swept(matrix)
        cholesky = cholesky_or_nan(matrix)
        return 2 * cholesky.diagonal(dim1=-2, dim2=-1).log().sum(-1), torch.cholesky_inverse(cholesky)

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Context, slope: Tensor, _: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        found: Tensor = slope[..., None, None] * inverse
        return found


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


def semidefinite_root(matrix: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch n n"]:
    """Return L with L Lᵀ equal to a covariance matrix, which may be singular, or zero."""
    root: Tensor
    root, failed = torch.linalg.cholesky_ex(matrix)
    bad = failed > 0
    if bool(bad.any()):
        values, vectors = torch.linalg.eigh(matrix[bad])
        root = root.clone()
        root[bad] = vectors * values.clamp_min(0).sqrt().unsqueeze(-2)
    return root


def standardise(
    difference: Float[Tensor, "*batch rest"], log_scale: Float[Tensor, "*#batch rest"]
) -> Float[Tensor, "*out rest"]:
    """Return difference/σ, held inside a range whose squares still sum to a finite number."""
    # Past the limit a component's density has long underflowed, so the zero slope there is the true slope.
    limit = math.sqrt(torch.finfo(difference.dtype).max) * 1e-6
    return (difference * torch.exp(-log_scale)).clamp(-limit, limit)


@dataclass(frozen=True)
class Factor:
    """The low-rank part of a row's covariance, A = V/σ = B·C, with the Cholesky factor of G = C⁻² + BᵀB."""

    directions: Tensor  # B, (..., rest, R), with no element larger than one in size
    inverse_sizes: Tensor  # the diagonal of C⁻¹, (..., R)
    cholesky: Tensor  # of G, (..., R, R)
    log_det: Tensor  # log det(I + AAᵀ), (...)


def low_rank_factor(cov_factor: Float[Tensor, "*batch rest R"], log_scale: Float[Tensor, "*#batch rest"]) -> Factor:
    """Factorise diag(σ²) + V Vᵀ through R×R matrices only."""
    with torch.no_grad():  # any C gives the same determinant, so none of its slope is needed
        sizes = (cov_factor.abs().log() - log_scale.unsqueeze(-1)).amax(-2, keepdim=True).clamp_min(0)
    return factorised(cov_factor * torch.exp(-log_scale.unsqueeze(-1) - sizes), sizes.squeeze(-2))


def joint_log_det(directions: list[Tensor]) -> Tensor:
    """Return log det(I + AAᵀ) for A in blocks, (..., rest, R) each, through I + AᵀA."""
    gram = functools.reduce(torch.add, [a.mT @ a for a in directions])
    return log_det(gram + torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device))


def factorised(directions: Tensor, sizes: Tensor | None = None) -> Factor:
    """Factorise I + AAᵀ for A = B·C, given B, (..., rest, R), and the logarithms of C, (..., R); 0 by default."""
    sizes = torch.zeros_like(directions[..., 0, :]) if sizes is None else sizes
    inverse_sizes = torch.exp(-sizes)
    gram = directions.mT @ directions
    # A zero or repeated column leaves BᵀB singular, and C⁻² may have underflowed: one rounding error keeps it regular.
    jitter = 4 * torch.finfo(gram.dtype).eps * gram.diagonal(dim1=-2, dim2=-1).amax(-1, keepdim=True).detach()
    cholesky = cholesky_or_nan(gram + torch.diag_embed(inverse_sizes**2 + jitter))
    half = sizes.sum(-1) + cholesky.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    return Factor(directions, inverse_sizes, cholesky, 2 * half)


def mahalanobis(
    residual: Float[Tensor, "*batch rest"], factor: Factor | None, coefficients: Tensor | None = None
) -> Float[Tensor, "*out"]:
    """Return rᵀ(I + AAᵀ)⁻¹r for r = residual + A·coefficients, without forming A·coefficients.

    A draw is w = m + σε + Vη, so r = ε + Aη: for tiny σ the second term swallows the first when the two are added, and
    the form is instead the least value over c of ‖ε - Ac‖² + ‖η + c‖², a sum of squares with nothing to cancel.
    """
    if factor is None:
        return residual.square().sum(-1)
    b = (factor.directions.mT @ residual.unsqueeze(-1)).squeeze(-1)
    eta = torch.zeros_like(b) if coefficients is None else coefficients
    b = b - factor.inverse_sizes * eta
    c = torch.cholesky_solve(b.unsqueeze(-1), factor.cholesky).squeeze(-1)
    left = residual - (factor.directions @ c.unsqueeze(-1)).squeeze(-1)
    right = factor.inverse_sizes * c + eta
    return left.square().sum(-1) + right.square().sum(-1)
