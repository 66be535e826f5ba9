"""What every score asks of a prediction and its targets before it computes."""

import torch
from torch import Tensor

from pyro_dropout.errors import PyroDropoutError, RangeError, ShapeError
from pyro_dropout.mathematics.checks import describe
from pyro_dropout.prediction.prediction import Prediction


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
