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
from torch.nn.functional import pad

from pyro_dropout.mathematics.shapes import Float, base_distribution, broadcast_shape, keeps_density
from pyro_dropout.mathematics.weight_distribution import LOG_2PI, Draw, WeightDistribution, drawn


class SharedNoise:
    """The ε of one draw of a block of ``size`` numbers: each tensor of the block takes the part that it needs."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.drawn: Tensor | None = None

    def draw(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Return ε for ``shape`` draws, (*shape, size): the same for every tensor that asks."""
        wanted = (*shape, self.size)
        if self.drawn is None or self.drawn.shape != wanted:
            self.drawn = drawn(torch.randn, wanted, like)
        return self.drawn


def joint_root(roots: Sequence[tuple[Tensor, SharedNoise | None]]) -> Tensor:
    """Return one root of several tensors' rows, (B, columns), from that of each and the noise that it shares.

    The last columns of a root belong to the noise that it shares, or to the first of it, and add up.
    """
    own: list[Tensor] = []
    shared: dict[SharedNoise, Tensor] = {}
    for root, noise in roots:
        if noise is not None:
            alone = max(0, root.shape[-1] - noise.size)
            root, among = root[:, :alone], root[:, alone:]
            among = pad(among, (0, noise.size - among.shape[-1]))
            shared[noise] = among + shared[noise] if noise in shared else among
        own.append(root)
    return torch.cat([*own, *shared.values()], -1)


class FullRankNormal(WeightDistribution):
    """One Gaussian over all numbers of a tensor, w = m + Rε: its covariance is R Rᵀ.

    With ``shared`` noise it is one of several tensors that are drawn together, given those before it, and has its share
    of the density of whole draws only. Its root is then its rows of L, up to the diagonal of the last one.

    Args:
        loc: the mean, (*shape).
        root: R, (K, columns) for K numbers in the tensor, laid out in its order; of rank K.
        shared: the noise of the block, if it is in one.
    """

    has_rsample = True

    def __init__(
        self, loc: Float[Tensor, "*shape"], root: Float[Tensor, "K columns"], shared: SharedNoise | None = None
    ) -> None:
        self.loc, self.root, self.shared, self.joint = loc, root, shared, shared is not None
        super().__init__(Size(), loc.shape, validate_args=False)

    @cached_property
    def _cholesky(self) -> Tensor:
        """A lower-triangular root of the covariance, by QR, which does not square what is small."""
        triangle: Tensor = torch.linalg.qr(self._whole_root().mT, mode="r").R
        return triangle.mT

    def _whole_root(self) -> Tensor:
        """Return a root of the covariance of all numbers, (K, columns)."""
        return self.root

    def half_log_det(self) -> Tensor:
        """Return half the log-determinant of the covariance, or this tensor's share of it: its part of log diag L."""
        if self.joint:
            return self.root.diagonal(self.root.shape[1] - len(self.root)).log().sum()
        return self._cholesky.diagonal().abs().log().sum()

    @property
    def covariance_matrix(self) -> Tensor:
        """The covariance of all numbers, (K, K)."""
        root = self._whole_root()
        return root @ root.mT

    @property
    def mean(self) -> Tensor:
        """E[w], (*batch_shape, *shape)."""
        return self.loc.expand(self._extended_shape())

    @property
    def variance(self) -> Tensor:
        """Var[w] of each number, (*batch_shape, *shape)."""
        return self.root.square().sum(-1).reshape(self.loc.shape).expand(self._extended_shape())

    def covariance_root(self, rows: Float[Tensor, "B *shape"]) -> Float[Tensor, "B columns"]:
        """Return root with root rootᵀ = rows Cov[w] rowsᵀ; of tensors drawn together, their roots add up to that."""
        return rows.reshape(len(rows), -1) @ self._whole_root()

    def icdf(self, value: Tensor) -> Tensor:
        """Return quantiles of each number by itself."""
        found: Tensor = Normal(self.mean, self.variance.sqrt(), validate_args=False).icdf(value)
        return found

    def rsample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Draw with gradients, (*sample_shape, *batch_shape, *shape)."""
        lead, (size, columns) = (*sample_shape, *self.batch_shape), self.root.shape
        noise = self._noise(lead, columns)
        value = self.loc + (noise @ self.root.mT).reshape((*lead, *self.loc.shape))
        return self._noted(value, noise[..., columns - size :])

    def _noise(self, lead: Sequence[int], size: int) -> Tensor:
        if self.shared is None:
            return drawn(torch.randn, (*lead, size), self.loc)
        return self.shared.draw(lead, self.loc)[..., :size]

    def _noted(self, value: Tensor, noise: Tensor) -> Tensor:
        """Return a draw, and keep the part of its noise, (..., n), that the density of a whole draw needs."""
        self._draw = Draw(weakref.ref(value), None, noise, None) if self.joint else None
        return value

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density of ``value``, (*sample_shape, *batch_shape), or of the last draw a share of it."""
        lead = self._check_value(value)
        made = self._made_of(value)
        if made is not None:
            noise = made.noise
        else:
            off = (value - self.loc).reshape((*lead, -1, 1))
            noise = torch.linalg.solve_triangular(self._cholesky, off, upper=False).squeeze(-1)
        found: Tensor = -0.5 * (noise.square().sum(-1) + len(self.root) * LOG_2PI) - self.half_log_det()
        return found.expand(broadcast_shape(found.shape, self.batch_shape))

    def __repr__(self) -> str:
        return f"{type(self).__name__}(event_shape={tuple(self.event_shape)}, columns={self.root.shape[-1]})"


class TriangularNormal(FullRankNormal):
    """One Gaussian over all numbers of a tensor, w = m + s(ε + Tε) with T below the diagonal: the root is s(I + T).

    The root itself is made only where it is asked for: a draw and the KL walk over T, which is as large, once each.

    Args:
        loc: the mean, (*shape).
        scale: s, (*shape).
        lower: T, (K, columns - 1); what lies on the diagonal of the root or above it does not count.
        shared: the noise of the block, if it is in one.
    """

    def __init__(self, loc: Tensor, scale: Tensor, lower: Float[Tensor, "K less"], shared: SharedNoise | None) -> None:
        self.scale, self.before = scale.flatten(), lower.shape[-1] + 1 - loc.numel()
        self.lower = lower.tril(self.before - 1)
        super().__init__(loc, loc.new_empty(loc.numel(), 0), shared)

    def _whole_root(self) -> Tensor:
        below = pad(self.lower * self.scale.unsqueeze(-1), (0, 1))
        return torch.diagonal_scatter(below, self.scale, self.before)

    def half_log_det(self) -> Tensor:
        """Return half the log-determinant of the covariance, or this tensor's share of it."""
        return self.scale.log().sum() if self.joint or not self.before else super().half_log_det()

    @property
    def variance(self) -> Tensor:
        """Var[w] of each number, (*batch_shape, *shape)."""
        found = self.scale.square() * (1 + self.lower.square().sum(-1))
        return found.reshape(self.loc.shape).expand(self._extended_shape())

    def rsample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Draw with gradients, (*sample_shape, *batch_shape, *shape)."""
        lead = (*sample_shape, *self.batch_shape)
        noise = self._noise(lead, self.before + len(self.scale))
        own = noise[..., self.before :]
        apart = self.scale * (own + noise[..., :-1] @ self.lower.mT)
        return self._noted(self.loc + apart.reshape((*lead, *self.loc.shape)), own)


def _to_gaussian(q: FullRankNormal, p: Distribution) -> Tensor:
    """KL(q‖p) for independent Gaussians p: ½Σ[(R² + (m-μ)²)/s² - 1 + log s²] - ½ log det; a block's share of it."""
    base = base_distribution(p)
    if not keeps_density(base, Normal) or p.batch_shape + p.event_shape != q.batch_shape + q.event_shape:
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


class KroneckerNormal(FullRankNormal):
    """The weight of a layer, (outputs, ...), or its bias, the last column of (W, b).

    With ``shared`` noise both are drawn together, and the density of both is counted at the weight.
    """

    def __init__(self, loc: Tensor, layer: Rotated, is_bias: bool = False, shared: SharedNoise | None = None) -> None:
        self.layer, self.is_bias = layer, is_bias
        super().__init__(loc, layer.left.new_empty(loc.numel(), 0), shared)
        columns = slice(-1, None) if is_bias else slice(0, loc.numel() // len(loc))
        self._rows = layer.right[columns]  # T of the columns of (W, b) that are this tensor, (columns, K)

    def _whole_root(self) -> Tensor:
        """Return U ⊗ T diag s of these columns, (n, outputs · K): large, and needed for a density alone."""
        root = torch.einsum("ok,ij,kj->oikj", self.layer.left, self._rows, self.layer.widths)
        return root.flatten(2).flatten(0, 1)

    def half_log_det(self) -> Tensor:
        """Return half the log-determinant of the covariance of this tensor, or of both at the weight."""
        if self.joint:
            return self.layer.half_log_det * (not self.is_bias)
        return super().half_log_det()

    @property
    def variance(self) -> Tensor:
        """Var[w] of each number, (*batch_shape, *shape)."""
        squares = self.layer.left.square() @ self.layer.widths.square() @ self._rows.square().mT
        return squares.reshape(self.loc.shape).expand(self._extended_shape())

    def covariance_root(self, rows: Float[Tensor, "B *shape"]) -> Float[Tensor, "B columns"]:
        """Return R(U ⊗ T) diag s of rows R."""
        by_output = rows.reshape(len(rows), -1, len(self._rows))
        return (self.layer.left.mT @ by_output @ self._rows * self.layer.widths).flatten(1)

    def rsample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Draw m + U (s ∘ ε) Tᵀ of these columns, (*sample_shape, *batch_shape, *shape)."""
        lead, shape = (*sample_shape, *self.batch_shape), self.layer.widths.shape
        noise = self._noise(lead, shape.numel())
        apart = self.layer.left @ (self.layer.widths * noise.unflatten(-1, shape)) @ self._rows.mT
        return self._noted(self.loc + apart.reshape(*lead, *self.loc.shape), noise[..., :0] if self.is_bias else noise)
