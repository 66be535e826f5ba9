"""The plain scores: log density, root mean squared error, accuracy, and the score of intervals."""

import torch
from torch import Tensor

from pyro_dropout.errors import RangeError, ShapeError
from pyro_dropout.mathematics.checks import check_level, describe
from pyro_dropout.mathematics.shapes import Float
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


@score(
    "interval",
    heading="interval score",
    meaning="Width of the central 95 % interval, plus 40 times how far it misses its target, in the units of y.",
    better="less",
    of=("numbers",),
    order=5,
)
def central_interval_score(prediction: Prediction, y: Tensor) -> Tensor:
    """Return the score of the central 95 % interval of each target."""
    low, high = prediction.interval(0.95)
    return interval_score(low, high, y.to(low).reshape(low.shape))


def interval_score(low: Tensor, high: Tensor, y: Tensor, level: float = 0.95) -> Float[Tensor, "*N"]:
    """Score the central interval of each target, in the units of y (Gneiting and Raftery, 2007); lower is better.

    The score is width + (2/α)·distance, α = 1 - level, with the distance of y from an interval that misses it. Its
    expectation is least where the ends are the true quantiles, so it rewards intervals that are narrow and hold.

    Args:
        low: the lower ends, (N, D), such as those of ``prediction.interval(level)``; -inf is allowed, and scores inf.
        high: the upper ends.
        y: the targets.
        level: the probability with which an interval should contain its target.

    Returns:
        The score of each target, in the shape of y.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> low, high = torch.zeros(3), torch.ones(3)
        >>> pdrop.judging.interval_score(low, high, torch.tensor([0.5, 1.5, -1.0]), level=0.8)
        tensor([ 1.,  6., 11.])
    """
    check_level("level", level)
    if not low.shape == high.shape == y.shape:
        shapes = ", ".join(str(tuple(each.shape)) for each in (low, high, y))
        raise ShapeError(f"low, high and y must have the same shape; got {shapes}.")
    if not bool((low <= high).all()):
        raise RangeError(f"low must not be above high; got {describe(low)} and {describe(high)}.")
    if not bool(torch.isfinite(y).all()):
        raise RangeError(f"y must be finite; got {describe(y)}.")
    outside = (low - y).clamp_min(0) + (y - high).clamp_min(0)
    return high - low + 2 / (1 - level) * outside
