"""Run a model once to inspect it, without side effects."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from pyro_dropout.generative.random_state import forked


@contextlib.contextmanager
def quietly(*modules: Any) -> Iterator[None]:
    """Restore random states and the buffers of ``modules`` on leaving the context."""
    buffers = [buffer for module in modules_of(*modules) for buffer in module._buffers.values() if buffer is not None]
    kept = [buffer.detach().clone() for buffer in buffers]
    with forked():
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, value in zip(buffers, kept, strict=True):
                    buffer.copy_(value)


def modules_of(*roots: Any) -> Iterator[nn.Module]:
    """Yield every submodule of those ``roots`` that are modules."""
    for root in roots:
        if isinstance(root, nn.Module):
            yield from root.modules()
