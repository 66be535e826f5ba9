"""The most probable weights of a small network, by L-BFGS on all data: it takes far fewer steps than Adam.

Weights are in units of their prior, in which the prior bends equally in all directions. Networks with ReLU have kinks,
where no direction has a slope that holds for long and L-BFGS stops; Adam goes on along them.
"""

from typing import Any

import torch
from torch import Tensor, nn

from pyro_dropout.generative.precision import HALF
from pyro_dropout.generative.trial_run import evaluating
from pyro_dropout.mathematics.shapes import base_distribution
from pyro_dropout.protocols import Weights
from pyro_dropout.training.laplace.curvature import checked_batch, inside, network_in

F64 = torch.float64
_FLAT = 0.01  # a slope, in units of the prior, where it ends
_CHANGE = 1e-7  # of the weights or of log p(y, w) in a step, where it cannot go on
_PAIRS = 30  # of steps and slopes that are remembered
_LR = 0.01  # of Adam, in units of the prior
_KINK = 0.1  # a slope where it has ended, but not at a maximum


def can_climb(model: Any) -> bool:
    """Whether all that training moves are random weights, in single precision at least.

    Otherwise there are ordinary parameters, of the network or of its likelihood, or running statistics.
    """
    net = network_in(model)
    own = net.likelihood.parameters() if isinstance(net.likelihood, nn.Module) else ()
    ordinary = [*net.hidden_parameters().values(), *own]
    half = any(value.dtype in HALF for value in net.net.parameters())
    return not half and not net._moving() and not any(value.requires_grad for value in ordinary)


def most_probable(model: Any, x: object, y: Tensor, weights: Weights, steps: int) -> Weights:
    """Return weights where log p(y, w) of all data has a maximum, uphill from given ones, in so many steps at most.

    The model is a ``BayesianNet``, or one inside ``Standardised``.
    """
    inputs, targets = checked_batch(model, weights, x, y)
    net, inputs, targets = inside(model, inputs, targets)
    scales = {name: base_distribution(net.prior_of(name)).scale for name in weights}
    # In float32 the search for a step length ends in rounding; a network without other tensors runs in any type.
    others = [*net.hidden_parameters().values(), *net.net.buffers()]
    if isinstance(inputs, Tensor) and inputs.is_floating_point() and not others:
        inputs, scales = inputs.to(F64), {name: scale.to(F64) for name, scale in scales.items()}
    units = {name: (value.detach().to(scales[name]) / scales[name]).requires_grad_() for name, value in weights.items()}
    values = list(units.values())
    climber = torch.optim.LBFGS(
        values, max_iter=steps, history_size=_PAIRS, line_search_fn="strong_wolfe", tolerance_grad=_FLAT,
        tolerance_change=_CHANGE,
    )  # fmt: skip

    def surprise(checked: bool = False) -> Tensor:
        climber.zero_grad()
        f = net.evaluate({name: value * scales[name] for name, value in units.items()}, inputs)
        y = net.likelihood.checked(f, targets)
        if checked:
            net.likelihood.check_values(f.detach(), y)
        found: Tensor = -net.likelihood.distribution(f).log_prob(y).sum()
        found = found + 0.5 * torch.stack([value.square().sum() for value in values]).sum()
        found.backward()
        return found.detach()

    with evaluating(model), torch.enable_grad():
        surprise(checked=True)
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
    return {name: (value.detach() * scales[name]).to(weights[name]) for name, value in units.items()}
