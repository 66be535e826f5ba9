"""The paper's q(w), and multiplicative and low-rank noise, as mixtures over the rows of a tensor (eqs. 10-12, §5)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pyro_dropout.errors import ShapeError
from pyro_dropout.mathematics.checks import check_finite, check_keep, check_non_negative, check_positive
from pyro_dropout.mathematics.gaussian_rows import Factor, factorised, joint_log_det
from pyro_dropout.mathematics.row_mixture_distribution import RowMixture
from pyro_dropout.mathematics.shapes import Float, RowDim, RowLayout
from pyro_dropout.mathematics.weight_distribution import as_like, drawn

__all__ = ["BernoulliMixture", "LowRankNormal", "MultiplicativeNormal", "RowMixture"]


class BernoulliMixture(RowMixture):
    """Dropout's q(w): each row is kept, at ``loc``, with probability ``keep``, and is zero otherwise.

    ``scale`` is the width σ of both components; at 0, the default, draws are exactly z∘M, which is dropout.

    Equation: eq10-12.

    Args:
        loc: the variational mean M of the kept rows, (*shape).
        keep: probability that a row is kept, in (0, 1]; a number, or one for each row.
        scale: standard deviation σ >= 0, broadcast to ``loc``.
        row_dim: the dimension that indexes rows: 1 for torch's Linear and ConvNd weights.
        validate_args: check the values once, here; on by default.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> _ = torch.manual_seed(0)
        >>> q = pdrop.paper.BernoulliMixture(torch.ones(2, 4), keep=0.5)
        >>> w = q.sample()
        >>> bool(((w == 0) | (w == 1)).all()), bool((w[0] == w[1]).all())  # a dropped row is a zero column
        (True, True)
        >>> q.mean[0, 0].item()
        0.5
    """

    def __init__(
        self,
        loc: Float[Tensor, "*shape"],
        keep: float | Tensor,
        scale: float | Tensor = 0.0,
        row_dim: RowDim = 1,
        *,
        validate_args: bool | None = None,
    ) -> None:
        if validate_args is not False:
            check_finite("loc", loc)
            check_keep("keep", keep)
        kept = as_like(keep, loc)
        RowLayout(loc.shape, row_dim).check_per_row("keep", kept)
        self._build([loc, None], scale, torch.stack([kept, 1 - kept], -1), row_dim, None, validate_args is not False)

    @property
    def loc(self) -> Tensor:
        """The mean M of the kept rows."""
        return self.like

    @property
    def keep(self) -> Tensor:
        """The probability that each row is kept, (rows,)."""
        return self.probs[:, 0]


class MultiplicativeNormal(RowMixture):
    """Weights multiplied by Gaussian noise N(1, α): w = loc·(1 + √α ε), plus independent noise of width ``scale``.

    One ε for each row is Gaussian dropout, singular at ``scale=0`` as dropout is; with ``scale`` > 0 it is a Gaussian
    whose rows have the rank-one covariance factor √α·loc. One ε for each weight, ``row_dim=None``, always has
    a density.

    Equation: sec5-multiplicative.

    Args:
        loc: the mean of the weights, (*shape).
        alpha: variance α > 0 of the multiplicative noise; a number, one for each row, or with ``row_dim=None`` any
            shape that broadcasts to ``loc``.
        scale: standard deviation of the added noise, >= 0.
        row_dim: the dimension that indexes rows, or None for independent noise on every weight.
        validate_args: check the values once, here; on by default.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> q = pdrop.paper.MultiplicativeNormal(torch.full((2, 3), 2.0), alpha=0.25, row_dim=None)
        >>> q.mean[0, 0].item(), q.variance[0, 0].item()
        (2.0, 1.0)
    """

    def __init__(
        self,
        loc: Float[Tensor, "*shape"],
        alpha: float | Tensor,
        scale: float | Tensor = 0.0,
        row_dim: RowDim = 1,
        *,
        validate_args: bool | None = None,
    ) -> None:
        if validate_args is not False:
            check_finite("loc", loc)
            check_positive("alpha", alpha)
            check_non_negative("scale", scale)
        self.alpha = alpha = as_like(alpha, loc)
        one = loc.new_ones(1)
        if row_dim is None:
            try:
                spread = torch.hypot(loc * alpha.sqrt(), as_like(scale, loc)).expand(loc.shape)
            except RuntimeError:
                got = f"{tuple(alpha.shape)} and {tuple(torch.as_tensor(scale).shape)}"
                raise ShapeError(
                    f"alpha and scale must broadcast to loc, shape {tuple(loc.shape)}; got {got}."
                ) from None
            super().__init__(loc.unsqueeze(0), spread, one, None, validate_args=validate_args)
            return
        super().__init__(loc.unsqueeze(0), scale, one, row_dim, validate_args=validate_args)
        self.layout.check_per_row("alpha", alpha)
        self.relative = alpha.sqrt().expand(self.rows)
        factor = self.to_rows(loc) * self.relative.unsqueeze(-1)
        self._cov_factor = factor.unsqueeze(-1).unsqueeze(0)

    @property
    def loc(self) -> Tensor:
        """The mean of the weights."""
        return self.like


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
        self._build([loc], scale, loc.new_ones(1), "all", None, False)

    @property
    def cov_factor(self) -> Tensor:
        """V = σA, (1, 1, K, R)."""
        return (self.directions * self.scale.reshape(-1, 1))[None, None]

    def factor_variance(self) -> Tensor:
        """Return σ²·ΣA², what A adds to the variance of each weight, (1, 1, K)."""
        return (self.scale.reshape(-1).square() * self.directions.square().sum(-1))[None, None]

    def sample_coefficients(self, shape: Sequence[int]) -> Tensor:
        """Draw η, (*shape, R)."""
        return drawn(torch.randn, (*shape, self.directions.shape[-1]), self.like)

    def _assemble(self, labels: Tensor, noise: Tensor, coefficients: Tensor | None) -> Tensor:
        assert coefficients is not None
        standard = noise + coefficients @ self.directions.mT
        return self.to_rows(self.like) + self.to_rows(self.scale[0]) * standard

    def factor(self) -> Factor:
        """Return the factorised low-rank part, in units of σ."""
        return factorised(self.directions[None, None])

    def low_rank_log_det(self) -> Tensor:
        """Return log det(I + AAᵀ), (1, 1)."""
        return joint_log_det([self.directions]).reshape(1, 1)
