"""The distance between two predictions at the same points, such as a guide's and a reference's."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_dropout.errors import PyroDropoutError, ShapeError
from pyro_dropout.generative.likelihoods.moments import F64, base_of, is_class, is_normal
from pyro_dropout.mathematics.mixtures import mixture_cdf
from pyro_dropout.prediction.prediction import Prediction, check_prediction
from pyro_dropout.prediction.site_prediction import SitePrediction

_GRID = 256  # points at which two distribution functions are compared
_PIECE = 2**22  # numbers processed at once


@dataclass(frozen=True)
class PredictiveDistance:
    """The distance of a prediction from the reference; all three numbers are zero if the two are equal.

    Attributes:
        mean: root mean square, over points and outputs, of the difference of the means, in standard deviations of the
            reference.
        std: root mean square of log(standard deviation / reference's); 0.1 is about ten per cent.
        wasserstein: mean of the 1-Wasserstein distances, in units of y: how far probability must be moved.

    Example:
        >>> import pyro_dropout as pdrop
        >>> pdrop.judging.PredictiveDistance(mean=0.1, std=0.2, wasserstein=0.05)
        PredictiveDistance(mean=0.1, std=0.2, wasserstein=0.05)
    """

    mean: float
    std: float
    wasserstein: float


def predictive_distance(prediction: Prediction, reference: Prediction) -> PredictiveDistance:
    """Return how far the targets of ``prediction`` are from those of ``reference``, point by point and averaged.

    Noise is included. Targets are normal, or classes, where D are the classes' indicators, or sites of any kind.

    Args:
        prediction: of an approximate posterior, with its samples kept.
        reference: of the posterior that it approximates, at the same points, with its samples kept.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> x, y = torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0], [2.0]])
        >>> model = pdrop.BayesianNet(torch.nn.Linear(1, 1), likelihood=pdrop.Gaussian(tau=4.0))
        >>> reference = pdrop.predict(model, pdrop.references.conjugate(model, x, y), x, seed=0)
        >>> again = pdrop.predict(model, pdrop.references.conjugate(model, x, y), x, seed=1)
        >>> near = pdrop.judging.predictive_distance(again, reference)
        >>> near.mean < 0.1 and near.std < 0.1 and near.wasserstein < 0.1
        True
    """
    for each in (prediction, reference):
        check_prediction(each)
    if prediction.samples.shape[1:] != reference.samples.shape[1:]:
        shapes = [tuple(each.samples.shape[1:]) for each in (prediction, reference)]
        raise ShapeError(
            f"prediction and reference must be of the same points and outputs, (N, D); got {shapes[0]} and {shapes[1]}."
        )
    (m, s), (m0, s0) = ((each.mean.to(F64), each.std.to(F64)) for each in (prediction, reference))
    if bool((s == 0).any() | (s0 == 0).any()):
        raise PyroDropoutError("a prediction has no spread at some point, so the ratio of spreads is undefined.")
    return PredictiveDistance(
        mean=float(((m - m0) / s0).square().mean().sqrt()),
        std=float((s / s0).log().square().mean().sqrt()),
        wasserstein=float(_wasserstein(prediction, reference).mean()),
    )


def _wasserstein(prediction: Prediction, reference: Prediction) -> Tensor:
    """Return the 1-Wasserstein distance at each point, of each output: (N, D)."""
    both = (prediction, reference)
    kinds = [each.target_distribution for each in both]
    normal, sites = all(map(is_normal, kinds)), all(isinstance(each, SitePrediction) for each in both)
    if all(map(is_class, kinds)):  # of two Bernoulli variables: probability moves between 0 and 1
        return (prediction.mean - reference.mean).to(F64).abs()
    if sites and not normal:
        from scipy.stats import wasserstein_distance

        a, b = (each.samples.to("cpu", F64) for each in both)
        columns = zip(a.reshape(len(a), -1).unbind(1), b.reshape(len(b), -1).unbind(1), strict=True)
        return torch.tensor([wasserstein_distance(*pair) for pair in columns], dtype=F64).reshape(a.shape[1:])
    if not normal:
        names = " and ".join(type(kind).__name__ for kind in kinds)
        raise PyroDropoutError(f"normal targets and classes can be compared; these are {names}.")
    normals = [base_of(each.distribution_at(...)) for each in both]
    shape = normals[0].loc.shape[1:]
    parts = [tuple(part.to(F64).expand(p.loc.shape).flatten(1) for part in (p.loc, p.scale)) for p in normals]
    size = max(1, _PIECE // sum(len(loc) for loc, _ in parts))
    pieces = range(0, parts[0][0].shape[1], size)
    found = [between_mixtures(*((m[:, k : k + size], s[:, k : k + size]) for m, s in parts)) for k in pieces]
    return torch.cat(found).reshape(shape)


def between_mixtures(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> Tensor:
    """Return the distance between two mixtures of normals, each means and scales (T, ...): ∫ |F - G|, (...)."""
    low = torch.minimum(*((m - 6 * s).amin(0) for m, s in (a, b)))
    high = torch.maximum(*((m + 6 * s).amax(0) for m, s in (a, b)))
    step = (high - low) / _GRID
    total = torch.zeros_like(low)
    for k in range(1, _GRID):  # at both ends F and G are the same
        at = low + k * step
        total += (mixture_cdf(*a, at) - mixture_cdf(*b, at)).abs()
    return total * step
