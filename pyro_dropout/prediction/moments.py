"""Running sums over draws, without storing the draws: moments, class probabilities and votes, log-likelihoods.

A block of draws is reduced to sums for each data point, which are added to the earlier ones, all in float64. With
y_t the targets given the t-th output, the law of total variance splits Var y = Var_t E[y_t] + E_t Var[y_t].
"""

from typing import Any

import torch
from pyro.distributions.torch_distribution import MaskedDistribution
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, Normal

from pyro_dropout.mathematics.base_distribution import base_distribution

F64 = torch.float64
Sums = dict[str, Tensor]


def base_of(p: Any) -> Any:
    """Return p(y | f) of a single target."""
    return base_distribution(p, MaskedDistribution)


def is_class(p: Any) -> bool:
    """Whether targets are classes: one of several, or binary."""
    return isinstance(base_of(p), Categorical | Bernoulli)


def is_normal(p: Any) -> bool:
    """Whether targets have Gaussian noise."""
    return isinstance(base_of(p), Normal)


def moments_of(p: Any) -> Sums:
    """Return the moments of each target under a distribution: "mean" and "noise", its variance, in float64.

    For classes also "surprise", the entropy, and "votes", the most probable one, as indicators.
    """
    base = base_of(p)
    several, coins = isinstance(base, Categorical), isinstance(base, Bernoulli)
    if several:  # the mean of its targets is that of their indicators
        means = base.probs.to(F64)
        found = {"mean": means, "noise": means * (1 - means)}
    else:
        found = {"mean": p.mean.to(F64), "noise": p.variance.to(F64)}
    if several or coins:
        found["surprise"] = base.entropy().to(F64)
        found["votes"] = (base.logits > 0) if coins else _votes(base.logits)
    return found


def block_sums(likelihood: Any, f: Tensor) -> Sums:
    """Reduce a block of draws, f (T, N, D), to sums for each data point.

    Returns:
        "mean" of E[y], "spread", its squared distances from the mean, and "noise", the sum of Var[y]; for classes also
        "surprise", the sum of the draws' own entropies, and "votes", how many draws vote for each class.
    """
    each = moments_of(likelihood.distribution(f))
    means = each.pop("mean")
    middle = means.mean(0)
    sums = {"mean": middle, "spread": (means - middle).square().sum(0)}
    return sums | {name: value.sum(0) for name, value in each.items()}


def _votes(logits: Tensor) -> Tensor:
    """Return which class each draw votes for, as indicators."""
    best = logits.argmax(-1, keepdim=True)
    return best == torch.arange(logits.shape[-1], device=best.device)


def block_log_prob(likelihood: Any, f: Tensor, y: Tensor) -> Tensor:
    """Return logsumexp_t log p(y | f_t) of a block of draws, (N,)."""
    each: Tensor = likelihood.distribution(f).log_prob(y)
    return torch.logsumexp(each.to(F64), 0)


def block_outer(likelihood: Any, f: Tensor, mean: Tensor) -> Tensor:
    """Return Σ_t (E[y | f_t] - mean)(E[y | f_t] - mean)ᵀ of a block of draws, (N, D, D)."""
    apart = likelihood.distribution(f).mean.to(F64) - mean
    return torch.einsum("t...i,t...j->...ij", apart, apart)


class Running:
    """The sums of all draws so far, for every data point.

    Args:
        points: how many data points there are; unused if all are added together, by an ellipsis.
    """

    def __init__(self, points: int) -> None:
        self.points = points
        self.sums: Sums = {}

    def add(self, seen: int, count: int, points: Any, block: Sums) -> None:
        """Add a block of ``count`` draws for some points, which already have ``seen`` draws."""
        if not self.sums:
            sizes = {k: v.shape if points is ... else (self.points, *v.shape[1:]) for k, v in block.items()}
            self.sums = {k: v.new_zeros(sizes[k], dtype=_whole(v.dtype)) for k, v in block.items()}
        own = {name: value[points] for name, value in self.sums.items()}
        # Chan, Golub and LeVeque (1983): two sets of draws, each with its own mean
        step = block["mean"] - own["mean"]
        own["mean"] += step * (count / (seen + count))
        own["spread"] += block["spread"] + step.square() * (seen * count / (seen + count))
        for name in block.keys() - {"mean", "spread"}:
            own[name] += block[name]


def _whole(dtype: torch.dtype) -> torch.dtype:
    return torch.int64 if dtype == torch.bool else dtype  # votes are counted
