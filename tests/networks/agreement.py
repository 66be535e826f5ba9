"""Whether a pair predicts what stochastic passes through its network give: the oracle is torch's own training mode."""

import torch
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
