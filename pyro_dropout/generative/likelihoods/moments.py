"""Running sums over draws, without storing the draws: moments, class probabilities and votes, log-likelihoods.

A block of draws is reduced to sums for each data point, which are added to the earlier ones, all in float64. With
y_t the targets given the t-th output, the law of total variance splits Var y = Var_t E[y_t] + E_t Var[y_t].
"""

from types import EllipsisType

import torch
from pyro.distributions.torch_distribution import MaskedDistribution
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, Normal

from pyro_dropout.mathematics.shapes import base_distribution
from pyro_dropout.protocols import Distribution, Likelihood

F64 = torch.float64
Sums = dict[str, Tensor]
Points = slice | int | EllipsisType  # some of a prediction's points, one replica of a fleet, or all

_THINNEST = 1e-150  # a standard deviation that underflows to zero would give NaN


def base_of(p: Distribution) -> Distribution:
    """Return p(y | f) of a single target."""
    return base_distribution(p, MaskedDistribution)


def is_class(p: Distribution) -> bool:
    """Whether targets are classes: one of several, or binary."""
    return isinstance(base_of(p), Categorical | Bernoulli)


def is_normal(p: Distribution) -> bool:
    """Whether targets have Gaussian noise."""
    return isinstance(base_of(p), Normal)


def moments_of(p: Distribution) -> Sums:
    """Return the moments of each target under a distribution: "mean" and "noise", its variance, in float64.

    For classes also "surprise", the entropy, and "votes", the most probable one, as indicators.
    """
    base = base_of(p)
    if isinstance(base, Categorical):  # the mean of its targets is that of their indicators
        means, best = base.probs.to(F64), base.logits.argmax(-1, keepdim=True)
        votes = best == torch.arange(base.logits.shape[-1], device=best.device)
        return {"mean": means, "noise": means * (1 - means), "surprise": base.entropy().to(F64), "votes": votes}
    # In small or large units, float32 can hold a standard deviation, but not its square.
    noise = base.scale.to(F64).square() if isinstance(base, Normal) else p.variance.to(F64)
    found = {"mean": p.mean.to(F64), "noise": noise}
    if isinstance(base, Bernoulli):
        found |= {"surprise": base.entropy().to(F64), "votes": base.logits > 0}
    return found


def indicator_covariance(probs: Tensor) -> Tensor:
    """Return the covariance of the indicators of classes, of which one is 1: (..., C, C) from (..., C)."""
    return torch.diag_embed(probs) - probs.unsqueeze(-1) * probs.unsqueeze(-2)


def normal_parts(p: Distribution) -> tuple[Tensor, Tensor]:
    """Return the means and standard deviations of a distribution of normals, in float64."""
    base = base_of(p)
    return base.loc.to(F64), base.scale.to(F64).clamp_min(_THINNEST)


def block_sums(likelihood: Likelihood, f: Tensor) -> Sums:
    """Reduce a block of draws, f (T, N, D), to sums for each data point.

    "mean" is that of E[y], "spread" the sum of its squared distances from the mean, "noise" that of Var[y]; of classes
    "surprise" is the sum of the draws' own entropies, and "votes" how many draws vote for each class.
    """
    each = moments_of(likelihood.distribution(f))
    means = each.pop("mean")
    middle = means.mean(0)
    sums = {"mean": middle, "spread": (means - middle).square().sum(0)}
    return sums | {name: value.sum(0) for name, value in each.items()}


def block_log_prob(p: Distribution, y: Tensor) -> Tensor:
    """Return logsumexp_t log p(y | f_t) of a block of draws with p(y | f), (N,)."""
    return torch.logsumexp(p.log_prob(y).to(F64), 0)


def block_outer(p: Distribution, mean: Tensor) -> Tensor:
    """Return Σ_t (E[y | f_t] - mean)(E[y | f_t] - mean)ᵀ of a block of draws with p(y | f), (N, D, D)."""
    apart = p.mean.to(F64) - mean
    return torch.einsum("t...i,t...j->...ij", apart, apart)


class Running:
    """The sums of all draws so far, for ``points`` data points; their number is unused if all are added together."""

    def __init__(self, points: int) -> None:
        self.points = points
        self.sums: Sums = {}

    def add(self, seen: int, count: int, points: Points, block: Sums) -> None:
        """Add a block of ``count`` draws for some points, which already have ``seen`` draws."""
        if not self.sums:
            sizes = {k: v.shape if points is ... else (self.points, *v.shape[1:]) for k, v in block.items()}
            whole = {torch.bool: torch.int64}  # votes are counted
            self.sums = {k: v.new_zeros(sizes[k], dtype=whole.get(v.dtype, v.dtype)) for k, v in block.items()}
        own = {name: value[points] for name, value in self.sums.items()}
        # Chan, Golub and LeVeque (1983): two sets of draws, each with its own mean
        step = block["mean"] - own["mean"]
        own["mean"] += step * (count / (seen + count))
        own["spread"] += block["spread"] + step.square() * (seen * count / (seen + count))
        for name in block.keys() - {"mean", "spread"}:
            own[name] += block[name]
