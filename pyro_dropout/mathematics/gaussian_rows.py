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


def standardise(
    difference: Float[Tensor, "*batch rest"], log_scale: Float[Tensor, "*#batch rest"]
) -> Float[Tensor, "*out rest"]:
    """Return difference/σ, held inside a range whose squares still sum to a finite number."""
    # Past the limit a component's density has long underflowed, so the zero slope of the clamp is the true slope.
    limit = math.sqrt(torch.finfo(difference.dtype).max) * 1e-6
    return (difference * torch.exp(-log_scale)).clamp(-limit, limit)


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
    return joint_factor([cov_factor], [log_scale])[0]


def joint_factor(cov_factors: list[Tensor], log_scales: list[Tensor]) -> list[Factor]:
    """Factorise one covariance whose rows come in several blocks; each block gets its own B, and all share the rest."""
    with torch.no_grad():  # any C gives the same determinant, so none of its slope is needed
        tops = [
            (v.abs().log() - s.unsqueeze(-1)).amax(-2, keepdim=True)
            for v, s in zip(cov_factors, log_scales, strict=True)
        ]
        sizes = functools.reduce(torch.maximum, tops).clamp_min(0)
    blocks = [v * torch.exp(-s.unsqueeze(-1) - sizes) for v, s in zip(cov_factors, log_scales, strict=True)]
    inverse_sizes = torch.exp(-sizes.squeeze(-2))
    gram = functools.reduce(torch.add, [b.mT @ b for b in blocks])
    # A zero or repeated column leaves BᵀB singular, and C⁻² may have underflowed: one rounding error keeps it regular.
    jitter = 4 * torch.finfo(gram.dtype).eps * gram.diagonal(dim1=-2, dim2=-1).amax(-1, keepdim=True).detach()
    cholesky = torch.linalg.cholesky(gram + torch.diag_embed(inverse_sizes**2 + jitter))
    log_det = 2 * (sizes.squeeze(-2).sum(-1) + cholesky.diagonal(dim1=-2, dim2=-1).log().sum(-1))
    return [Factor(directions, inverse_sizes, cholesky, log_det) for directions in blocks]


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
