"""Whether a pair predicts what stochastic passes through its network give: the oracle is torch's own training mode."""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from pyro import poutine
from torch import Tensor, nn

import pyro_dropout as pd


def stochastic_passes(net: nn.Module, x: Tensor, samples: int) -> Tensor:
    """Outputs of a network in training mode, (samples, N, D); running statistics are used and not moved."""
    net.train()
    for module in net.modules():
        if isinstance(module, nn.modules.batchnorm._NormBase):
            module.eval()
    with torch.no_grad():
        return net(x.repeat(samples, *[1] * (x.dim() - 1))).reshape(samples, len(x), -1)


def predicted(model: nn.Module, guide: object, x: Tensor, samples: int, shared: bool = False) -> Tensor:
    found: Tensor = pd.predict(model, guide, x, samples=samples, shared=shared, keep_samples=True, seed=1).samples
    return found


def per_point(model: Any, guide: Any, *data: Tensor) -> Tensor:
    """The model's outputs with a draw of the guide for each data point."""
    with pd.per_example(), torch.no_grad():
        trace = poutine.trace(guide).get_trace(*data)
        found: Tensor = poutine.replay(model, trace=trace)(*data)
    return found


def masked(q: Any) -> Iterator[Tensor]:
    """All weights that a site with dropped rows can have, at means of ``q``."""
    for kept in itertools.product((0.0, 1.0), repeat=q.rows):
        yield q.loc * q.per_row(torch.tensor(kept, dtype=q.loc.dtype))


def largest_z(one: Tensor, other: Tensor) -> float:
    """The largest difference of means and of variances, in standard errors, of samples (T, ...)."""
    one, other = one.double(), other.double()
    scores = []
    for power in (1, 2):
        parts = [each if power == 1 else (each - each.mean(0)).square() for each in (one, other)]
        error = sum(part.var(0) / len(part) for part in parts).sqrt()
        rounding = 1e-5 * parts[0].mean(0).abs() + 1e-7  # where nothing is random
        scores.append(((parts[0].mean(0) - parts[1].mean(0)).abs() / (error + rounding)).max())
    return float(torch.stack(scores).max())
