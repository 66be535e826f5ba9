"""Steps of small networks in CUDA C: ``python -m tests.benchmarks.cuda_c [--alone]``, on a GPU.

Steps of 13-50-1 as ``fit`` takes them, in CUDA C and by torch's compiler, beside JAX by hand, in one process and in
turns; then fleets of 80 and of 1,600 such networks, both ways. ``--alone`` leaves torch's compiler out.
"""

import argparse
import contextlib
import warnings
from collections.abc import Iterator
from unittest import mock

import torch

from pyro_dropout.engines.engine import CannotError
from pyro_dropout.engines.in_cuda import InCuda
from tests.benchmarks import jax_peers
from tests.benchmarks.fleets import step_of_all
from tests.benchmarks.ours import EPOCH, dropout, fitting
from tests.benchmarks.sizes import SMALL, Size
from tests.benchmarks.timing import Advance, Contestant, Settings, interleave, median_ratio, ready

TO_JAX = 0.7
FLEETS = {80: (2000, 35.0), 1600: (500, 120.0)}  # networks: steps, and the most µs a step of all
LABELS = {"high": "TF32", "highest": "fp32"}


@contextlib.contextmanager
def otherwise() -> Iterator[None]:
    """Within this context no step is taken in CUDA C."""
    with mock.patch.object(InCuda, "loop", side_effect=CannotError("left out")):
        yield


def ours(size: Size, device: str, kernel: bool, batches: int = 1) -> Contestant:
    """Return the steps of ``fit``, in CUDA C or not."""

    def build() -> tuple[Advance, int]:
        with contextlib.nullcontext() if kernel else otherwise():
            return fitting(size, device, dropout, per_example=True, compile=True, batches=batches)

    how = "CUDA C" if kernel else "inductor"
    return Contestant(f"fit, {how}{', shuffled mini-batches' if batches > 1 else ''}", build)


def steps(size: Size, device: str, precision: str, rounds: int, alone: bool) -> None:
    """Print the time of a step of one network."""
    torch.set_float32_matmul_precision(precision)
    kernel, jax = (
        ours(size, device, kernel=True),
        Contestant("JAX by hand, lax.scan", lambda: jax_peers.dropout(size, device, precision)),
    )
    everyone = [kernel, ours(size, device, kernel=True, batches=EPOCH), jax]
    everyone += [] if alone else [ours(size, device, kernel=False)]
    here = ready(everyone, device, 0.05, {})
    interleave(here, rounds, device)
    for each in here:
        print(f"{size.name}, {LABELS[precision]}: {each.name}: {each.best:.1f} µs a step", flush=True)
    if jax in here:
        ratio = median_ratio(kernel, jax)
        print(f"{size.name}, {LABELS[precision]}: {ratio:.2f} of JAX by hand (at most {TO_JAX})", flush=True)


def fleets(settings: Settings, alone: bool) -> None:
    """Print the time of a step of all networks of a fleet."""
    torch.set_float32_matmul_precision(settings.precisions[0])
    for nets, (count, limit) in FLEETS.items():
        name = f"{nets} networks of {SMALL.name}"
        taken = step_of_all(nets, count, settings)
        print(f"{name}, CUDA C: {taken:.1f} µs a step of all (at most {limit:.0f})", flush=True)
        if not alone:
            with otherwise():
                taken = step_of_all(nets, count, settings)
            print(f"{name}, inductor: {taken:.1f} µs a step of all", flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--alone", action="store_true", help="CUDA C and JAX only")
    parser.add_argument("--rounds", type=int, default=7, help="turns that everyone has")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    settings = Settings("cuda", rounds=given.rounds)
    for precision in settings.precisions:
        steps(SMALL, "cuda", precision, given.rounds, given.alone)
    fleets(settings, given.alone)


if __name__ == "__main__":
    main()
