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
from pyro_dropout.mathematics.whole_sums import ScaledColumns, runs_on_cpu, scaled_columns


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
        self._build([loc], scale, torch.ones(1, dtype=loc.dtype, device=loc.device), "all", None, False)

    @property
    def cov_factor(self) -> Tensor:
        """V = σA, (1, 1, K, R)."""
        return self.once("factor", lambda: (self.directions * self.scale.reshape(-1, 1))[None, None])

    def factor_columns(self) -> list[tuple[Tensor, ...]]:
        """Return the R columns of V, each (1, K) and contiguous, without V itself."""
        return self.once("columns", self._made_columns)

    def _made_columns(self) -> list[tuple[Tensor, ...]]:
        parts, scale = self._parts(), self.scale.reshape(-1)
        columns = parts.columns if parts else tuple(scale * column for column in self.directions.unbind(-1))
        return [(column.unsqueeze(0),) for column in columns]

    def factor_squares(self) -> list[tuple[Tensor, ...]]:
        """Return Σv² of each column of V."""
        parts = self._parts()
        return [(each,) for each in parts.squares] if parts else super().factor_squares()

    def _parts(self) -> ScaledColumns | None:
        """Return the columns and what KL needs of them, from one pass over A; None unless both are wanted of a draw."""
        scale = self.scale.reshape(-1)
        if not (self.lenient and runs_on_cpu(scale)):
            return None
        return self.once("parts", lambda: scaled_columns(self.directions, scale, determinant=not self.joint))

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
        parts = self._parts()
        return (parts.log_det if parts else joint_log_det([self.directions])).reshape(1, 1)
