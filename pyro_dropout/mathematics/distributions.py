"""The paper's q(w), and multiplicative and low-rank noise, as mixtures over the rows of a tensor (eqs. 10-12, §5)."""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from pyro_dropout.errors import PyroDropoutError, ShapeError
from pyro_dropout.mathematics.checks import check_finite, check_keep, check_non_negative, check_positive
from pyro_dropout.mathematics.full_rank_normal import SharedNoise
from pyro_dropout.mathematics.gaussian_rows import Factor, factorised, joint_log_det, mahalanobis
from pyro_dropout.mathematics.row_mixture_distribution import RowMixture
from pyro_dropout.mathematics.shapes import Float, RowDim, RowLayout
from pyro_dropout.mathematics.weight_distribution import LOG_2PI, as_like, drawn, is_placeholder

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


class SharedFactor(SharedNoise):
    """What sites that are drawn from one low-rank Gaussian share in a draw: η, each other's ε, and one log det."""

    def __init__(self, directions: dict[str, Tensor]) -> None:
        super().__init__(next(iter(directions.values())).shape[-1])
        self.directions = directions
        self.noise: dict[str, Tensor] = {}

    @cached_property
    def log_det(self) -> Tensor:
        """The joint log det(I + AAᵀ) for each number of a site, computed on first use."""
        blocks = list(self.directions.values())
        return joint_log_det(blocks) / sum(map(len, blocks))

    def draw(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Return η for ``shape`` draws, (*shape, R); with a new one, what sites have noted of the last is forgotten."""
        before, found = self.drawn, super().draw(shape, like)
        self.noise = self.noise if found is before else {}
        return found

    def surplus(self) -> Tensor:
        """Return (ε + Aη)ᵀ(I + AAᵀ)⁻¹(ε + Aη), with the ε and A of all sites, less its expectation: their number."""
        if self.drawn is None or len(self.noise) != len(self.directions):
            raise PyroDropoutError("the joint density of a network-wide low-rank guide needs a draw of all its sites.")
        noise = torch.cat([self.noise[name] for name in self.directions], -1)
        factor = factorised(torch.cat([*self.directions.values()]))
        return mahalanobis(noise, factor, self.drawn).squeeze(-1) - noise.shape[-1]


class LowRankNormal(RowMixture):
    """One Gaussian for all weights of a tensor, w = m + σ∘(ε + Aη): a ``RowMixture`` of one component and one row.

    With ``shared`` it is one of several sites that are drawn together: they share η, and the joint determinant in
    proportion to their sizes, and have their shares of the density of whole draws only.

    Args:
        loc: the mean, (*shape).
        scale: σ > 0, (*shape).
        directions: A, (K, R) for K weights.
        shared: what the sites share, if there are several.
        site: the name of this one.
    """

    def __init__(
        self,
        loc: Float[Tensor, "*shape"],
        scale: Float[Tensor, "*shape"],
        directions: Float[Tensor, "K R"],
        shared: SharedFactor | None = None,
        site: str = "",
    ) -> None:
        self.directions, self.shared, self.site, self.joint = directions, shared, site, shared is not None
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
        if self.shared is not None:
            return self.shared.draw(shape, self.like)
        return drawn(torch.randn, (*shape, self.directions.shape[-1]), self.like)

    def _assemble(self, labels: Tensor, noise: Tensor, coefficients: Tensor | None) -> Tensor:
        assert coefficients is not None
        if self.shared is not None:
            self.shared.noise[self.site] = noise
        standard = noise + coefficients @ self.directions.mT
        return self.to_rows(self.like) + self.to_rows(self.scale[0]) * standard

    def factor(self) -> Factor:
        """Return the factorised low-rank part, in units of σ."""
        return factorised(self.directions[None, None])

    def low_rank_log_det(self) -> Tensor:
        """Return log det(I + AAᵀ), (1, 1), or this site's share of it."""
        found = joint_log_det([self.directions]) if self.shared is None else self.shared.log_det * self.rest
        return found.reshape(1, 1)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density of ``value``, or of the last draw this site's share; the shares add up."""
        if self.shared is None or is_placeholder(value):
            return super().log_prob(value)
        made = self._made_of(value)
        assert made is not None
        log_det = 2 * self.log_scale().sum() + self.low_rank_log_det().squeeze()
        # Every share expects as many as it has numbers: beside a site whose KL is in closed form it must not be moved.
        form: Tensor = made.noise.new_full(made.noise.shape[:-2], self.rest)
        if self.site == next(iter(self.shared.directions)):
            form = form + self.shared.surplus()
        return -0.5 * (form + log_det + self.rest * LOG_2PI)
