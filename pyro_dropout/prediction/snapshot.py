"""What a prediction depends on besides its arguments: values of parameters and buffers, copied or summed up."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from pyro_dropout.training.compile.functional import Parameters

_PIECE = 2**20  # numbers that a checksum processes at once


def frozen(module: nn.Module) -> Any:
    """Return a copy that training does not change; it works for tensors with a gradient history too."""
    tensors = (*module.parameters(), *module.buffers())
    return copy.deepcopy(module, {id(tensor): tensor.detach().clone() for tensor in tensors})


def fingerprint(model: Any, posterior: Any, run: Any, x: Tensor) -> list[Any]:
    """Return numbers that change when a parameter, a buffer or ``x`` changes, in whatever way.

    They are computed from the values: an assignment to ``.data`` does not change torch's version counters.
    """
    found = Parameters(model, posterior, run, (x[:1],), {}).by_name
    tensors = {id(value): value for value in (*found.values(), x)}
    for root in (model, posterior):
        if isinstance(root, nn.Module):
            tensors.update({id(value): value for value in (*root.parameters(), *root.buffers())})
    shapes = [(tuple(value.shape), value.dtype, value.device) for value in tensors.values()]
    sums = [checksum(value.detach()).to("cpu") for value in tensors.values()]
    return [shapes, torch.stack(sums).tolist()]


def checksum(value: Tensor) -> Tensor:
    """Return a whole number computed from all bits of a tensor: Σ bitsᵢ·(2i + 1) modulo 2⁶⁴.

    Odd factors have inverses, so any change of a single number changes the sum, however small it is.
    """
    flat = value.contiguous().reshape(-1)
    bits = flat.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=value.device)
    for start in range(0, len(bits), _PIECE):
        piece = bits[start : start + _PIECE].long()
        factors = torch.arange(start, start + len(piece), device=value.device) * 2 + 1
        total = total + (piece * factors).sum()
    return total
