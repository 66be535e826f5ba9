"""What a prediction depends on besides its arguments: values of parameters and buffers, copied or summed up."""

import copy
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from pyro_dropout.protocols import Likelihood

_CONTAINERS = (dict, set, list)
_PIECE = 2**20  # numbers that a checksum processes at once


def frozen(likelihood: Likelihood) -> Likelihood:
    """Return a copy that training does not change; it works for tensors with a gradient history too."""
    if isinstance(likelihood, nn.Module) and all(map(_is_fixed, vars(likelihood).values())):
        made = object.__new__(type(likelihood))  # a deep copy takes many times as long
        vars(made).update({name: v.copy() if isinstance(v, _CONTAINERS) else v for name, v in vars(likelihood).items()})
        return made
    tensors = (*likelihood.parameters(), *likelihood.buffers()) if isinstance(likelihood, nn.Module) else ()
    return copy.deepcopy(likelihood, {id(tensor): tensor.detach().clone() for tensor in tensors})


def _is_fixed(value: object) -> bool:
    """Whether a shallow copy of an attribute is a deep one: a number, a word, nothing, or an empty container."""
    if isinstance(value, (*_CONTAINERS, tuple)):
        return not value
    return value is None or isinstance(value, bool | int | float | str)


def fingerprint(tensors: Iterable[Tensor]) -> list[object]:
    """Return numbers that change when a tensor changes, in whatever way.

    They are computed from the values: an assignment to ``.data`` does not change torch's version counters.
    """
    each = list({id(tensor): tensor for tensor in tensors}.values())
    shapes = [(tuple(value.shape), value.dtype, value.device) for value in each]
    return [shapes, torch.stack([_checksum(value.detach()).to("cpu") for value in each]).tolist()]


def _checksum(value: Tensor) -> Tensor:
    """Return Σ bitsᵢ·(2i + 1) modulo 2⁶⁴: odd factors have inverses, so a change of one number changes the sum."""
    flat = value.contiguous().reshape(-1)
    bits = flat.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=value.device)
    for start in range(0, len(bits), _PIECE):
        piece = bits[start : start + _PIECE].long()
        factors = torch.arange(start, start + len(piece), device=value.device) * 2 + 1
        total = total + (piece * factors).sum()
    return total
