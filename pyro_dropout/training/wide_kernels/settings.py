"""The settings of a training as kernels read them: decays of the KL, limits of the masks, precisions of the noise.

KL(q‖p) = Σ_rows [p Σ m²/(2s²) + p log p + (1 - p) log(1 - p)] for a weight, and Σ b²/(2s²) for a bias at a point: the
paper's form at σ = 0.
"""

import torch
from torch import Tensor

from pyro_dropout.training.wide_kernels.dropout_network import DropoutNetwork


def keep_of(network: DropoutNetwork, buffers: list[Tensor], layer: int) -> Tensor:
    """Return how probably each input of a layer is kept, (networks, inputs), in float64."""
    count = len(buffers[0])
    return buffers[network.keeps[layer]].double().reshape(count, -1).expand(count, network.widths[layer])


def mask_limits(network: DropoutNetwork, buffers: list[Tensor]) -> Tensor:
    """Return the largest number of 32 bits with which an input of a layer is kept, (networks, units)."""
    keeps = [keep_of(network, buffers, k) for k in range(len(network.keeps))]
    return (torch.cat(keeps, 1) * 2**32).ceil().long() - 1  # of 32 bits, as many numbers are below as keep says


def kl_constant(network: DropoutNetwork, buffers: list[Tensor]) -> Tensor:
    """Return what the KL has beside its squares, (networks,)."""
    keeps = [keep_of(network, buffers, k) for k in range(len(network.keeps))]
    entropies = [(torch.xlogy(p, p) + torch.xlogy(1 - p, 1 - p)).sum(1) for p in keeps]
    return sum((heat * h for heat, h in zip(network.temperatures, entropies, strict=True)), 0 * entropies[0])


def weight_decay(network: DropoutNetwork, buffers: list[Tensor], layer: int) -> Tensor:
    """Return the decay of a layer's weights: (networks, outputs, inputs), or one row for all outputs if they agree."""
    count, widths = len(buffers[0]), network.widths
    scale = buffers[network.priors[2 * layer]].double()
    own = scale.shape[1:]
    scale = scale.reshape(count, *(1,) * (2 - len(own)), *own)
    whole = network.temperatures[layer] * keep_of(network, buffers, layer).unsqueeze(1) / scale.square()
    return whole.expand(count, whole.shape[1], widths[layer])


def bias_decay(network: DropoutNetwork, buffers: list[Tensor], layer: int) -> Tensor:
    """Return the decay of a layer's biases, (networks, outputs)."""
    count, outputs = len(buffers[0]), network.widths[layer + 1]
    return (
        buffers[network.priors[2 * layer + 1]].double().square().reciprocal().reshape(count, -1).expand(count, outputs)
    )


def log_precisions(network: DropoutNetwork, buffers: list[Tensor]) -> Tensor | None:
    """Return the noise's log precision, (networks, outputs); None if it is learned, or there is none."""
    if network.log_tau is None:
        return None
    count = len(buffers[0])
    return buffers[network.log_tau].reshape(count, -1).expand(count, network.widths[-1])
