"""An equal mixture of distributions of one shape: what an ensemble says about one site."""

import math
from collections.abc import Sequence
from typing import Self

import torch
from pyro.distributions import Delta, TorchDistribution
from torch import Size, Tensor
from torch.distributions import constraints

from pyro_dropout.mathematics.errors import PyroDropoutError, SingularError
from pyro_dropout.protocols import Distribution


class MemberMixture(TorchDistribution):
    """The mixture (1/M) Σ q_m of M distributions of the same shape; all their dimensions are one event.

    Args:
        parts: the distributions; points (``Delta``) make a mixture with moments and draws, but no density.

    Example:
        >>> import torch, pyro.distributions as dist
        >>> from pyro_dropout.mathematics.member_mixture import MemberMixture
        >>> q = MemberMixture([dist.Normal(torch.full((2,), m), 1.0).to_event(1) for m in (-1.0, 1.0)])
        >>> q.mean.tolist(), q.variance.tolist(), q.log_prob(torch.zeros(2)).shape
        ([0.0, 0.0], [2.0, 2.0], torch.Size([]))
    """

    arg_constraints: dict[str, constraints.Constraint] = {}  # noqa: RUF012 - torch reads a class attribute

    def __init__(self, parts: Sequence[Distribution]) -> None:
        self.parts = list(parts)
        super().__init__(Size(), parts[0].batch_shape + parts[0].event_shape, validate_args=False)

    @constraints.dependent_property(is_discrete=False)
    def support(self) -> constraints.Constraint:
        """That of the parts."""
        found: constraints.Constraint = self.parts[0].support
        return found

    @property
    def mean(self) -> Tensor:
        """The mean of the members' means."""
        return self._each("mean").mean(0)

    @property
    def variance(self) -> Tensor:
        """The mean of the members' variances, plus the variance of their means."""
        return self._each("variance").mean(0) + self._each("mean").var(0, unbiased=False)

    def _each(self, moment: str) -> Tensor:
        """Return a moment of each member, (M, ...)."""
        try:
            return torch.stack([getattr(part, moment) for part in self.parts])
        except NotImplementedError:
            raise PyroDropoutError(
                f"a {type(self.parts[0]).__name__}, the posterior of a constrained site, has no formula for its"
                f" {moment}; take it from draws, posterior(name).sample((1000,))."
            ) from None

    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Draw from members, each as often as any other, in random order."""
        numbers = balanced(len(self.parts), Size(sample_shape).numel())
        counts = numbers.bincount(minlength=len(self.parts)).tolist()
        drawn = torch.cat([part.sample((count,)) for part, count in zip(self.parts, counts, strict=True) if count])
        order = numbers.argsort().argsort().to(drawn.device)  # the draws of each member, at its places
        return drawn[order].reshape(Size(sample_shape) + self.event_shape)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density of the mixture."""
        if any(isinstance(part, Delta) for part in self.parts):
            raise SingularError("an ensemble of points has no density; give it members that have one.")
        lead = value.dim() - len(self.event_shape)
        found = [part.log_prob(value) for part in self.parts]
        each = torch.stack([one.reshape(*one.shape[:lead], -1).sum(-1) for one in found])
        return torch.logsumexp(each, 0) - math.log(len(self.parts))

    def expand(self, batch_shape: Sequence[int], _instance: Self | None = None) -> Self:
        """Only the empty batch is supported."""
        if tuple(batch_shape):
            raise NotImplementedError("a mixture of members has no batch.")
        return self


def balanced(members: int, count: int) -> Tensor:
    """Return ``count`` member numbers in random order; each member comes as often as any other, give or take one."""
    rounds = [torch.randperm(members) for _ in range(-(-count // members))]
    numbers = torch.cat(rounds)[:count]
    return numbers[torch.randperm(count)]
