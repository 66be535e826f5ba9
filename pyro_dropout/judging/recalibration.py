"""Fit one number on a validation set: the noise of a regression, or the temperature of a classifier.

The weights and the draws do not change, only how outputs are interpreted. That corrects a prediction that is
overconfident or underconfident everywhere, without training.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from pyro_dropout.errors import PyroDropoutError, ShapeError, warn_caller
from pyro_dropout.generative.likelihoods import Gaussian
from pyro_dropout.generative.likelihoods.moments import Running, block_log_prob, block_sums, is_one_of
from pyro_dropout.mathematics.checks import check_positive, describe
from pyro_dropout.prediction.prediction import Prediction, check_prediction
from pyro_dropout.prediction.site_prediction import SitePrediction
from pyro_dropout.protocols import Likelihood

_F64 = torch.float64
_FAR = 0.1  # between accuracy and mean confidence
_NEAR = 0.02  # the same where draws are votes, which no temperature brings nearer
_VOTES = 0.99  # the mean confidence of single draws above which each is a vote for one class
_FLAT = 0.001  # nats a point, of no use to anybody
_AS_GOOD = 2.0  # nats in all, within which 95 % of searches have the truth (half of χ²'s quantile, 1.92)


def refit_tau(prediction: Prediction, y: Tensor) -> float:
    """Return the noise precision τ under which the targets of a validation set are most probable.

    It maximises Σ_n log p(y_n | x_n), one τ for all targets. Apply it with ``with_tau``. It is in the units of y;
    ``Gaussian(tau)`` inside ``Standardised`` needs ``standardised_tau`` of it.

    Args:
        prediction: with a ``Gaussian`` likelihood, at the validation points, samples kept.
        y: their targets, (N, D), which should all have the same units.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> model = pdrop.BayesianNet(torch.nn.Linear(2, 1), likelihood=pdrop.Gaussian(tau=100.0))
        >>> answer = pdrop.predict(model, pdrop.AutoDropout(model, keep=1.0), torch.zeros(4, 2), samples=5)
        >>> y = answer.mean + torch.tensor([[2.0], [-2.0], [2.0], [-2.0]])  # all are off by 2: τ = 1/2²
        >>> round(pdrop.judging.refit_tau(answer, y), 6)
        0.25
    """
    _check_outputs(prediction, "refit_tau", gaussian=True)
    y = prediction.checked_targets(y).to(_F64)
    count, _, width = prediction.samples.shape
    pieces = [(prediction.samples[:, n].to(_F64) - y[n]).square().sum(-1) for n in prediction.pieces()]
    squares = torch.cat(pieces, 1)  # (T, N): ‖y - f_t‖²

    def score(log_tau: float) -> float:
        tau = math.exp(log_tau)
        each = torch.logsumexp(-0.5 * tau * squares, 0) - math.log(count)
        return 0.5 * width * log_tau + each.mean().item()

    # At the maximum 1/τ is a weighted mean of the squares: between those of the nearest and of the farthest draws.
    nearest, farthest = squares.amin(0).mean().item() / width, squares.amax(0).mean().item() / width
    if nearest < torch.finfo(_F64).tiny:
        raise PyroDropoutError(
            "y is met exactly by a draw at every point, so the likelihood increases with tau without bound: refit_tau"
            " needs targets that were not fitted."
        )
    return math.exp(_highest(score, -math.log(farthest), -math.log(nearest), 33)[0])


def refit_temperature(prediction: Prediction, y: Tensor) -> float:
    """Return the temperature under which the classes of a validation set are most probable.

    It maximises Σ_n log p(y_n | x_n), and is found in about 45 passes over the samples. Apply it with ``tempered``.
    Warns if that calibrates nothing, because the draws differ too much from each other: a temperature divides their
    differences as well. And if the classes hardly say which one it is, because all that are smaller are about as good.

    Args:
        prediction: of classes, at the validation points, samples kept.
        y: class indices, (N,); with a Bernoulli likelihood 0 and 1, (N, D).

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> model = pdrop.BayesianNet(torch.nn.Linear(1, 1, bias=False), likelihood=pdrop.Bernoulli())
        >>> guide = pdrop.AutoDropout(model, keep=1.0, init=lambda name, shape: torch.ones(shape))
        >>> answer = pdrop.predict(model, guide, torch.full((4, 1), 5.0), samples=3)  # log-odds 5: 99.3 % yes
        >>> temperature = pdrop.judging.refit_temperature(answer, torch.tensor([1, 1, 1, 0]))  # but three of four
        >>> round(pdrop.judging.tempered(answer, temperature).probs[0].item(), 4)
        0.75
    """
    _check_outputs(prediction, "refit_temperature", gaussian=False)
    y = prediction.checked_targets(y)
    y = y if prediction.one_of_several else y.to(_F64)
    samples, pieces = prediction.samples, list(prediction.pieces())
    count, points, _ = samples.shape

    def score(log_temperature: float) -> float:
        cooler = math.exp(-log_temperature)
        outputs = ((samples[:, n].to(_F64) * cooler, y[n]) for n in pieces)
        total = [block_log_prob(prediction.likelihood.distribution(f), target).sum().item() for f, target in outputs]
        return math.fsum(total) / points - math.log(count)

    logits = samples.to(_F64)
    logits = logits - logits.mean(-1, keepdim=True) if prediction.one_of_several else logits
    size = logits.square().mean().sqrt().item()
    if size == 0:
        raise PyroDropoutError("the logits of all classes are equal in every draw, so no temperature changes them.")
    low, high = (math.log(size) + math.log(10) * k for k in (-3, 3))
    found, inside = _highest(score, low, high, 17)
    grid = [low + k / 8 for k in range(1, int(8 * (high - low)))]

    def as_good(highest: float) -> float:
        """Return the largest temperature that these classes cannot tell from the best one."""
        return max((each for each in grid if score(each) > highest - _AS_GOOD / points), default=found)

    if not inside and found < (low + high) / 2:  # the largest that loses nothing to speak of: below it draws are votes
        sharpest = score(low)
        found = max((each for each in grid if score(each) > sharpest - _FLAT), default=low)
        warn_caller(
            "sharper draws always help, as they are almost never wrong here: below a temperature of"
            f" {math.exp(found):.3g} they gain less than {_FLAT} nats a point. A single mistake on new data costs them"
            f" more: up to {math.exp(as_good(sharpest)):.2g} all are within {_AS_GOOD:g} nats of them in all. More"
            " validation data would say more."
        )
    elif not inside:
        raise PyroDropoutError(
            f"no temperature is best: the likelihood still rises at {math.exp(found):.3g}. The logits carry no"
            " information about these classes, or the opposite; check the accuracy first."
        )
    best = score(found)
    if _warn_if_in_vain(prediction, y, math.exp(found)) or not inside or score(low) <= best - _AS_GOOD / points:
        return math.exp(found)
    largest = as_good(best)
    warn_caller(
        f"these classes hardly say which temperature is best: all temperatures below {math.exp(largest):.2g} are within"
        f" {_AS_GOOD:g} nats of the likelihood at {math.exp(found):.2g}. The smaller one is, the more does a single"
        f" mistake cost on new data: use {math.exp(largest):.2g}, or more validation data.",
    )
    return math.exp(found)


def _warn_if_in_vain(prediction: Prediction, y: Tensor, temperature: float) -> bool:
    """Warn if a prediction is far less confident than it is right, at its best temperature too; return whether."""
    probs, counted = tempered(prediction, temperature).probs, prediction.counted(y)
    several = prediction.one_of_several
    sure = probs.amax(-1) if several else torch.maximum(probs, 1 - probs)
    right = probs.argmax(-1) == y if several else (probs > 0.5) == (y > 0.5)
    accuracy, confidence = (each[counted].to(_F64).mean().item() for each in (right, sure))
    by_chance = 3 * (confidence * (1 - confidence) / max(1, int(counted.sum()))) ** 0.5  # three standard errors
    f = prediction.samples.to(_F64) / temperature
    single = (f.softmax(-1).amax(-1) if several else f.abs().sigmoid()).mean().item()  # confidence of single draws
    vain: bool = accuracy - confidence > max(_NEAR if single > _VOTES else _FAR, by_chance)
    if vain:
        warn_caller(
            f"no temperature calibrates this prediction: at the best one, {temperature:.3g}, its mean confidence is"
            f" {confidence:.2f} and its accuracy {accuracy:.2f}. The draws differ too much from each other: narrow the"
            " posterior instead, as laplace(..., validation=(x, y)) does, or use less dropout.",
        )
    return vain


def with_tau(prediction: Prediction, tau: float) -> Prediction:
    """Return the same draws with another noise precision τ; the given prediction does not change.

    Args:
        prediction: with a ``Gaussian`` likelihood, samples kept.
        tau: the noise precision, for example that of ``refit_tau``.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> model = pdrop.BayesianNet(torch.nn.Linear(2, 1), likelihood=pdrop.Gaussian(tau=100.0))
        >>> answer = pdrop.predict(model, pdrop.AutoDropout(model), torch.zeros(4, 2), samples=5)
        >>> wider = pdrop.judging.with_tau(answer, tau=0.25)
        >>> wider.aleatoric[0].item(), torch.equal(wider.epistemic, answer.epistemic)
        (4.0, True)
    """
    _check_outputs(prediction, "with_tau", gaussian=True)
    check_positive("tau", tau)
    if torch.as_tensor(tau).numel() != 1:
        raise ShapeError(f"tau must be one number for all targets; got {describe(tau)}.")
    return reweighted(prediction, Gaussian(float(tau)).to(prediction.samples.device), prediction.samples)


def tempered(prediction: Prediction, temperature: float) -> Prediction:
    """Return the same draws with their logits divided by a temperature; the given prediction does not change.

    Args:
        prediction: of classes, samples kept; the new one's ``samples`` are the divided logits.
        temperature: above 1 for a less confident prediction, for example that of ``refit_temperature``.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> model = pdrop.BayesianNet(torch.nn.Linear(2, 3), likelihood=pdrop.Categorical())
        >>> answer = pdrop.predict(model, pdrop.AutoDropout(model), torch.ones(4, 2), samples=5)
        >>> bool((pdrop.judging.tempered(answer, temperature=2.0).entropy > answer.entropy).all())
        True
    """
    _check_outputs(prediction, "tempered", gaussian=False)
    check_positive("temperature", temperature)
    return reweighted(prediction, prediction.likelihood, prediction.samples / float(temperature))


def reweighted(prediction: Prediction, likelihood: Likelihood, samples: Tensor) -> Prediction:
    """Return a new prediction at the same points: these outputs, (T, N, D), under this likelihood."""
    count, points, _ = samples.shape
    running = Running(points)
    for piece in prediction.pieces():
        running.add(0, count, piece, block_sums(likelihood, samples[:, piece]))
    made = Prediction(likelihood, running.sums, count, prediction.like, samples)
    made.members = prediction.members
    return made


def _check_outputs(prediction: Prediction, name: str, *, gaussian: bool) -> None:
    """Raise unless the samples are outputs of a network, with Gaussian noise or of classes."""
    check_prediction(prediction)
    if isinstance(prediction, SitePrediction):
        raise PyroDropoutError(f"{name} is for outputs of networks; site {prediction.site!r} of a Pyro model has none.")
    if not gaussian:
        prediction.check_kind(name, "classes")
    elif not is_one_of(prediction.likelihood, Gaussian):
        raise PyroDropoutError(
            f"{name} is for the likelihood Gaussian(tau), and this prediction is of {prediction.family}; for classes"
            " use refit_temperature and tempered."
        )


def _highest(score: Callable[[float], float], low: float, high: float, nodes: int) -> tuple[float, bool]:
    """Return where ``score`` is highest between ``low`` and ``high``, and whether that is not at an end.

    A grid brackets the highest maximum, since there may be several, and Brent's method refines it.
    """
    from scipy.optimize import minimize_scalar

    step = (high - low) / (nodes - 1)
    best = max(range(nodes), key=lambda k: score(low + k * step))
    ends = (low + max(best - 1, 0) * step, low + min(best + 1, nodes - 1) * step)
    found = minimize_scalar(lambda at: -score(at), bounds=ends, method="bounded", options={"xatol": 1e-7})
    return float(found.x), 0 < best < nodes - 1
