"""How torch's compiler compiles a recorded graph."""

import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from pyro_dropout.engines.kernel_folder import check_compiler_folder
from pyro_dropout.engines.torch_internals import combined_by, compile_fx

_GRAIN = 2**15  # the size from which torch's own operations use a second thread on a CPU
_LONG = 2**19  # numbers that a reduction reads


def compiled(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Sequence[Tensor]]:
    """Return a graph as a program of inductor's, for an example of its inputs."""
    # Straight to inductor: Dynamo has nothing to find in a finished graph, and its guards cost time at every call. The
    # warnings are about torch's own internals.
    check_compiler_folder()
    on_gpu = any(tensor.is_cuda for tensor in inputs)
    with torch.no_grad(), warnings.catch_warnings(), combined_by(by_shape) if on_gpu else nullcontext():
        warnings.simplefilter("ignore")
        return compile_fx(graph, inputs, settings(on_gpu))


def settings(on_gpu: bool) -> dict[str, Any]:
    """Return the settings of inductor."""
    # A step has many small sums, one per layer; on a GPU their launches dominate, so they are launched together.
    return {"combo_kernels": on_gpu, "cpp.min_chunk_size": _GRAIN, "fallback_random": not on_gpu}


def by_shape(nodes: list[Any]) -> list[list[Any]]:
    """Return kernels in groups to be launched together: each shape of long reductions, and all others.

    Kernels that are combined share the sizes of their blocks. What suits sums over the points of a batch is far too
    small for a kernel that updates a million weights and sums their squares, which then takes ten times as long.
    """
    groups: dict[object, list[Any]] = {}
    for node in nodes:
        sizes = tuple(node.group[-1])
        known = all(str(size).isdigit() for size in sizes)
        long = known and node.is_reduction() and math.prod(map(int, sizes)) >= _LONG
        groups.setdefault(sizes if long else None, []).append(node)
    return list(groups.values())
