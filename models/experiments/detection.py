"""Does uncertainty detect odd inputs? How well a score separates them from ordinary ones, and two ways to create them.

    AUROC = P(s > s') + ½ P(s = s'),   s the score of an odd input, s' that of an ordinary one

½ for an uninformative score, 1 for one that ranks every odd input above every ordinary one.
"""

import math
from typing import Any, NamedTuple

import torch
from pyro import poutine
from torch import Tensor
from torch.nn import functional

from pyro_dropout.generative.inputs import check_pairs
from pyro_dropout.generative.likelihoods import likelihood_of
from pyro_dropout.judging.decisions import check_vector
from pyro_dropout.mathematics.checks import check_count, check_number
from pyro_dropout.mathematics.errors import RangeError, ShapeError
from pyro_dropout.mathematics.shapes import Bool, Float
from pyro_dropout.training.loss.per_example import per_example

_F64 = torch.float64


class AUROC(NamedTuple):
    """How well a score separates two sets; returned by ``auroc``.

    Attributes:
        value: the probability that an odd input has the higher score; a tie counts half.
        error: its standard error over inputs of both kinds; NaN if one kind has a single input.

    Example:
        >>> import torch
        >>> from experiments.detection import auroc
        >>> auroc(torch.tensor([2.0, 3.0]), torch.tensor([0.0, 1.0]))
        AUROC(value=1.0, error=0.0)
    """

    value: float
    error: float


def auroc(odd: Float[Tensor, " M"], ordinary: Float[Tensor, " N"]) -> AUROC:
    """Return the area under the ROC curve of separating odd inputs from ordinary ones by a score, with its error.

    The standard error is that of DeLong, DeLong and Clarke-Pearson (1988): for each input, take the share of the other
    kind that it is ordered correctly with; the area is the mean of these shares over either kind. It assumes that the
    two sets are independent; if an odd input is a changed ordinary one, it is somewhat too large or too small. Both are
    computed by sorting, in (M + N) log N.

    Args:
        odd: scores of the inputs that should score higher, (M,): entropies, standard deviations.
        ordinary: scores of the others, (N,).

    Returns:
        The area and its standard error. An area of exactly 0 or 1 has the error 0, which underestimates the true error:
        all observed pairs are ordered the same way.

    Example:
        >>> import torch
        >>> from experiments.detection import auroc
        >>> found = auroc(torch.tensor([0.9, 0.4, 0.7]), torch.tensor([0.1, 0.4, 0.2, 0.6]))
        >>> round(found.value, 4), round(found.error, 3)  # 10½ of 12 pairs are ordered correctly
        (0.875, 0.148)
    """
    check_vector("odd", odd)
    check_vector("ordinary", ordinary)
    ordinary = ordinary.to(odd)
    won, lost = _shares_below(odd, ordinary), 1 - _shares_below(ordinary, odd)
    if min(len(won), len(lost)) < 2:
        return AUROC(won.mean().item(), math.nan)
    return AUROC(won.mean().item(), (won.var() / len(won) + lost.var() / len(lost)).sqrt().item())


def _shares_below(values: Tensor, others: Tensor) -> Tensor:
    """Return for each value the share of the others below it; ties count half."""
    others, values = others.sort().values, values.contiguous()
    twice = torch.searchsorted(others, values) + torch.searchsorted(others, values, right=True)
    return twice.to(_F64) / (2 * len(others))


def envelopes_overlap(f: Float[Tensor, "T N C"], level: float = 0.95) -> Bool[Tensor, " N"]:
    """Return where draws disagree on the class: whether the envelopes of the two largest softmax inputs overlap.

    Args:
        f: the network's outputs in every draw, such as ``predict(...).samples``, (T, N, C).
        level: the central share of the draws inside an envelope.

    Returns:
        Whether the lower edge of the leading class lies below the upper edge of the second, (N,).

    Example:
        >>> import torch
        >>> from experiments.detection import envelopes_overlap
        >>> f = torch.tensor([5.0, 0.0, 0.0]) + torch.linspace(-1, 1, 21)[:, None, None]
        >>> envelopes_overlap(f).tolist(), envelopes_overlap(f * torch.tensor([0.2, 1.0, 1.0])).tolist()
        ([False], [True])
    """
    check_number("level", level)
    if not 0 < level < 1:
        raise RangeError(f"level must lie between 0 and 1; got {level!r}.")
    if f.dim() != 3 or f.shape[-1] < 2:
        raise ShapeError(f"f must have shape (T, N, C) with at least two classes; got {tuple(f.shape)}.")
    leader, second = f.gather(2, f.mean(0).topk(2).indices.expand(len(f), -1, -1)).unbind(-1)
    return leader.quantile((1 - level) / 2, 0) < second.quantile((1 + level) / 2, 0)


def loss_gradient(model: Any, guide: Any, x: Tensor, y: Tensor, *, draws: int | None = None) -> Tensor:
    """Return the gradient of minus the log-likelihood of each point with respect to its input.

    ``x + ε * loss_gradient(...).sign()`` is the fast gradient sign method of Goodfellow, Shlens and Szegedy (2015).

    Args:
        model: a model with a likelihood of this package, such as ``BayesianNet``.
        guide: its posterior.
        x: inputs, (N, ...).
        y: their targets, (N, D) or (N,).
        draws: None for the network with the mean weights, -log p(y | x, E[ω]); or the number T of draws, each point's
            own, over which E_q[-log p(y | x, ω)] is averaged: an attack on MC dropout itself.

    Returns:
        The gradient, of the shape of x.

    Example:
        >>> import torch, pyro_dropout as pd
        >>> from experiments.detection import loss_gradient
        >>> model = pd.BayesianNet(torch.nn.Linear(2, 3), likelihood=pd.Categorical())
        >>> guide = pd.AutoDropout(model, keep=0.9)
        >>> x, y = torch.zeros(4, 2), torch.tensor([0, 1, 2, 0])
        >>> worse = x + 0.1 * loss_gradient(model, guide, x, y).sign()
        >>> before, after = (pd.predict(model, guide, z, method="standard").log_prob(y) for z in (x, worse))
        >>> bool((after < before).all())
        True
    """
    likelihood = likelihood_of(model)
    check_pairs("x and y", x, y)
    x = x.detach().clone().requires_grad_()
    if draws is None:
        count, rows = 1, x
        f = model.evaluate(guide.mean(), x)
    else:
        check_count("draws", draws)
        count, rows = draws, x.repeat(draws, *[1] * (x.dim() - 1))  # every copy of a point has its own draw
        with per_example():
            f = poutine.replay(model, trace=poutine.trace(guide).get_trace(rows))(rows)
    y = y.repeat(count, *[1] * (y.dim() - 1))
    loss = -likelihood.distribution(f).log_prob(likelihood.checked(f, y)).sum() / count
    return torch.autograd.grad(loss, x)[0]


def turned(images: Tensor, degrees: Float[Tensor, " A"]) -> Tensor:
    """Return images rotated anticlockwise about their centre.

    Args:
        images: (N, channels, height, width); pixels from outside are 0.
        degrees: the angles, (A,).

    Returns:
        Every image at every angle, (N, A, channels, height, width).

    Example:
        >>> import torch
        >>> from experiments.detection import turned
        >>> bar = torch.zeros(1, 1, 9, 9)
        >>> bar[..., 4] = 1  # upright
        >>> lying = turned(bar, torch.tensor([90.0]))[0, 0, 0]
        >>> lying[4].min().item() > 0.99, lying[3].max().item() < 0.01
        (True, True)
    """
    if images.dim() != 4 or images.numel() == 0:
        raise ShapeError(f"images must have shape (N, channels, height, width); got {tuple(images.shape)}.")
    check_vector("degrees", degrees)
    (n, _, height, width), count = images.shape, len(degrees)
    cos, sin, zero = degrees.deg2rad().cos(), degrees.deg2rad().sin(), torch.zeros_like(degrees)
    # affine_grid runs from -1 to 1 along both sides, so rotating a non-square image needs their ratio.
    turns = torch.stack([cos, -sin * height / width, zero, sin * width / height, cos, zero], -1).reshape(count, 2, 3)
    grid = functional.affine_grid(turns.to(images).repeat(n, 1, 1), [n * count, 1, height, width], align_corners=False)
    found = functional.grid_sample(images.repeat_interleave(count, 0), grid, align_corners=False)
    every: Tensor = found.unflatten(0, (n, count))
    return every
