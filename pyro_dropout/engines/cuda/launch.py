"""Compiles a kernel for a GPU, in a second or two."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from pyro_dropout.engines.torch_internals import compile_cuda


def near_memory(device: torch.device) -> int:
    """Return how many bytes the threads of a block can share."""
    gpu: Any = torch.cuda.get_device_properties(device)
    return int(gpu.shared_memory_per_block_optin)


def compiled(text: str, name: str, device: torch.device, shared: int = 0) -> Any:
    """Return a kernel: a function of the sizes of its grid and of its blocks, a list of arguments, and ``shared_mem``.

    Args:
        text: its source.
        name: of the function.
        device: for which it is compiled.
        shared: bytes that the threads of a block share.
    """
    with torch.cuda.device(device), any_headers():
        kernel = compile_cuda(text, name)
        if shared:
            kernel.set_shared_memory_config(shared)
    return kernel


@contextmanager
def any_headers() -> Iterator[None]:
    """Within this context torch does not ask where CUDA's headers are: many machines have none, and none is needed."""
    from torch.utils import cpp_extension

    before = cpp_extension.CUDA_HOME
    cpp_extension.CUDA_HOME = before or str(Path(torch.__file__).parent)
    try:
        yield
    finally:
        cpp_extension.CUDA_HOME = before
