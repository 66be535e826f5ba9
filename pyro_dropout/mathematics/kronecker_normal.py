"""Gaussians over the weight and the bias of a layer whose covariance is diagonal between rotated outputs and inputs.

The matrix (W, b) of a layer is M + U (s ∘ ε) Tᵀ, with orthogonal U, widths s, and T = D^-½ V: a Laplace approximation
with Kronecker factors. Nothing is as large as the square of the number of weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_dropout.mathematics.curvature import Kronecker
from pyro_dropout.mathematics.full_rank_normal import FullRankNormal, OfWholeDraws, SharedNoise


@dataclass(frozen=True)
class Rotated:
    """The factors of a layer's covariance, (U ⊗ T) diag(s²) (U ⊗ T)ᵀ over (W, b) laid out by outputs.

    Attributes:
        left: U, (outputs, outputs).
        right: T, (inputs and bias, K).
        inverse: T⁻¹.
        widths: s, (outputs, K).
        half_log_det: half the log-determinant of the covariance.
    """

    left: Tensor
    right: Tensor
    inverse: Tensor
    widths: Tensor
    half_log_det: Tensor

    @classmethod
    def of(cls, block: Kronecker, like: Tensor) -> "Rotated":
        """Return the factors of the posterior of a block, in the type of ``like``."""
        left, right, widths = block.rotations()
        half = block.prior.sqrt()
        half_log_det = widths.log().sum() - len(left) * half.log().sum()
        factors = (left, right / half[:, None], right.mT * half, widths, half_log_det)
        return cls(*(factor.to(like) for factor in factors))

    def root(self, rows: Tensor) -> Tensor:
        """Return R(U ⊗ T) diag s of rows R, (B, outputs, inputs and bias): (B, outputs · K)."""
        return (self.left.mT @ rows @ self.right * self.widths).flatten(1)


class KroneckerNormal(FullRankNormal):
    """The weight of a layer, whatever its bias is.

    Args:
        loc: the mean of the weight, (outputs, ...); of the bias, (outputs,), in a ``KroneckerBlock``.
        layer: the factors of the layer's covariance.
        is_bias: whether it is the bias, the last column of (W, b).
    """

    def __init__(self, loc: Tensor, layer: Rotated, is_bias: bool = False) -> None:
        self.layer, self.is_bias = layer, is_bias
        super().__init__(loc, layer.left.new_empty(loc.numel(), 0))
        inputs = loc.numel() // len(loc)
        self._columns = slice(-1, None) if is_bias else slice(0, inputs)
        self._has_bias = is_bias or len(layer.right) > inputs

    @property
    def _rows(self) -> Tensor:
        """T of the columns of (W, b) that are this tensor, (columns, K)."""
        return self.layer.right[self._columns]

    @property
    def covariance_matrix(self) -> Tensor:
        """The covariance of all numbers, (n, n): large."""
        root = torch.einsum("ok,ij,kj->oikj", self.layer.left, self._rows, self.layer.widths).flatten(2).flatten(0, 1)
        return root @ root.mT

    @property
    def variance(self) -> Tensor:
        """Var[w] of each number, (*batch_shape, *shape)."""
        squares = self.layer.left.square() @ self.layer.widths.square() @ self._rows.square().mT
        return squares.reshape(self.loc.shape).expand(self._extended_shape())

    def _noise(self, shape: Sequence[int]) -> Tensor:
        like = self.layer.widths
        return torch.randn((*shape, *like.shape), dtype=like.dtype, device=like.device)

    def rsample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Draw, (*sample_shape, *batch_shape, *shape)."""
        return self._from_noise(self._noise((*sample_shape, *self.batch_shape)))

    def _from_noise(self, noise: Tensor) -> Tensor:
        """Return m + U (s ∘ ε) Tᵀ of these columns, for ε (..., outputs, K)."""
        apart = self.layer.left @ (self.layer.widths * noise) @ self._rows.mT
        return self.loc + apart.reshape(*noise.shape[:-2], *self.loc.shape)

    def _of_bias(self) -> Tensor:
        """Return T⁻¹/s of the bias, (outputs, K): its squared length is the precision of a rotated bias given W."""
        return self.layer.inverse[:, -1] / self.layer.widths

    def half_log_det(self) -> Tensor:
        """Return half the log-determinant of the covariance of the weight, its bias integrated out."""
        # det Σ_ww = det Σ · det Λ_bb, and Λ_bb is diagonal between rotated outputs.
        whole = self.layer.half_log_det
        return whole + 0.5 * self._of_bias().square().sum(-1).log().sum() if self._has_bias else whole

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density of ``value``, (*sample_shape, *batch_shape)."""
        off = self._from_mean(value).unflatten(-1, (len(self.layer.left), -1))
        z = (self.layer.left.mT @ off) @ self.layer.inverse[:, self._columns].mT / self.layer.widths
        if self._has_bias:  # it is where it fits best: what is left of z beside its direction
            t = self._of_bias()
            z = z - (z * t).sum(-1, keepdim=True) / t.square().sum(-1, keepdim=True) * t
        return self._log_density(z.flatten(-2))


class KroneckerBlock(KroneckerNormal, OfWholeDraws):
    """The weight of a layer or its bias, drawn together; the bias has the distribution that it has given the weight.

    Args:
        loc: the mean.
        layer: the factors of the layer's covariance.
        is_bias: whether it is the bias.
        shared: the noise of the layer.
    """

    log_prob = OfWholeDraws.log_prob

    def __init__(self, loc: Tensor, layer: Rotated, is_bias: bool, shared: SharedNoise) -> None:
        super().__init__(loc, layer, is_bias)
        self.shared = shared

    def half_log_det(self) -> Tensor:
        """Return this tensor's share of half the log-determinant: that of W, and that of b given W."""
        return -0.5 * self._of_bias().square().sum(-1).log().sum() if self.is_bias else super().half_log_det()

    def rsample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Draw this tensor's part of the layer."""
        lead = (*sample_shape, *self.batch_shape)
        noise = self.shared.draw(lead, self.loc)
        value = self._from_noise(noise.unflatten(-1, self.layer.widths.shape))
        return self._noted(value, noise[..., :0] if self.is_bias else noise)


def bias_normal(loc: Tensor, layer: Rotated) -> FullRankNormal:
    """Return the distribution of a layer's bias, whatever its weight is."""
    widths = (layer.widths.square() @ layer.right[-1].square()).sqrt()
    return FullRankNormal(loc, layer.left * widths)
