"""What a prediction depends on besides its arguments: random states, the mode of networks, values of parameters."""

import contextlib
import copy
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from pyro_dropout.generative.trial_run import modules_of
from pyro_dropout.protocols import Likelihood

_PIECE = 2**20  # numbers that a checksum processes at once


class RandomState:
    """The states of torch's generators on the CPU and on ``device``, as they are now."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._cpu = device, torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def restore(self) -> None:
        """Put the generators back into these states."""
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed the two generators; ``torch.manual_seed`` would also seed those of all other devices."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


def forked(device: torch.device) -> AbstractContextManager[None]:
    """Restore the generators' states on exit."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


@contextlib.contextmanager
def seeded(seed: int | None, device: torch.device) -> Iterator[None]:
    """Draw random numbers from a seed, and restore the generators' states on exit; without a seed, do nothing."""
    with forked(device) if seed is not None else contextlib.nullcontext():
        if seed is not None:
            seed_generators(int(seed), device)
        yield


@contextlib.contextmanager
def evaluating(*roots: object) -> Iterator[None]:
    """Within this context networks are in evaluation mode and record no gradients."""
    modes = [(module, module.training) for module in modules_of(*roots)]
    try:
        for module, _ in modes:
            module.training = False
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def frozen(likelihood: Likelihood) -> Likelihood:
    """Return a copy that training does not change; it works for tensors with a gradient history too."""
    tensors = (*likelihood.parameters(), *likelihood.buffers()) if isinstance(likelihood, nn.Module) else ()
    return copy.deepcopy(likelihood, {id(tensor): tensor.detach().clone() for tensor in tensors})


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
