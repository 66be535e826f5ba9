"""What torchrun tells a process in its environment: which of how many it is, on which device, and whether anew."""

import os

import torch

from pyro_dropout.mathematics.errors import PyroDropoutError, RangeError

NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
HOW = "start the script with torchrun, for example: torchrun --nproc-per-node 2 script.py"


def local_device(device: torch.device | str | None, default: torch.device | str) -> torch.device:
    """Return the device of this process: of CUDA's, the one with its local rank, unless another was named by number.

    Args:
        device: the device that was asked for.
        default: where things are now.
    """
    found = torch.device(default if device is None else device)
    if found.type != "cuda" or (device is not None and found.index is not None):
        return found
    local, there = number("LOCAL_RANK", 0), torch.cuda.device_count()
    if local >= there:
        raise PyroDropoutError(
            f"this is process {local} of its machine, counted from 0, and the machine has {there} CUDA devices: start"
            f" at most {there} processes on it (torchrun --nproc-per-node {max(1, there)})."
        )
    return torch.device("cuda", local)


def started_together() -> bool:
    """Whether this process was started as one of several, by torchrun or in its manner."""
    return number("WORLD_SIZE", 1) > 1


def rank_here() -> int:
    """Return the rank that this process was started with; 0 for a process by itself."""
    return number("RANK", 0) if started_together() else 0


def restarted() -> bool:
    """Whether torchrun has started this process in the place of one that failed."""
    return number("TORCHELASTIC_RESTART_COUNT", 0) > 0


def number(name: str, default: int) -> int:
    """Return a whole number from the environment, or say that it is none."""
    text = os.environ.get(name, "")
    try:
        return int(text) if text else default
    except ValueError:
        raise RangeError(f"{name} in the environment must be a whole number; got {text!r}: {HOW}.") from None
