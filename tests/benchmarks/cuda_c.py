"""Steps of small networks in CUDA C, beside torch's compiler and JAX by hand, in one process and in turns."""

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch

from pyro_dropout.engines.engine import CannotError
from pyro_dropout.engines.in_cuda import InCuda
from tests.benchmarks import jax_peers
from tests.benchmarks.figures import Asked, Figure, benchmark
from tests.benchmarks.ours import EPOCH, dropout, fitting
from tests.benchmarks.sizes import SMALL
from tests.benchmarks.timing import Advance, Contestant, interleave, median_ratio, ready

TO_JAX = 0.7


def ours(device: str, kernel: bool, batches: int = 1) -> Contestant:
    """Return the steps of ``fit``, in CUDA C or not."""

    def build() -> tuple[Advance, int]:
        left_out = mock.patch.object(InCuda, "loop", side_effect=CannotError("left out"))
        with contextlib.nullcontext() if kernel else left_out:
            return fitting(SMALL, device, dropout, per_example=True, compile=True, batches=batches)

    return Contestant(f"fit, {'CUDA C' if kernel else 'inductor'}{', mini-batches' if batches > 1 else ''}", build)


@benchmark("cuda-c", "cuda")
def cuda_c(asked: Asked) -> Iterator[Figure]:
    """A step of 13-50-1, in both precisions."""
    for precision, label in asked.precisions.items():
        torch.set_float32_matmul_precision(precision)
        kernel = ours(asked.device, kernel=True)
        jax = Contestant("JAX by hand", lambda how=precision: jax_peers.dropout(SMALL, asked.device, how))  # type: ignore[misc]
        others = [ours(asked.device, kernel=True, batches=EPOCH), ours(asked.device, kernel=False)]
        here = ready([kernel, jax, *others], asked.device, asked.turn)
        interleave(here, asked.rounds, asked.device)
        for each in here:
            yield Figure(f"{SMALL.name}, {label}, {each.name}", each.best, "µs a step")
        if jax in here:
            yield Figure(f"{SMALL.name}, {label}, CUDA C over JAX", median_ratio(kernel, jax), most=TO_JAX)
