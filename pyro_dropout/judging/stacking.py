"""Choose noise and mixture weights on held-back data: the best precision, and stacking of predictions.

Stacking (Yao et al. 2018) chooses the weights of several predictive distributions that make the held-out targets most
probable, max_w Σ_n log Σ_c w_c p_c(y_n): a concave problem, which EM solves without a step size.
"""

import math

import torch
from torch import Tensor

_STEPS = 300  # of EM; the weights that matter converge much earlier
_LEAST = 0.02  # a member with less weight is dropped


def noises(homoscedastic: bool, spread: Tensor) -> Tensor:
    """Return the log precisions to try, (S, G): from twice the spread of y, (S,), to a thousandth of it.

    For heteroscedastic noise they are log factors, around zero.
    """
    if homoscedastic:
        return torch.linspace(-1.0, 14.0, 181) - spread.log().unsqueeze(-1)
    return torch.linspace(-4.0, 4.0, 97).expand(len(spread), -1)


def best_noise(tried: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return where scores (S, C, G) over the log precisions (S, G) are highest, and the maxima, each (S, C).

    The maximum is interpolated between grid points by a parabola through the best three.
    """
    step = tried[:, 1:2] - tried[:, :1]
    best = scores.nan_to_num(-math.inf).argmax(-1, keepdim=True).clamp(1, scores.shape[-1] - 2)
    left, middle, right = (scores.gather(-1, best + k).squeeze(-1) for k in (-1, 0, 1))
    bend = left - 2 * middle + right
    shift = torch.where(bend < 0, 0.5 * (left - right) / bend, 0.0).clamp(-1, 1)
    at = tried.unsqueeze(1).expand_as(scores).gather(-1, best).squeeze(-1)
    return at + step * shift, middle - 0.25 * (left - right) * shift


def log_mixture(log_tau: Tensor, square: Tensor) -> Tensor:
    """Return log p(y | x) of the equal mixture of T normals, at squared distances (T, ...) from their means."""
    each = 0.5 * (log_tau - math.log(2 * math.pi) - log_tau.exp() * square)
    return torch.logsumexp(each, 0) - math.log(len(square))


def stacked(log_p: Tensor, most: int) -> Tensor:
    """Return the weights, (S, C), of the mixture that makes held-out points most probable; log_p is (S, C, n).

    Args:
        log_p: log densities of the held-out points under each member; -inf throughout for an excluded member.
        most: maximum number of members with weight.
    """
    log_p = log_p.double()
    weights = _climb(log_p, torch.ones_like(log_p[..., 0]))
    keep = torch.zeros_like(weights).scatter(1, weights.topk(min(most, weights.shape[1]), 1).indices, 1.0)
    keep = keep * (weights >= torch.minimum(weights.amax(1, keepdim=True), weights.new_tensor(_LEAST)))
    return _climb(log_p, keep).to(torch.get_default_dtype())


def _climb(log_p: Tensor, allowed: Tensor) -> Tensor:
    weights = allowed / allowed.sum(1, keepdim=True)
    for _ in range(_STEPS):
        # E: each member's share of the density of each point. M: the mean of the shares.
        joint = log_p + weights.log().unsqueeze(-1)
        weights = (joint - torch.logsumexp(joint, 1, keepdim=True)).exp().mean(-1)
    return weights
