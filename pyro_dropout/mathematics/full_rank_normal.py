"""Gaussians with a full covariance matrix: over one tensor, or over several tensors that are drawn together.

The tensors of a block are laid end to end, w = m + Lε with a lower-triangular L. Tensor s has its rows of L, so it is
drawn given the tensors before it: q(w) = Π q(w_s | w_<s). Both log q of a draw and the KL to a Gaussian prior without
correlations are sums over tensors, exactly.

The layers of a Laplace approximation with Kronecker factors have the matrix (W, b) = M + U (s ∘ ε) Tᵀ, with orthogonal
U, widths s, and T = D^-½ V: nothing is as large as the square of the number of weights.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from pyro.distributions.util import sum_rightmost
from torch import Size, Tensor
from torch.distributions import Distribution, Independent, Normal, register_kl

from pyro_dropout.errors import PyroDropoutError, ShapeError
from pyro_dropout.mathematics.curvature import Kronecker
from pyro_dropout.mathematics.row_mixture_distribution import LOG_2PI, WeightDistribution
from pyro_dropout.mathematics.shapes import Float, base_distribution, broadcast_shape


class FullRankNormal(WeightDistribution):
    """One Gaussian over all numbers of a tensor, w = m + Rε: its covariance is R Rᵀ.

    Args:
        loc: the mean, (*shape).
        root: R, (K, columns) for K numbers in the tensor, laid out in its order; of rank K.
    """

    has_rsample = True

    def __init__(self, loc: Float[Tensor, "*shape"], root: Float[Tensor, "K columns"]) -> None:
        self.loc, self.root = loc, root
        super().__init__(Size(), loc.shape, validate_args=False)

    @cached_property
    def _cholesky(self) -> Tensor:
        """A lower-triangular root of the covariance, by QR, which does not square what is small."""
        triangle: Tensor = torch.linalg.qr(self.root.mT, mode="r").R
        return triangle.mT

    def half_log_det(self) -> Tensor:
        """Return half the log-determinant of the covariance."""
        return self._cholesky.diagonal().abs().log().sum()

    @property
    def covariance_matrix(self) -> Tensor:
        """The covariance of all numbers, (K, K)."""
        return self.root @ self.root.mT

    @property
    def mean(self) -> Tensor:
        """E[w], (*batch_shape, *shape)."""
        return self.loc.expand(self._extended_shape())

    @property
    def variance(self) -> Tensor:
        """Var[w] of each number, (*batch_shape, *shape)."""
        return self.root.square().sum(-1).reshape(self.loc.shape).expand(self._extended_shape())

    def icdf(self, value: Tensor) -> Tensor:
        """Return quantiles of each number by itself."""
        found: Tensor = Normal(self.mean, self.variance.sqrt(), validate_args=False).icdf(value)
        return found

    def rsample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Draw with gradients, (*sample_shape, *batch_shape, *shape)."""
        lead = (*sample_shape, *self.batch_shape)
        noise = torch.randn((*lead, self.root.shape[-1]), dtype=self.loc.dtype, device=self.loc.device)
        return self.loc + (noise @ self.root.mT).reshape((*lead, *self.loc.shape))

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density of ``value``, (*sample_shape, *batch_shape)."""
        lead = value.dim() - self.loc.dim()
        if lead < 0 or value.shape[lead:] != self.event_shape:
            raise ShapeError(
                f"value must end in the event's shape {tuple(self.event_shape)}; got {tuple(value.shape)}."
            )
        off = (value - self.loc).reshape((*value.shape[:lead], -1, 1))
        return self._log_density(torch.linalg.solve_triangular(self._cholesky, off, upper=False).squeeze(-1))

    def _log_density(self, noise: Tensor) -> Tensor:
        """Return log q of draws made from independent noise, (..., K)."""
        found = -0.5 * (noise.square().sum(-1) + len(self.root) * LOG_2PI) - self.half_log_det()
        return found.expand(broadcast_shape(found.shape, self.batch_shape))

    def __repr__(self) -> str:
        return f"{type(self).__name__}(event_shape={tuple(self.event_shape)}, columns={self.root.shape[-1]})"


class SharedNoise:
    """The ε of one draw of a block of ``size`` numbers: each tensor of the block takes the part that it needs."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.drawn: Tensor | None = None

    def draw(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Return ε for ``shape`` draws, (*shape, size): the same for every tensor that asks."""
        wanted = (*shape, self.size)
        if self.drawn is None or self.drawn.shape != wanted:
            self.drawn = torch.randn(wanted, dtype=like.dtype, device=like.device)
        return self.drawn


class OfWholeDraws(FullRankNormal):
    """One of several tensors that are drawn together: it has its share of the density of whole draws only."""

    joint = True
    shared: SharedNoise  # of all of them

    def _noted(self, value: Tensor, noise: Tensor) -> Tensor:
        """Return a draw, and keep the part of its noise, (..., n), that its density needs."""
        self._draw = weakref.ref(value), noise
        return value

    def log_prob(self, value: Tensor) -> Tensor:
        """Return this tensor's share of log q of the last draw; the sum over all tensors is the joint density."""
        if self._draw is None or self._draw[0]() is not value:
            raise PyroDropoutError(
                "tensors that are drawn together have a density for whole draws only; guide.posterior(name) has one for"
                " each site."
            )
        return self._log_density(self._draw[1])


class FullRankBlock(OfWholeDraws):
    """One tensor of a block, drawn given the tensors before it.

    Args:
        loc: the mean, (*shape).
        root: its rows of L, (K, end), up to the diagonal of its last row, so that end - K numbers come before it.
        shared: the noise of the block.
    """

    def __init__(self, loc: Float[Tensor, "*shape"], root: Float[Tensor, "K end"], shared: SharedNoise) -> None:
        super().__init__(loc, root)
        self.shared = shared

    def half_log_det(self) -> Tensor:
        """Return this tensor's share of half the log-determinant: the sum of its part of log diag L."""
        return self.root.diagonal(self.root.shape[1] - len(self.root)).log().sum()

    def rsample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Draw this tensor's part of the block."""
        lead, (size, end) = (*sample_shape, *self.batch_shape), self.root.shape
        noise = self.shared.draw(lead, self.loc)[..., :end]
        value = self.loc + (noise @ self.root.mT).reshape((*lead, *self.loc.shape))
        return self._noted(value, noise[..., end - size :])


def _to_gaussian(q: FullRankNormal, p: Distribution) -> Tensor:
    """KL(q‖p) for independent Gaussians p: ½Σ[(R² + (m-μ)²)/s² - 1 + log s²] - ½ log det; a block's share of it."""
    base = base_distribution(p)
    if not isinstance(base, Normal) or p.batch_shape + p.event_shape != q.batch_shape + q.event_shape:
        raise NotImplementedError
    square = (q.variance + (q.mean - base.loc).square()) / base.scale.square()
    each: Tensor = sum_rightmost(0.5 * (square - 1) + base.scale.log(), len(q.event_shape))
    return each - q.half_log_det()


register_kl(FullRankNormal, Independent)(_to_gaussian)
register_kl(FullRankNormal, Normal)(_to_gaussian)


@dataclass(frozen=True)
class Rotated:
    """The factors of a layer's covariance, (U ⊗ T) diag(s²) (U ⊗ T)ᵀ over (W, b) laid out by outputs.

    Attributes:
        left: U, (outputs, outputs).
        right: T, (inputs and bias, K).
        widths: s, (outputs, K).
        half_log_det: half the log-determinant of the covariance.
    """

    left: Tensor
    right: Tensor
    widths: Tensor
    half_log_det: Tensor

    @classmethod
    def of(cls, block: Kronecker, like: Tensor) -> "Rotated":
        """Return the factors of the posterior of a block, in the type of ``like``."""
        left, right, widths = block.rotations()
        half = block.prior.sqrt()
        half_log_det = widths.log().sum() - len(left) * half.log().sum()
        factors = (left, right / half[:, None], widths, half_log_det)
        return cls(*(factor.to(like) for factor in factors))

    def root(self, rows: Tensor) -> Tensor:
        """Return R(U ⊗ T) diag s of rows R, (B, outputs, inputs and bias): (B, outputs · K)."""
        return (self.left.mT @ rows @ self.right * self.widths).flatten(1)


class KroneckerNormal(FullRankNormal):
    """The weight of a layer, (outputs, ...), or its bias, the last column of (W, b), whatever the other is."""

    def __init__(self, loc: Tensor, layer: Rotated, is_bias: bool = False) -> None:
        self.layer, self.is_bias = layer, is_bias
        super().__init__(loc, layer.left.new_empty(loc.numel(), 0))
        columns = slice(-1, None) if is_bias else slice(0, loc.numel() // len(loc))
        self._rows = layer.right[columns]  # T of the columns of (W, b) that are this tensor, (columns, K)

    @cached_property
    def _cholesky(self) -> Tensor:
        """A lower-triangular root of the covariance of all numbers, (n, n): large, and needed for a density alone."""
        root = torch.einsum("ok,ij,kj->oikj", self.layer.left, self._rows, self.layer.widths).flatten(2).flatten(0, 1)
        triangle: Tensor = torch.linalg.qr(root.mT, mode="r").R
        return triangle.mT

    @property
    def covariance_matrix(self) -> Tensor:
        """The covariance of all numbers, (n, n): large."""
        return self._cholesky @ self._cholesky.mT

    @property
    def variance(self) -> Tensor:
        """Var[w] of each number, (*batch_shape, *shape)."""
        squares = self.layer.left.square() @ self.layer.widths.square() @ self._rows.square().mT
        return squares.reshape(self.loc.shape).expand(self._extended_shape())

    def rsample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Draw, (*sample_shape, *batch_shape, *shape)."""
        shape = (*sample_shape, *self.batch_shape, *self.layer.widths.shape)
        return self._from_noise(torch.randn(shape, dtype=self.loc.dtype, device=self.loc.device))

    def _from_noise(self, noise: Tensor) -> Tensor:
        """Return m + U (s ∘ ε) Tᵀ of these columns, for ε (..., outputs, K)."""
        apart = self.layer.left @ (self.layer.widths * noise) @ self._rows.mT
        return self.loc + apart.reshape(*noise.shape[:-2], *self.loc.shape)


class KroneckerBlock(KroneckerNormal, OfWholeDraws):
    """The weight of a layer or its bias, drawn together; the density of both is counted at the weight."""

    log_prob = OfWholeDraws.log_prob

    def __init__(self, loc: Tensor, layer: Rotated, is_bias: bool, shared: SharedNoise) -> None:
        super().__init__(loc, layer, is_bias)
        self.shared = shared

    def half_log_det(self) -> Tensor:
        """Return this tensor's share of half the log-determinant."""
        whole = self.layer.half_log_det
        return torch.zeros_like(whole) if self.is_bias else whole

    def rsample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Draw this tensor's part of the layer."""
        noise = self.shared.draw((*sample_shape, *self.batch_shape), self.loc)
        value = self._from_noise(noise.unflatten(-1, self.layer.widths.shape))
        return self._noted(value, noise[..., :0] if self.is_bias else noise)
