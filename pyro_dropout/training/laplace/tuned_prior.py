"""The prior's width after training: how wide a Laplace approximation should be.

The evidence at a point that fits its training data says nothing about that: on scikit-learn's digits it made mean
confidences of 0.4 beside accuracies of 0.94. Held-out data do: all precisions of the prior are multiplied by one
factor, the one under which these data are most probable in linearised predictions; the point stays where it is.
Without them the default prior is narrowed until it leaves the point's confidence on its training data alone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from pyro_dropout.errors import ShapeError, warn_caller
from pyro_dropout.generative.inputs import takes_all
from pyro_dropout.generative.jacobians import Jacobians
from pyro_dropout.generative.likelihoods import Bernoulli, Categorical
from pyro_dropout.generative.likelihoods.moments import Nodes, Outputs, outputs_of
from pyro_dropout.generative.process_state import forked
from pyro_dropout.generative.trial_run import evaluating
from pyro_dropout.guides.laplace import AutoLaplace
from pyro_dropout.training.laplace.curvature import ASKER, data_inside
from pyro_dropout.training.loader import all_of

_F64 = torch.float64
Pair = tuple[Any, Tensor]  # x and y
_NODES = 256  # quasi-random points of each output
_POINTS, _NUMBERS = 400, 2**22  # the most data, and numbers of their Jacobians that are held at once
_FACTORS = tuple(10 ** (k / 2) for k in range(-2, 12))
_FAR = 0.1  # between accuracy and mean confidence
_LEAVES = 0.01  # of the mean confidence on training data is what a default prior may take
_SAME = 1e-4  # nats a datum in which two predictions may differ and pass for one
_CERTAIN = 1e9  # a factor with which the Gaussian is all but the point
_WIDTH = "Its prior is too wide for this point: give validation=(x, y), held-out data, and its width is tuned."
_POINT = "No prior makes it surer: train the point longer, or divide its logits by a temperature (refit_temperature)."


def tune_prior(guide: AutoLaplace, model: Any, validation: object) -> float:
    """Multiply the prior's precisions in a guide's curvature by the factor that held-out data prefer; return it.

    ``validation`` is (x, y), or a ``DataLoader``; at most 400 data are used.
    """
    if isinstance(validation, DataLoader):
        validation = all_of(validation, None)
    if not isinstance(validation, tuple | list) or len(validation) != 2:
        raise ShapeError(f"validation must be a pair (x, y), or a DataLoader; got {type(validation).__name__}.")
    with evaluating(model):
        net, x, y = data_inside(model, guide.point(), *validation)
    *seen, point = _seen(guide, net, [(x, y)], (*_FACTORS, _CERTAIN))
    best = max(range(len(seen)), key=lambda k: seen[k].log_prob)
    factor = _FACTORS[best]
    if 0 < best < len(seen) - 1:  # the top of the parabola through three points
        low, top, high = (seen[best + k].log_prob for k in (-1, 0, 1))
        factor *= 10 ** (0.25 * (high - low) / (2 * top - low - high)) if 2 * top > low + high else 1.0
    for block in guide.curvature:
        block.prior.mul_(factor)
    _warn_if_unsure(seen[best], "held-out data", _POINT)
    if point.log_prob >= seen[best].log_prob - _SAME * len(y):
        warn_caller(
            f"held-out data find nothing better than the point itself: with {factor:.3g} times the prior's precision"
            " this Laplace approximation predicts as its point does. They may be too few, or the point needs no width.",
        )
    return float(factor)


def judge_on_training_data(guide: AutoLaplace, net: Any, pairs: list[Pair], narrows: bool) -> float:
    """Return the factor of the prior's precisions that training data ask for, and warn of a classifier that is unsure.

    They can say that a prior is too wide for a point, not that it is too narrow. If it ``narrows``, the factor is the
    least, 1 or above, that leaves the confidence of the point alone, or its accuracy if that is less, but for 0.01.
    """
    if not isinstance(net.likelihood, Categorical | Bernoulli):
        return 1.0
    wide, point = _seen(guide, net, pairs, (1.0, _CERTAIN))
    factor, least = 1.0, min(point.sure, point.right) - _LEAVES * point.count
    if narrows and wide.sure < least:
        factors = [each for each in _FACTORS if each > 1]
        found = list(zip(factors, _seen(guide, net, pairs, factors), strict=True))
        factor, wide = next((each for each in found if each[1].sure >= least), found[-1])
        for block in guide.curvature:
            block.prior.mul_(factor)
    _warn_if_unsure(wide, "training data", _POINT if narrows else _WIDTH)
    return float(factor)


@dataclass
class _Seen:
    """Sums over data: of the log predictive density, of confidences, of right answers, and of targets."""

    log_prob: float = 0.0
    sure: float = 0.0
    right: float = 0.0
    count: int = 0

    def add(self, likelihood: Any, said: Outputs, f: Tensor, covariance: Tensor, y: Tensor) -> None:
        """Add some points, whose outputs are Gaussian."""
        density = said.log_prob(f, covariance, y).sum().item()
        self.log_prob += density if math.isfinite(density) else -math.inf
        if not isinstance(likelihood, Categorical | Bernoulli):
            return
        p = said.moments(f, covariance)["mean"]
        if isinstance(likelihood, Categorical):
            counted = y != likelihood.ignore_index
            sure, right = p.amax(-1)[counted], (p.argmax(-1) == y)[counted]
        else:
            sure, right = torch.maximum(p, 1 - p), (p > 0.5) == (y > 0.5)
        self.sure += sure.double().sum().item()
        self.right += right.double().sum().item()
        self.count += sure.numel()


def _seen(guide: AutoLaplace, net: Any, pairs: Sequence[Pair], factors: Sequence[float]) -> list[_Seen]:
    """Return what linearised predictions of some data are worth, for each factor of the prior's precisions."""
    spectra = [block.spectrum(block.prior) for block in guide.curvature]
    found, whole, said = [_Seen() for _ in factors], takes_all(net), outputs_of(net.likelihood, Nodes(_NODES, 0))
    for own, targets in pairs:
        if not whole and len(targets) > _POINTS:
            some = torch.linspace(0, len(targets) - 1, _POINTS, device=targets.device).long()
            own, targets = own[some], targets[some]
        with forked(), evaluating(net), torch.no_grad():
            near = Jacobians(net, guide.point(), guide.random_sites(), own, ASKER)
            targets = net.likelihood.checked(near.like[:1].expand(len(targets), -1), targets)
            size = len(targets) if whole else max(1, _NUMBERS // max(1, near.numbers * near.width))
            for start in range(0, len(targets), size):
                part = slice(start, start + size)
                f, slopes = near.rows(own if whole else own[part])
                flat = {name: value.flatten(0, 1) for name, value in slopes.items()}
                rotated = [(values.to(f), rows(flat).to(f).unflatten(0, f.shape)) for values, rows in spectra]
                for factor, sums in zip(factors, found, strict=True):
                    each = [(rows / (values + factor)) @ rows.mT for values, rows in rotated]
                    sums.add(net.likelihood, said, f, torch.stack(each).sum(0).to(_F64), targets[part])
    return found


def _warn_if_unsure(seen: _Seen, where: str, cure: str) -> None:
    count = max(1, seen.count)
    accuracy, confidence = seen.right / count, seen.sure / count
    by_chance = 3 * (confidence * (1 - confidence) / count) ** 0.5  # three standard errors
    if accuracy - confidence > max(_FAR, by_chance):
        warn_caller(
            f"this Laplace approximation is less confident than it is right: on {where} its mean confidence is"
            f" {confidence:.2f} and its accuracy {accuracy:.2f} (linearised predictions). {cure}",
        )
