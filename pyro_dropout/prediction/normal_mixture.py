"""A prediction with Gaussian noise as a mixture of T normals for every target, one for each draw.

Its parts, taken a piece at a time so that memory stays bounded, its distribution function and its quantiles, all in
float64.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from pyro_dropout.mathematics.checks import describe
from pyro_dropout.mathematics.errors import PyroDropoutError, RangeError, ShapeError
from pyro_dropout.prediction.moments import base_of, is_normal
from pyro_dropout.prediction.prediction import Prediction

_F64 = torch.float64
_THINNEST = torch.finfo(torch.float32).tiny  # an underflow to zero would give NaN


def check_prediction(prediction: Prediction) -> None:
    """Raise unless this is a ``Prediction``."""
    if not isinstance(prediction, Prediction):
        raise PyroDropoutError(
            f"prediction must be what predict(model, posterior, x) returns; got {type(prediction).__name__}."
        )


def checked_targets(prediction: Prediction, y: Tensor) -> Tensor:
    """Return ``y`` as the likelihood expects it, on the prediction's device; raise if a target is not finite."""
    check_prediction(prediction)
    if prediction.mean.numel() == 0:
        raise ShapeError("prediction must be of at least one point; it has none.")
    y = prediction.checked_targets(y)
    if not bool(torch.isfinite(y).all()):
        raise RangeError(f"y must be finite; got {describe(y)}.")
    return y


def check_normal(prediction: Prediction, name: str) -> None:
    """Raise unless the targets have Gaussian noise."""
    check_prediction(prediction)
    if not is_normal(prediction.target_distribution):
        raise PyroDropoutError(
            f"{name} is for Gaussian likelihoods, but this prediction is of {prediction.family}; classes have"
            " reliability, ece and brier."
        )


def normal_pieces(prediction: Prediction) -> Iterator[tuple[Any, Tensor, Tensor]]:
    """Yield some points, and the means and standard deviations of their parts, each (T, points, D)."""
    for points in prediction.pieces():
        p = base_of(prediction.distribution_at(points))
        yield points, p.loc.to(_F64), p.scale.to(_F64).clamp_min(_THINNEST)


def together(pieces: Iterable[Tensor]) -> Tensor:
    """Concatenate results for some points at a time; a site that is a single number has one piece."""
    found = list(pieces)
    return found[0] if len(found) == 1 else torch.cat(found)


def mixture_cdf(loc: Tensor, scale: Tensor, z: Tensor) -> Tensor:
    """Return the probability below z, (...), of equally weighted normals (T, ...)."""
    below: Tensor = torch.special.ndtr((z - loc) / scale).mean(0)
    return below


def fast_quantile(loc: Tensor, scale: Tensor, level: float) -> Tensor:
    """Return a quantile of equally weighted normals (T, ...), by Newton steps inside a bracket.

    Three or four passes over the parts replace forty bisections: a curve of intervals needs dozens of quantiles. A step
    that leaves the bracket, or does not halve the one before it, is replaced by a bisection.
    """
    inner = torch.special.ndtri(torch.tensor(level, dtype=_F64, device=loc.device))
    parts = loc + scale * inner
    low, high = parts.amin(0), parts.amax(0)  # the mixture's quantile lies between those of its parts
    width = (scale.square().mean(0) + loc.var(0, correction=0)).sqrt()
    z = torch.minimum(torch.maximum(loc.mean(0) + width * inner, low), high)
    before, near = high - low, 1e-6 * scale.amin(0)
    done = before <= near
    for _ in range(100):
        u = (z - loc) / scale
        excess = torch.special.ndtr(u).mean(0) - level
        density = (torch.exp(-0.5 * u.square()) / scale).mean(0) / math.sqrt(2 * math.pi)
        low, high = torch.where(excess < 0, z, low), torch.where(excess > 0, z, high)
        newton = torch.where(excess == 0, z, z - excess / density)
        good = (newton >= low) & (newton <= high) & ((newton - z).abs() <= before / 2)
        # Converged values stay: steps of the size of rounding errors do not halve, and would look like bad ones.
        following = torch.where(done, z, torch.where(good, newton, (low + high) / 2))
        before, z = (following - z).abs(), following
        done = done | (before <= near)  # each Newton step squares the error: after this one none is left
        if bool(done.all()):
            break
    return z
