"""The values of a Gaussian process of finite rank at N points: N(0, ΦΦᵀ), which has no density when N exceeds the rank.

A little noise on the diagonal, far below any noise in the data, gives it one.
"""

from collections.abc import Sequence
from typing import Self

import torch
from pyro.distributions import TorchDistribution
from torch import Tensor
from torch.distributions import constraints

from pyro_dropout.mathematics.broadcasting import broadcast_shape
from pyro_dropout.mathematics.finite_rank import finite_rank_log_marginal
from pyro_dropout.mathematics.shapes import Float


class FiniteRankNormal(TorchDistribution):
    """D independent columns from N(0, ΦΦᵀ + εI), side by side: an event is (N, D).

    Args:
        features: Φ, (..., N, K).
        columns: Number D of columns.
        jitter: ε as a fraction of the mean of ΦΦᵀ's diagonal. Where that is smaller than ``jitter`` itself (rectifiers
            that are all off), as a fraction of ``jitter``.
        validate_args: Whether arguments and values are checked, as in any torch distribution.
    """

    arg_constraints = {"features": constraints.independent(constraints.real, 2)}  # noqa: RUF012 - torch reads it so
    support = constraints.independent(constraints.real, 2)
    has_rsample = True

    def __init__(
        self, features: Float[Tensor, "... n k"], columns: int, jitter: float = 1e-6, validate_args: bool | None = None
    ) -> None:
        self.features = features
        self.noise = jitter * features.square().sum(-1).mean(-1).clamp(min=jitter)  # ε, one per batch element
        event = torch.Size((features.shape[-2], columns))
        super().__init__(features.shape[:-2], event, validate_args=validate_args)

    def expand(self, batch_shape: Sequence[int], _instance: Self | None = None) -> Self:
        """Return the same distribution with more batch dimensions."""
        new: Self = self._get_checked_instance(FiniteRankNormal, _instance)  # type: ignore[no-untyped-call]
        batch = torch.Size(batch_shape)
        new.features = self.features.expand(batch + self.features.shape[-2:])
        new.noise = self.noise.expand(batch)
        super(FiniteRankNormal, new).__init__(batch, self.event_shape, validate_args=False)
        new._validate_args = self._validate_args
        return new

    @property
    def mean(self) -> Tensor:
        """Zero at every point."""
        return self.features.new_zeros(self.batch_shape + self.event_shape)

    @property
    def variance(self) -> Tensor:
        """The diagonal of ΦΦᵀ + εI, the same in each column."""
        diagonal = self.features.square().sum(-1) + self.noise.unsqueeze(-1)
        return diagonal.unsqueeze(-1).expand(self.batch_shape + self.event_shape)

    def rsample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Draw in weight space when that is the smaller one, else by a root of the covariance."""
        shape = self._extended_shape(torch.Size(sample_shape))
        phi, noise = self.features, self.noise[..., None, None]
        n, k = phi.shape[-2:]
        white = torch.randn(shape, dtype=phi.dtype, device=phi.device)
        if k < n:
            weights = torch.randn((*shape[:-2], k, shape[-1]), dtype=phi.dtype, device=phi.device)
            return phi @ weights + noise.sqrt() * white
        gram = phi.double() @ phi.double().mT  # float32 would lose an ε of 10⁻⁶ to rounding
        eye = torch.eye(n, dtype=gram.dtype, device=gram.device)
        root: Tensor = torch.linalg.cholesky(gram + noise * eye)
        return root.to(phi) @ white

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density of each event."""
        if self._validate_args:
            self._validate_sample(value)
        batch = broadcast_shape(value.shape[:-2], self.batch_shape)
        # ΦΦᵀ + εI is the covariance of noisy observations of precision 1/ε
        parts = (value, self.features, self.noise.reciprocal()[..., None, None])
        flat = (part.expand(batch + part.shape[-2:]).reshape(-1, *part.shape[-2:]) for part in parts)
        density: Tensor = torch.vmap(finite_rank_log_marginal)(*flat)
        return density.reshape(batch)
