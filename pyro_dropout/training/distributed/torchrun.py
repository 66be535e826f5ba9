"""torchrun's environment variables: the rank and the number of processes, the device, and whether this is a restart."""

import os

import torch

from pyro_dropout.mathematics.errors import PyroDropoutError, RangeError

NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
HOW = "start the script with torchrun, for example: torchrun --nproc-per-node 2 script.py"


def local_device(device: torch.device | str | None, default: torch.device | str) -> torch.device:
    """Return the device of this process: the CUDA device of its local rank, unless one was given by number.

    Args:
        device: the requested device.
        default: where the model and data are now.
    """
    found = torch.device(default if device is None else device)
    if found.type != "cuda" or (device is not None and found.index is not None):
        return found
    local, there = number("LOCAL_RANK", 0), torch.cuda.device_count()
    if local >= there:
        raise PyroDropoutError(
            f"this is process {local} of its machine, counted from 0, but the machine has {there} CUDA devices: start"
            f" at most {there} processes on it (torchrun --nproc-per-node {max(1, there)})."
        )
    return torch.device("cuda", local)


def started_together() -> bool:
    """Whether this process was started as one of several, by torchrun or in the same way."""
    return number("WORLD_SIZE", 1) > 1


def rank_here() -> int:
    """Return the rank of this process; 0 for a single process."""
    return number("RANK", 0) if started_together() else 0


def restarted() -> bool:
    """Whether torchrun has started this process to replace one that failed."""
    return number("TORCHELASTIC_RESTART_COUNT", 0) > 0


def number(name: str, default: int) -> int:
    """Return a whole number from the environment; raise if it is not one."""
    text = os.environ.get(name, "")
    try:
        return int(text) if text else default
    except ValueError:
        raise RangeError(f"{name} in the environment must be a whole number; got {text!r}: {HOW}.") from None
