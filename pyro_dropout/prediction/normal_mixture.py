"""A prediction with Gaussian noise as a mixture of T normals for every target, one for each draw.

Its parts in float64, taken a piece at a time so that memory stays bounded.
"""

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
