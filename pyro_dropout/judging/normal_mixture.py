"""A prediction with Gaussian noise as a mixture of T normals for every target, one for each draw.

Its parts in float64, taken a piece at a time so that memory stays bounded.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from pyro_dropout.generative.likelihoods.moments import Points, is_class, is_normal, normal_parts
from pyro_dropout.mathematics.checks import describe
from pyro_dropout.mathematics.errors import PyroDropoutError, RangeError, ShapeError
from pyro_dropout.prediction.prediction import Prediction
from pyro_dropout.prediction.tails import is_whole


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


def check_numbers(prediction: Prediction, name: str, *, whole: bool = True) -> None:
    """Raise unless the targets are numbers, and unless ``whole``, numbers of a continuum."""
    check_prediction(prediction)
    kind = prediction.target_distribution
    if is_class(kind) or (is_whole(kind) and not whole):
        advice = "classes have reliability, ece and brier"
        if not is_class(kind):
            advice = "for whole numbers use coverage, or crps(..., method='sample')"
        raise PyroDropoutError(f"{name} is for numbers, but this prediction is of {prediction.family}; {advice}.")


def check_normal(prediction: Prediction, name: str) -> None:
    """Raise unless the targets have Gaussian noise."""
    check_prediction(prediction)
    if not is_normal(prediction.target_distribution):
        classes = is_class(prediction.target_distribution)
        advice = "classes have reliability, ece and brier" if classes else "use crps(..., method='sample')"
        raise PyroDropoutError(
            f"{name} is for Gaussian likelihoods, but this prediction is of {prediction.family}; {advice}."
        )


def normal_pieces(prediction: Prediction) -> Iterator[tuple[Points, Tensor, Tensor]]:
    """Yield some points, and the means and standard deviations of their parts, each (T, points, D)."""
    return ((points, *normal_parts(prediction.distribution_at(points))) for points in prediction.pieces())


def together(pieces: Iterable[Tensor]) -> Tensor:
    """Concatenate results for some points at a time; a site that is a single number has one piece."""
    found = list(pieces)
    return found[0] if len(found) == 1 else torch.cat(found)
