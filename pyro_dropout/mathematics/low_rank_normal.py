"""A Gaussian over a whole weight tensor whose covariance is σ(I + AAᵀ)σ: a diagonal, and R directions in its units.

Because A is in units of σ, it needs no rescaling before I + AᵀA is formed, however small σ is. A draw takes one pass
over A, and so does the R×R matrix.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from pyro_dropout.mathematics.gaussian_rows import Factor, joint_factor, joint_log_det
from pyro_dropout.mathematics.row_mixture_distribution import RowMixture
from pyro_dropout.mathematics.shapes import Float


class LowRankNormal(RowMixture):
    """One Gaussian for all weights of a tensor, w = m + σ∘(ε + Aη): a ``RowMixture`` of one component and one row.

    Args:
        loc: the mean, (*shape).
        scale: σ > 0, (*shape).
        directions: A, (K, R) for K weights.
    """

    def __init__(
        self, loc: Float[Tensor, "*shape"], scale: Float[Tensor, "*shape"], directions: Float[Tensor, "K R"]
    ) -> None:
        self.directions = directions
        self._spread: Tensor | None = None
        self._columns: list[tuple[Tensor, ...]] | None = None
        self._build([loc], scale, torch.ones(1, dtype=loc.dtype, device=loc.device), "all", None, False)

    @property
    def cov_factor(self) -> Tensor:
        """V = σA, (1, 1, K, R)."""
        if self._spread is None:
            self._spread = (self.directions * self.scale.reshape(-1, 1))[None, None]
        return self._spread

    def factor_columns(self) -> list[tuple[Tensor, ...]]:
        """Return the R columns of V, each (1, K) and contiguous, without V itself."""
        if self._columns is None:
            scale = self.scale.reshape(-1)
            self._columns = [((scale * column).unsqueeze(0),) for column in self.directions.unbind(-1)]
        return self._columns

    def factor_variance(self) -> Tensor:
        """Return σ²·ΣA², what A adds to the variance of each weight, (1, 1, K)."""
        return (self.scale.reshape(-1).square() * self.directions.square().sum(-1))[None, None]

    def sample_coefficients(self, shape: Sequence[int]) -> Tensor:
        """Draw η, (*shape, R)."""
        return torch.randn((*shape, self.directions.shape[-1]), dtype=self.like.dtype, device=self.like.device)

    def _assemble(self, labels: Tensor, noise: Tensor, coefficients: Tensor | None) -> Tensor:
        assert coefficients is not None
        standard = noise + coefficients @ self.directions.mT
        return self.to_rows(self.like) + self.to_rows(self.scale[0]) * standard

    def factor(self, log_scale: Tensor | None = None) -> Factor:
        """Return the factorised low-rank part, in units of σ."""
        return joint_factor([self.directions[None, None]])[0]

    def low_rank_log_det(self) -> Tensor:
        """Return log det(I + AAᵀ), (1, 1)."""
        return joint_log_det([self.directions]).reshape(1, 1)
