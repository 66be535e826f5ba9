"""Which way the evidence of a Laplace approximation rises: its slope in the log precisions of noise and priors.

The point moves with the precisions, by dw = Λ⁻¹ (∂²log p(y, w)/∂w∂θ) dθ, with the Gauss-Newton Λ. At a maximum
log p(y, w) does not notice, but the curvature does: it is that of another point. Without this part, which MacKay's
fixed points leave out, one layer's weights grow while another's shrink, and the fit follows the noise.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pyro_dropout.generative.inputs import inputs_of, takes_all
from pyro_dropout.guides.laplace import AutoLaplace
from pyro_dropout.mathematics.curvature import NOISE, log_evidence, precisions_of
from pyro_dropout.protocols import Weights
from pyro_dropout.training.laplace.laplace import laplace

F64 = torch.float64
_NEAR = 0.2  # the change of a log precision over which the curvature is compared: many kinks of ReLU, if there are any
_POINTS = 1000  # data for that comparison
_FLOOR = 1.0  # nats: slopes below it are uncertain


def evidence_slope(model: Any, guide: AutoLaplace, x: object, y: Tensor | None, names: list[str]) -> dict[str, float]:
    """Return the slope of log p(D) in log precisions, of a point that is trained again wherever they change.

    Args:
        model: a ``BayesianNet``, or one inside ``Standardised``.
        guide: its Laplace approximation, at a maximum of the posterior.
        x: the training inputs, or a ``DataLoader``.
        y: the training targets.
        names: of precisions: sites, and "tau" for the noise.
    """
    curvature, weights = guide.curvature, guide.mean()
    zeros = torch.zeros(len(names), dtype=F64, requires_grad=True)
    with torch.enable_grad():
        value = log_evidence(curvature, weights, dict(zip(names, zeros.unbind(), strict=True)))
        (slope,) = torch.autograd.grad(value, zeros)
    pulls = {name: weights[name].to(F64) * precision for name, precision in precisions_of(curvature).items()}
    x, y, num_data = _some(model, x, y)

    def log_det(moved: Weights) -> float:
        there = laplace(model, {**weights, **moved}, x, y, guide.structure, num_data=num_data)
        return there.curvature.log_det().item()

    through = {}  # the slope of -½ log det through the point
    for name in pulls:
        move = _solved(guide, {n: -pull * (n == name) for n, pull in pulls.items()})  # a precision pulls by -Pw
        high, low = (
            log_det({n: (weights[n] + sign * _NEAR * d).to(weights[n]) for n, d in move.items()}) for sign in (1, -1)
        )
        through[name] = -0.25 * (high - low) / _NEAR
    through[NOISE] = -sum(through.values())  # at a maximum the log-likelihood pulls by Pw, in proportion to τ
    return {name: explicit + through[name] for name, explicit in zip(names, slope.tolist(), strict=True)}


def uphill(guide: AutoLaplace, slope: Mapping[str, float]) -> dict[str, float]:
    """Return a step of the log precisions along a slope g of the evidence, of less than 1 each.

    With c = P‖w‖² of a site or τ‖y - f‖² of the noise, the evidence bends by c/2 in a log precision at MacKay's fixed
    points, so the step is g/(c/2) where that is small.
    """
    curvature, weights = guide.curvature, guide.mean()
    sizes = {name: (p * weights[name].to(F64).square()).sum() for name, p in precisions_of(curvature).items()}
    if curvature.squares is not None:
        sizes[NOISE] = curvature.squares
    return {name: rise / (abs(rise) + 0.5 * sizes[name].item() + _FLOOR) for name, rise in slope.items()}


def _solved(guide: AutoLaplace, pull: Weights) -> Weights:
    """Return Λ⁻¹ v for a vector v by site: the slope of ½ vᵀ Λ⁻¹ v."""
    leaves = {name: value.clone().requires_grad_() for name, value in pull.items()}
    with torch.enable_grad():
        total = 0.5 * torch.stack([block.squared_length(leaves) for block in guide.curvature]).sum()
        return dict(zip(leaves, torch.autograd.grad(total, list(leaves.values())), strict=True))


def _some(model: Any, x: object, y: Tensor | None) -> tuple[object, Tensor | None, int | None]:
    """Return some of the data, at equal distances, and how many they stand for."""
    if y is None or takes_all(model) or len(y) <= _POINTS:
        return x, y, None
    rows = torch.linspace(0, len(y) - 1, _POINTS).long()
    return inputs_of(x)[rows], y[rows.to(y.device)], len(y)
