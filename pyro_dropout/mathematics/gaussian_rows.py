"""Gaussian rows N(m, diag(σ²) + V Vᵀ) in standardised coordinates, safe from σ = 1e-38 to 1e3 in float32.

Two habits keep every value and gradient finite. Division by σ is multiplication by exp(-log σ), because the derivative
of 1/σ squares a number that may be 1e38 already. And the factor A = V/σ is kept as B·C with the size of each column in
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


# Slopes past the range of their type stop here, with room for what else is added to them.
_NEARLY_ALL = 0.75


class _LogWidth(torch.autograd.Function):
    """log σ with a slope that stays in the range of its type, where the true one may not: at σ = 1e-38 it is 1e38."""

    generate_vmap_rule = True

    @staticmethod
    def forward(scale: Tensor) -> Tensor:
        return scale.log()

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Context, slope: Tensor) -> Tensor:
        (scale,) = ctx.saved_tensors
        # Components may all hang on one σ, and then their slopes are added up: it is the sum that has to fit.
        room = _NEARLY_ALL * torch.finfo(scale.dtype).max * scale.amin(0, keepdim=True)
        held = slope * (room / slope.abs().sum(0, keepdim=True)).clamp_max(1)
        found: Tensor = held / scale
        return found


def _furthest(like: Tensor) -> float:
    """Return the largest distance in units of σ that is told from others."""
    return math.sqrt(torch.finfo(like.dtype).max) * 1e-6


class _Divided(torch.autograd.Function):
    """difference/σ, held in a range, with a slope that stays in range too: what adds up to nothing then still does."""

    generate_vmap_rule = True

    @staticmethod
    def forward(difference: Tensor, log_scale: Tensor) -> Tensor:
        # Past the limit a component's density has long underflowed, so the zero slope there is the true slope.
        limit = _furthest(difference)
        return (difference * torch.exp(-log_scale)).clamp(-limit, limit)

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1], output)
        ctx.shapes = inputs[0].shape, inputs[1].shape

    @staticmethod
    def backward(ctx: Context, slope: Tensor) -> tuple[Tensor, Tensor]:
        log_scale, ratio = ctx.saved_tensors
        slope = torch.where(ratio.abs() < _furthest(ratio), slope, 0.0)
        limit = _NEARLY_ALL * torch.finfo(slope.dtype).max
        by_difference = (slope * torch.exp(-log_scale)).clamp(-limit, limit)
        return by_difference.sum_to_size(ctx.shapes[0]), (-slope * ratio).sum_to_size(ctx.shapes[1])


def log_width(scale: Float[Tensor, "components *shape"]) -> Float[Tensor, "components *shape"]:
    """Return log σ of every component; its gradient is finite for every σ > 0."""
    found: Tensor = _LogWidth.apply(scale)  # type: ignore[no-untyped-call]
    return found


def standardise(
    difference: Float[Tensor, "*batch rest"], log_scale: Float[Tensor, "*#batch rest"]
) -> Float[Tensor, "*out rest"]:
    """Return difference/σ, held inside a range whose squares still sum to a finite number."""
    ratio: Tensor = _Divided.apply(difference, log_scale)  # type: ignore[no-untyped-call]
    return ratio


@dataclass(frozen=True)
class Factor:
    """The low-rank part of a row's covariance, A = V/σ = B·C, with the Cholesky factor of G = C⁻² + BᵀB.

    Attributes:
        directions: B, (..., rest, R), with no element larger than one in size.
        inverse_sizes: the diagonal of C⁻¹, (..., R).
        cholesky: the lower Cholesky factor of G, (..., R, R).
        log_det: log det(I + AAᵀ), (...).
    """

    directions: Tensor
    inverse_sizes: Tensor
    cholesky: Tensor
    log_det: Tensor

    def solve(self, b: Float[Tensor, "*batch R"]) -> Float[Tensor, "*out R"]:
        """Return G⁻¹ b."""
        return torch.cholesky_solve(b.unsqueeze(-1), self.cholesky).squeeze(-1)


def low_rank_factor(cov_factor: Float[Tensor, "*batch rest R"], log_scale: Float[Tensor, "*#batch rest"]) -> Factor:
    """Factorise diag(σ²) + V Vᵀ through R×R matrices only."""
    with torch.no_grad():  # any C gives the same determinant, so none of its slope is needed
        sizes = (cov_factor.abs().log() - log_scale.unsqueeze(-1)).amax(-2, keepdim=True).clamp_min(0)
    return _factorised([cov_factor * torch.exp(-log_scale.unsqueeze(-1) - sizes)], sizes.squeeze(-2))[0]


def joint_factor(directions: list[Tensor]) -> list[Factor]:
    """Factorise I + AAᵀ for A in blocks, (..., rest, R) each; each block keeps its own, and all share the rest."""
    return _factorised(directions, torch.zeros_like(directions[0][..., 0, :]))


def joint_log_det(directions: list[Tensor]) -> Tensor:
    """Return log det(I + AAᵀ) for A in blocks, (..., rest, R) each, through I + AᵀA."""
    if len(directions) == 1:
        return gram_log_det(directions[0])
    gram = functools.reduce(torch.add, [a.mT @ a for a in directions])
    return log_det(gram + torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device))


def _factorised(blocks: list[Tensor], sizes: Tensor) -> list[Factor]:
    """Factorise I + AAᵀ for A = B·C given as blocks of B, with the logarithms of C, (..., R)."""
    inverse_sizes = torch.exp(-sizes)
    gram = functools.reduce(torch.add, [b.mT @ b for b in blocks])
    # A zero or repeated column leaves BᵀB singular, and C⁻² may have underflowed: one rounding error keeps it regular.
    jitter = 4 * torch.finfo(gram.dtype).eps * gram.diagonal(dim1=-2, dim2=-1).amax(-1, keepdim=True).detach()
    cholesky = cholesky_or_nan(gram + torch.diag_embed(inverse_sizes**2 + jitter))
    half = sizes.sum(-1) + cholesky.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    return [Factor(directions, inverse_sizes, cholesky, 2 * half) for directions in blocks]


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
    if coefficients is not None:
        b = b - factor.inverse_sizes * coefficients
    c = factor.solve(b)
    left = residual - (factor.directions @ c.unsqueeze(-1)).squeeze(-1)
    right = factor.inverse_sizes * c
    if coefficients is not None:
        right = right + coefficients
    return left.square().sum(-1) + right.square().sum(-1)
