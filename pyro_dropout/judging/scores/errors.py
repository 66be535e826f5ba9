"""The plain scores: log density, root mean squared error, accuracy."""

from torch import Tensor

from pyro_dropout.prediction.prediction import Prediction
from pyro_dropout.registry import score


@score(
    "log_lik",
    heading="test log-lik.",
    meaning="Mean log density of a held-out target, in nats.",
    better="more",
    order=1,
)
def log_density(prediction: Prediction, y: Tensor) -> Tensor:
    """Return log p(y | x) of each point."""
    return prediction.log_prob(y)


@score(
    "rmse",
    heading="RMSE",
    meaning="Root mean squared error of the predictive mean, in the units of y.",
    better="less",
    of=("numbers",),
    order=2,
)
def rmse(prediction: Prediction, y: Tensor) -> float:
    """Return the root mean squared error of the predictive mean."""
    error = prediction.mean.double() - y.to(prediction.mean.device).double().reshape(prediction.mean.shape)
    return float(error.square().mean().sqrt())


@score(
    "accuracy",
    heading="accuracy",
    meaning="Share of held-out points whose most probable class is right.",
    better="more",
    of=("classes",),
    order=3,
)
def accuracy(prediction: Prediction, y: Tensor) -> float:
    """Return the share of targets whose most probable value they have: one of several classes, or yes and no."""
    best = prediction.probs.argmax(-1) if prediction.one_of_several else prediction.probs > 0.5
    y = y.reshape(best.shape).to(best.device)
    return float((best == y.to(best.dtype))[prediction.counted(y)].double().mean())
