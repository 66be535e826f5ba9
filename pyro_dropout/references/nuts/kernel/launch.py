"""Compiles a kernel of chains for a GPU, in a second or two, and runs it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyro_dropout.engines.torch_internals import compile_cuda
from pyro_dropout.references.nuts.kernel.source import Source
from pyro_dropout.references.nuts.kernel.values import UnsupportedError

# Takes the states of all chains, (C, words), the constants, noise (C, steps, 3), momenta (C, M, d), draws, the steps
# spent on them, and two numbers: how many steps to take, and how many were taken before.
Launch = Callable[..., None]


_MOST = 2**22  # bytes of one chain: with more, a processor of the GPU is too slow for it


def compiled(source: Source, device: torch.device) -> Launch:
    """Return a function that runs a kernel on a GPU, without waiting for it."""
    if source.memory > _MOST:
        raise UnsupportedError(f"a chain of this model needs {source.memory} bytes, and may have {_MOST}")
    gpu: Any = torch.cuda.get_device_properties(device)
    near = source.memory <= gpu.shared_memory_per_block_optin
    text = source.text if near else "#define FAR\n" + source.text
    with torch.cuda.device(device), any_headers():
        kernel = compile_cuda(text, "chains")
        if near:
            kernel.set_shared_memory_config(source.memory)
    far: list[Tensor] = []

    def launch(states: Tensor, *others: Tensor | int) -> None:
        if not far:
            far.append(states if near else states.new_empty(len(states), source.memory // states.itemsize))
        with torch.cuda.device(device):
            sizes = (len(states), 1, 1), (source.threads, 1, 1)
            kernel(*sizes, [far[0], states, *others], shared_mem=source.memory if near else 0)

    return launch


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
