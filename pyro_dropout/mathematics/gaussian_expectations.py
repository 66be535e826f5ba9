"""Expectations of functions of one normal number, to rounding error, by the trapezoid rule.

For a smooth function that falls off at both ends the rule's error is e^(-2πd/h): h is the step, and d the distance of
the function's nearest pole from the real axis. All is in float64.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

_F64 = torch.float64
_REACH = 10.0  # standard deviations beyond which a normal density is nothing
_BELOW = 45.0  # e^-45 of the largest value is nothing, too
_FARTHEST = 1e6
NODES, _ZOOMS = 513, 6


def sigmoid_moments(mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return E s, Var s, E s(1 - s) and the mean entropy of a coin with the probability s = sigmoid(f), f normal."""
    mean, std = mean.to(_F64), std.to(_F64)
    narrow, wide = _narrow(mean, std.clamp_max(1)), _wide(mean, std.clamp_min(1))
    p, spread, noise, entropy = (torch.where(std < 1, a, b) for a, b in zip(narrow, wide, strict=True))
    return p, spread, noise, entropy


def _narrow(mean: Tensor, std: Tensor) -> tuple[Tensor, ...]:
    """For std up to 1, at nodes of the normal variable."""
    z = torch.linspace(-_REACH, _REACH, 201, dtype=_F64, device=mean.device)
    weights = torch.softmax(-0.5 * z.square(), 0)
    s = torch.sigmoid(mean.unsqueeze(-1) + std.unsqueeze(-1) * z)
    p = s @ weights
    entropy = torch.special.entr(s) + torch.special.entr(1 - s)
    return p, (s - p.unsqueeze(-1)).square() @ weights, (s * (1 - s)) @ weights, entropy @ weights


def _wide(mean: Tensor, std: Tensor) -> tuple[Tensor, ...]:
    """For std from 1 up, at nodes of f: sigmoid(f) is the probability that a logistic variable is less than f."""
    u = torch.linspace(-40, 40, 321, dtype=_F64, device=mean.device)
    step, s = 0.25, torch.sigmoid(u)
    slope = torch.sigmoid(u) * torch.sigmoid(-u)
    z = (mean.unsqueeze(-1) - u) / std.unsqueeze(-1)
    density = torch.exp(-0.5 * z.square()) / (std.unsqueeze(-1) * math.sqrt(2 * math.pi))
    p = torch.special.ndtr(z) @ slope * step
    noise = density @ slope * step
    entropy = density @ (torch.special.entr(s) + torch.special.entr(torch.sigmoid(-u))) * step
    return p, (p * (1 - p) - noise).clamp_min(0), noise, entropy


def log_expectation(log_g: Callable[[Tensor], Tensor], mean: Tensor, std: Tensor) -> Tensor:
    """Return log E g(f) for a normal f and a positive function g, which may be far narrower than the density of f.

    ``log_g`` gives log g at nodes f, (nodes, ...). A grid that reaches a million standard deviations, finest in the
    middle, is narrowed, six times, to where the product of both densities is not negligible.
    """
    mean, std = mean.to(_F64), std.to(_F64)
    t = torch.linspace(-1, 1, NODES, dtype=_F64, device=mean.device).reshape(-1, *[1] * mean.dim())
    z = torch.sinh(math.asinh(_FARTHEST) * t).expand(NODES, *mean.shape)
    for zoom in range(_ZOOMS + 1):
        h = log_g(mean + std * z) - 0.5 * z.square()
        h = torch.where(torch.isfinite(h), h, -torch.inf)  # where g is zero, or too far away to be computed
        if zoom < _ZOOMS:
            large = (h > h.amax(0) - _BELOW).to(torch.uint8)
            first = (large.argmax(0) - 1).clamp_min(0).unsqueeze(0)
            last = (NODES - large.flip(0).argmax(0)).clamp_max(NODES - 1).unsqueeze(0)
            low, high = z.gather(0, first), z.gather(0, last)
            z = low + (high - low) * (t + 1) / 2
    step = (z[1] - z[0]).log()
    found: Tensor = torch.logsumexp(h, 0) + step - 0.5 * math.log(2 * math.pi)
    return found
