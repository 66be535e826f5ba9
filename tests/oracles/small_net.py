"""The exact expected loss and KL of a network with one hidden layer, in plain torch and differentiable.

Whatever couples several weights (a mask, a shared coefficient, a label) is summed over as a *node*: enumerated where it
is discrete, by quadrature where it is not. Given a node all weights are independent, so each hidden unit is a function
of one Gaussian, integrated by Gauss-Hermite, and the squared error needs no more than moments.
"""

import itertools
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

F64 = torch.float64


@dataclass
class Nodes:
    """Weights of a net x → W₂ tanh(W₁x + b₁) + b₂ with one output: S nodes, independent numbers given each.

    Attributes:
        probs: (S,), summing to one.
        w1, w1_var: mean and variance of W₁, (S, K, Q).
        b1, b1_var: of b₁, (S, K).
        w2, w2_var: of W₂, (S, K).
        b2, b2_var: of b₂, (S,).
    """

    probs: Tensor
    w1: Tensor
    w1_var: Tensor
    b1: Tensor
    b1_var: Tensor
    w2: Tensor
    w2_var: Tensor
    b2: Tensor
    b2_var: Tensor


def hermite(count: int) -> tuple[Tensor, Tensor]:
    """Nodes and weights with Σ w f(t) = E f(t) for a standard normal t."""
    t, w = np.polynomial.hermite_e.hermegauss(count)
    return torch.tensor(t, dtype=F64), torch.tensor(w / w.sum(), dtype=F64)


def trapezoid(step: float) -> tuple[Tensor, Tensor]:
    """Evenly spaced nodes for E f(t) of a standard normal t: good for functions with a bend, where Hermite is poor."""
    t = torch.arange(-8, 8 + step / 2, step, dtype=F64)
    w = torch.exp(-(t**2) / 2)
    return t, w / w.sum()


def product(*rules: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The product rule of one-dimensional rules: points (S, dims) and weights (S,)."""
    points = torch.cartesian_prod(*(t for t, _ in rules)).reshape(-1, len(rules))
    weights = torch.cartesian_prod(*(w for _, w in rules)).reshape(-1, len(rules)).prod(-1)
    return points, weights


def coin_flips(keep: float, rows: int) -> tuple[Tensor, Tensor]:
    """All 2^rows masks, (S, rows), with their probabilities."""
    masks = torch.tensor(list(itertools.product([0.0, 1.0], repeat=rows)), dtype=F64)
    return masks, (masks * keep + (1 - masks) * (1 - keep)).prod(-1)


def expected_surprise(nodes: Nodes, x: Tensor, y: Tensor, tau: float) -> Tensor:
    """Σ_n E[-log N(y_n; f(x_n), 1/τ)]."""
    mean = torch.einsum("skq,nq->snk", nodes.w1, x) + nodes.b1[:, None]
    variance = torch.einsum("skq,nq->snk", nodes.w1_var, x**2) + nodes.b1_var[:, None]
    if bool((variance > 0).any()):
        t, w = hermite(40)
        h = torch.tanh(mean.unsqueeze(-1) + variance.sqrt().unsqueeze(-1) * t)
        first, second = (w * h).sum(-1), (w * h**2).sum(-1)
    else:
        first, second = torch.tanh(mean), torch.tanh(mean) ** 2
    w2, w2_var = nodes.w2[:, None], nodes.w2_var[:, None]
    f = (w2 * first).sum(-1) + nodes.b2[:, None]
    f_var = ((w2**2 + w2_var) * second - (w2 * first) ** 2).sum(-1) + nodes.b2_var[:, None]
    each = 0.5 * tau * ((y.squeeze(-1) - f) ** 2 + f_var) - 0.5 * math.log(tau / (2 * math.pi))
    return (nodes.probs * each.sum(-1)).sum()


# --- divergences to N(0, l⁻²) -----------------------------------------------------------------------------------------


def kl_point(value: Tensor, length_scale: float) -> Tensor:
    """What a point estimate pays, up to a constant: -log p(value) without the prior's normaliser."""
    return (value * length_scale).square().sum() / 2


def kl_independent(mean: Tensor, variance: Tensor, length_scale: float) -> Tensor:
    """KL of independent Gaussians."""
    ratio = variance * length_scale**2
    return 0.5 * (ratio + (mean * length_scale) ** 2 - 1 - ratio.log()).sum()


def kl_dense(mean: Tensor, covariance: Tensor, precision: Tensor) -> Tensor:
    """KL of N(mean, covariance) to a diagonal Gaussian prior of the given precisions, by dense determinants."""
    trace = (precision * (covariance.diagonal() + mean**2)).sum()
    return 0.5 * (trace - len(mean) - precision.log().sum() - torch.linalg.slogdet(covariance)[1])


def kl_two_point_rows(loc: Tensor, keep: float, sigma: float, length_scale: float, *, exact: bool) -> Tensor:
    """KL of dropout's rows, the columns of ``loc``: Prop. 1 written out, or the whole integral along each mean."""
    rest = loc.shape[0]
    noise = 0.5 * (length_scale * sigma) ** 2 - math.log(length_scale * sigma) - 0.5
    if not exact:
        entropy = -keep * math.log(keep) - (1 - keep) * math.log(1 - keep)
        rows = 0.5 * keep * length_scale**2 * loc.square().sum(0) + rest * noise - entropy
        return rows.sum()
    total = torch.zeros((), dtype=F64)
    for d in loc.square().sum(0).sqrt():
        t = torch.linspace(-12 * sigma, d.item() + 12 * sigma, 4001, dtype=F64)
        peaks = [math.log(p) - 0.5 * ((t - m) / sigma) ** 2 for p, m in ((keep, d), (1 - keep, 0 * d))]
        log_q = torch.logsumexp(torch.stack(peaks), 0) - math.log(sigma) - 0.5 * math.log(2 * math.pi)
        log_p = -0.5 * (t * length_scale) ** 2 + math.log(length_scale) - 0.5 * math.log(2 * math.pi)
        total = total + torch.trapezoid(log_q.exp() * (log_q - log_p), t) + (rest - 1) * noise
    return total


def kl_mixture_rows(locs: Tensor, sigmas: Tensor, probs: Tensor, length_scale: float, *, exact: bool) -> Tensor:
    """KL of rows Σ_l π_l N(m_l, diag σ_l²), the columns of (L, out, in), with ``probs`` (in, L).

    Large K: the components' own divergences less the entropy of the labels. Exact: E[log q] by a product rule.
    """
    total = torch.zeros((), dtype=F64)
    points, weights = product(*[trapezoid(0.3 if locs.shape[1] > 1 else 0.02)] * locs.shape[1])
    points, weights = points[weights > 1e-14], weights[weights > 1e-14]
    for r in range(locs.shape[2]):
        means, widths, pi = locs[:, :, r], sigmas[:, :, r], probs[r]
        if not exact:
            for m, s, p in zip(means, widths, pi, strict=True):
                total = total + p * (kl_independent(m, s**2, length_scale) + p.log())
            continue
        for m, s, p in zip(means, widths, pi, strict=True):
            w = m + s * points
            standard = (w[:, None] - means) / widths
            log_q = torch.logsumexp(pi.log() - 0.5 * standard.square().sum(-1) - widths.log().sum(-1), -1)
            log_p = -0.5 * (w * length_scale).square().sum(-1) + len(m) * math.log(length_scale)
            total = total + p * (weights * (log_q - log_p)).sum()
    return total
