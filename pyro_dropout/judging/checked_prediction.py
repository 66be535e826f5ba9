"""What every score asks of a prediction and its targets before it computes."""

import torch
from torch import Tensor

from pyro_dropout.errors import PyroDropoutError, RangeError, ShapeError
from pyro_dropout.generative.likelihoods.moments import is_class
from pyro_dropout.mathematics.checks import describe
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
    """Raise unless the targets are numbers; unless ``whole``, continuous ones."""
    check_prediction(prediction)
    kind = prediction.target_distribution
    if is_class(kind) or (is_whole(kind) and not whole):
        what, advice = "numbers", "classes have reliability, ece and brier"
        if not is_class(kind):
            what, advice = "continuous numbers", "for whole numbers use coverage, or crps(..., method='sample')"
        raise PyroDropoutError(f"{name} is for {what}, but this prediction is of {prediction.family}; {advice}.")
