"""The continuous ranked probability score: one number, in units of y, for a whole predicted distribution.

CRPS(F, y) = ∫ (F(z) - 1[y ≤ z])² dz = E|X - y| - ½ E|X - X'| with X and X' drawn from F. It is a proper score,
lower is better, and for a point prediction it is the absolute error.
"""

import math
from typing import Literal

import torch
from torch import Tensor

from pyro_dropout.errors import PyroDropoutError, RangeError
from pyro_dropout.generative.likelihoods.moments import is_normal, normal_parts
from pyro_dropout.generative.process_state import seeded
from pyro_dropout.mathematics.checks import check_choice, check_seed
from pyro_dropout.mathematics.mixtures import mixture_cdf
from pyro_dropout.mathematics.shapes import Float
from pyro_dropout.prediction.prediction import Prediction, check_prediction
from pyro_dropout.registry import score

_F64 = torch.float64
_PAIRS = 2**22  # pairs of draws processed at once
_REACH = 8.3  # beyond this many standard deviations F(1 - F) adds less than 1e-17


def crps(
    prediction: Prediction,
    y: Tensor,
    method: Literal["mixture", "sample"] = "mixture",
    *,
    seed: int | None = None,
) -> Float[Tensor, "*N"]:
    """Score each target against its predicted distribution, in units of y; lower is better.

    Args:
        prediction: of anything but classes, with its samples kept.
        y: the targets, (N, D).
        method: "mixture", the exact score of the mixture of T normals given by the draws (Grimit et al., 2006), for
            Gaussian likelihoods; "sample", the fair (unbiased) estimate from one y drawn with each of the T outputs.
        seed: of the draws of "sample"; torch's random state is then left unchanged.

    Returns:
        The scores, (N, D). "mixture" takes 2·(R + 17) passes over the samples, R the range of the T means in units of
        the noise, if that is less than T, and otherwise T²/2 pairs for each target.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> model = pdrop.BayesianNet(torch.nn.Linear(2, 1), likelihood=pdrop.Gaussian(tau=1.0))
        >>> answer = pdrop.predict(model, pdrop.AutoMeanField(model), torch.zeros(4, 2), method="standard")
        >>> pdrop.crps(answer, answer.mean)[0].item()  # of a standard normal at its mean: (√2 - 1)/√π
        0.2336...
        >>> pdrop.crps(answer, answer.mean + 100)[0].item()  # far away, almost the distance
        99.43...
    """
    check_choice("method", method, ("mixture", "sample"))
    check_seed(seed)
    check_prediction(prediction)
    prediction.check_kind("crps", "numbers")
    if method == "mixture" and not is_normal(prediction.target_distribution):
        raise PyroDropoutError(
            f"crps(method='mixture') is for Gaussian likelihoods, and this prediction is of {prediction.family}; use"
            " crps(..., method='sample')."
        )
    y = prediction.checked_targets(y).to(_F64)
    found = []
    with seeded(seed if method == "sample" else None, prediction.like.device):
        for n in prediction.pieces():
            if method == "sample":
                found.append(_from_draws(prediction.draw_targets(n).to(_F64) - y[n]))
            else:
                m, s = normal_parts(prediction.distribution_at(n))
                found.append(_gaussian_distance(m - y[n], s).mean(0) - half_distance(m, s))
    whole = found[0] if len(found) == 1 else torch.cat(found)  # a site that is a single number has one piece
    return whole.to(prediction.mean)


@score(
    "crps",
    heading="CRPS",
    meaning="Continuous ranked probability score, in the units of y: an error of whole distributions.",
    better="less",
    of=("numbers",),
    order=4,
)
def crps_of_any_noise(prediction: Prediction, y: Tensor) -> Tensor:
    """Return the CRPS of each target: exact for Gaussian noise, and otherwise from draws of the target."""
    normal = is_normal(prediction.target_distribution)
    return crps(prediction, y) if normal else crps(prediction, y, "sample", seed=0)


def _gaussian_distance(mean: Tensor, scale: Tensor) -> Tensor:
    """Return E|X| of X ~ N(mean, scale²)."""
    u = mean / scale
    density = torch.exp(-0.5 * u.square()) * math.sqrt(2 / math.pi)
    distance: Tensor = scale * (density + u * torch.erf(u * math.sqrt(0.5)))
    return distance


def half_distance(loc: Tensor, scale: Tensor) -> Tensor:
    """Return ½ E|X - X'| = ∫ F(1 - F) dz of equally weighted normals (T, ...): by pairs, or by the trapezoid rule.

    The Fourier transform of F(1 - F) falls off as exp(-ω²σ²/4), σ the smallest standard deviation. With steps of σ/2
    the rule's error is the part beyond ω = 4π/σ, a relative 1e-17: exact in float64.
    """
    low, high = (loc - _REACH * scale).amin(0), (loc + _REACH * scale).amax(0)
    nodes = math.ceil(2 * ((high - low) / scale.amin(0)).max().item() + 1)
    if nodes > len(loc):
        return half_distance_of_pairs(loc, scale)
    step = (high - low) / (nodes - 1)
    total = torch.zeros_like(low)
    for k in range(nodes):
        below = mixture_cdf(loc, scale, low + k * step)
        total += below * (1 - below)
    return total * step


def half_distance_of_pairs(loc: Tensor, scale: Tensor) -> Tensor:
    """Return ½ E|X - X'| as the sum over all pairs of components, some rows of the pairs at a time."""
    count = len(loc)
    rows = max(1, _PAIRS // loc.numel())
    total = torch.zeros_like(loc[0])
    for start in range(0, count, rows):
        own, later = slice(start, start + rows), slice(start + rows, None)
        for others, times in ((own, 1), (later, 2)):  # a pair of two different blocks is visited once and counts twice
            apart = loc[own].unsqueeze(1) - loc[others]
            together = torch.hypot(scale[own].unsqueeze(1), scale[others])
            total += times * _gaussian_distance(apart, together).sum((0, 1))
    return total / (2 * count**2)


def _from_draws(apart: Tensor) -> Tensor:
    """Return the unbiased estimate from draws less y, (T, ...): their mean size, less half the distance of two."""
    count = len(apart)
    if count < 2:
        raise RangeError(f"crps(method='sample') needs at least 2 draws; this prediction has {count}.")
    rank = torch.arange(count, dtype=_F64, device=apart.device)
    # in ascending order the k-th of T is the larger of a pair k times, and the smaller T - 1 - k times
    between: Tensor = torch.tensordot(2 * rank - (count - 1), apart.sort(0).values, 1) / (count * (count - 1))
    return apart.abs().mean(0) - between
