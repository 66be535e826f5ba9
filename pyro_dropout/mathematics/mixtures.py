"""Mixtures of equal parts: what an ensemble says about one site, and quantiles of mixtures of normals in one dimension.

A prediction is a mixture of T normals, one for each draw, and so is each single weight of a ``RowMixture``.
"""

import math
from collections.abc import Callable, Sequence
from typing import Self

import torch
from pyro.distributions import Delta, TorchDistribution
from torch import Size, Tensor
from torch.distributions import constraints

from pyro_dropout.errors import PyroDropoutError, SingularError
from pyro_dropout.protocols import Distribution


class MemberMixture(TorchDistribution):
    """The mixture (1/M) Σ q_m of M distributions of the same shape; all their dimensions are one event.

    Points (``Delta``) make a mixture with moments and draws, but no density.
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


_F64 = torch.float64
_THINNEST = 1e-150  # stands for a width of zero, which would give NaN


def mixture_cdf(loc: Tensor, scale: Tensor, z: Tensor) -> Tensor:
    """Return the probability below z, (...), of equally weighted normals (T, ...) of positive width."""
    below: Tensor = torch.special.ndtr((z - loc) / scale).mean(0)
    return below


def mixture_quantile(loc: Tensor, scale: Tensor, level: float, probs: Tensor | None = None) -> Tensor:
    """Return a quantile, (...), of normals (T, ...); of width zero, they are steps at their means.

    The weights ``probs`` of the parts, equal by default, are broadcast to ``loc``.
    """
    if level > 0.5:
        return -mixture_quantile(-loc, scale, 1 - level, probs)
    log_tail = torch.tensor(level, dtype=_F64, device=loc.device).log()
    return mixture_tail_quantile(loc, scale, log_tail, probs)


def mixture_tail_quantile(loc: Tensor, scale: Tensor, log_tail: Tensor, probs: Tensor | None = None) -> Tensor:
    """Return the z, (...), below which normals (T, ...) have the probability exp(log_tail), at most a half.

    Newton steps inside a bracket, or else bisections, for log F, which is nearly a parabola in its tail: exp(log_tail)
    itself may be as small as 1e-10000.
    """
    loc, scale = loc.to(_F64), scale.to(_F64).clamp_min(_THINNEST)
    weights = torch.full_like(loc, 1 / len(loc)) if probs is None else probs.to(_F64)
    log_weights = weights.log()
    reach = (-2 * (log_tail + math.log(2))).clamp_min(0).sqrt()  # since Φ(-t) ≤ exp(-t²/2)/2
    low, high = (loc - scale * reach).amin(0), loc.amax(0)
    middle = (weights * loc).sum(0)
    width = (weights * (scale.square() + (loc - middle).square())).sum(0).sqrt()

    def at(z: Tensor) -> tuple[Tensor, Tensor]:
        u = (z - loc) / scale
        log_cdf = torch.logsumexp(torch.special.log_ndtr(u) + log_weights, 0)
        log_density = torch.logsumexp(log_weights - 0.5 * u.square() - scale.log(), 0) - 0.5 * math.log(2 * math.pi)
        return log_cdf - log_tail, torch.exp(log_density - log_cdf)

    return _root(at, middle - width * reach, low, high, 1e-6 * scale.amin(0))


def _root(at: Callable[[Tensor], tuple[Tensor, Tensor]], z: Tensor, low: Tensor, high: Tensor, near: Tensor) -> Tensor:
    """Return where an increasing function between ``low`` and ``high`` is zero; ``at`` gives it and its slope."""
    z = torch.minimum(torch.maximum(z, low), high)
    before = high - low
    near = torch.maximum(near, 1e-15 * before)
    done = before <= near
    for _ in range(100):
        excess, slope = at(z)
        low, high = torch.where(excess < 0, z, low), torch.where(excess < 0, high, z)
        newton = z - excess / slope  # NaN between two steps, where both are zero: then the bracket is halved
        good = (newton >= low) & (newton <= high) & ((newton - z).abs() <= before / 2)
        # Converged values stay: steps of the size of rounding errors do not halve, and would look like bad ones.
        following = torch.where(done, z, torch.where(good, newton, (low + high) / 2))
        before, z = (following - z).abs(), following
        done = done | (before <= near)  # each Newton step squares the error: after this one none is left
        if bool(done.all()):
            break
    return z
