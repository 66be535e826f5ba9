"""Run a model once to inspect it, without side effects."""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn


@contextlib.contextmanager
def quietly(*modules: object) -> Iterator[None]:
    """Restore random states and the buffers of ``modules`` on leaving the context."""
    buffers = [buffer for module in modules_of(*modules) for buffer in module._buffers.values() if buffer is not None]
    kept = [buffer.detach().clone() for buffer in buffers]
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, value in zip(buffers, kept, strict=True):
                    buffer.copy_(value)


def modules_of(*roots: object) -> Iterator[nn.Module]:
    """Yield every submodule of those ``roots`` that are modules."""
    for root in roots:
        if isinstance(root, nn.Module):
            yield from root.modules()
