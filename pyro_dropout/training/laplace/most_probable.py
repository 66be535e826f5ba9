"""The most probable weights of a network, by L-BFGS on all data: it takes far fewer steps than Adam.

Weights are in units of their prior, in which the prior bends equally in all directions. Networks with ReLU have kinks,
where no direction has a slope that holds for long and L-BFGS stops; Adam goes on along them.
"""

from typing import Any

import torch
from torch import Tensor, nn

from pyro_dropout.generative.inputs import takes_all
from pyro_dropout.generative.trial_run import evaluating
from pyro_dropout.mathematics.curvature_blocks import F64
from pyro_dropout.mathematics.shapes import base_distribution
from pyro_dropout.protocols import Weights
from pyro_dropout.training.laplace.curvature import data_inside

_FLAT = 0.01  # a slope, in units of the prior, where it ends
_CHANGE = 1e-7  # of the weights or of log p(y, w) in a step, where it cannot go on
_PAIRS = 30  # of steps and slopes that are remembered
_LR = 0.01  # of Adam, in units of the prior
_KINK = 0.1  # a slope where it has ended, but not at a maximum
_POINTS = 4096  # data that run together


def most_probable(model: Any, x: object, y: Tensor, weights: Weights, steps: int) -> Weights:
    """Return weights where log p(y, w) of all data has a maximum, uphill from given ones, in so many steps at most.

    The model is a ``BayesianNet``, or one inside ``Standardised``. Its ordinary parameters, and those of its likelihood
    other than τ, are trained where they are.
    """
    with evaluating(model):
        net, inputs, targets = data_inside(model, weights, x, y)
    scales = {name: base_distribution(net.prior_of(name)).scale for name in weights}
    beside = dict(net.likelihood.named_parameters()) if isinstance(net.likelihood, nn.Module) else {}
    beside.pop("log_tau", None)
    ordinary = [*net.hidden_parameters().values(), *beside.values()]
    # In float32 the search for a step length ends in rounding; a network without other tensors runs in any type.
    if isinstance(inputs, Tensor) and inputs.is_floating_point() and not [*ordinary, *net.net.buffers()]:
        inputs, scales = inputs.to(F64), {name: scale.to(F64) for name, scale in scales.items()}
    units = {name: (value.detach().to(scales[name]) / scales[name]).requires_grad_() for name, value in weights.items()}
    values = [*units.values(), *(value for value in ordinary if value.requires_grad)]
    climber = torch.optim.LBFGS(
        values, max_iter=steps, history_size=_PAIRS, line_search_fn="strong_wolfe", tolerance_grad=_FLAT,
        tolerance_change=_CHANGE,
    )  # fmt: skip
    together = len(targets) if takes_all(net) else _POINTS

    def surprise() -> Tensor:
        climber.zero_grad()
        found = 0.5 * torch.stack([value.square().sum() for value in units.values()]).sum()
        found.backward()
        for start in range(0, len(targets), together):
            part = slice(start, start + together)
            own = inputs if together >= len(targets) else inputs[part]
            f = net.evaluate({name: value * scales[name] for name, value in units.items()}, own)
            missed: Tensor = -net.likelihood.distribution(f).log_prob(net.likelihood.checked(f, targets[part])).sum()
            missed.backward()
            found = found + missed
        return found.detach()

    with evaluating(model), torch.enable_grad():
        climber.step(surprise)
        stopped = climber.state[values[0]]["n_iter"] < steps
        surprise()
        if stopped and max(float(value.grad.abs().max()) for value in values if value.grad is not None) > _KINK:
            walker = torch.optim.Adam(values, lr=_LR)
            falling = torch.optim.lr_scheduler.CosineAnnealingLR(walker, steps)
            for _ in range(steps):
                surprise()
                walker.step()
                falling.step()
        climber.zero_grad()
    return {name: (value.detach() * scales[name]).to(weights[name]) for name, value in units.items()}
