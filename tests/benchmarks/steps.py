"""Microseconds for one training step, and their ratio to plain dropout in eager PyTorch."""

import gc
import re
from collections.abc import Iterator

import pyro
import torch

from tests.benchmarks import jax_peers, ours, peers
from tests.benchmarks.figures import Asked, Figure, benchmark
from tests.benchmarks.sizes import SIZES, SMALL, Size
from tests.benchmarks.timing import Contestant, interleave, median_ratio, ready

IN_FP32 = {peers.BASELINE, "fit, AutoDropout", "fit, AutoMeanField, one draw a step"}


def lined_up(size: Size, asked: Asked, precision: str) -> list[Contestant]:
    """Return the baseline and the others; where TF32 was measured, fp32 has the main ones only."""
    baseline, *others = peers.contestants(size, asked.device)
    everyone = [*ours.contestants(size, asked.device, compile=asked.compile), *others]
    everyone += jax_peers.contestants(size, asked.device, precision)
    if precision == "highest" and "high" in asked.precisions:
        everyone = [each for each in everyone if each.name in IN_FP32 or each.name.startswith("JAX")]
    return [baseline, *(each for each in everyone if re.search(asked.who, each.name))]


def measured(size: Size, asked: Asked, precision: str) -> Iterator[Figure]:
    """Yield the time of each contestant on one network."""
    torch.set_float32_matmul_precision(precision)
    pyro.set_rng_seed(0)
    everyone = ready(lined_up(size, asked, precision), asked.device, asked.turn)
    interleave(everyone, asked.rounds, asked.device)
    baseline = everyone[0]
    if baseline.name != peers.BASELINE:
        raise RuntimeError("without the baseline there is nothing to compare with")
    for each in everyone:
        what = f"{size.name}, batch {size.batch}, {asked.precisions[precision]}, {each.name}"
        yield Figure(what, each.best, "µs a step")
        yield Figure(f"{what}, over the baseline", each.best / baseline.best)
        yield Figure(f"{what}, over the baseline, the median of the rounds", median_ratio(each, baseline))


@benchmark("steps", "cpu", "cuda")
def steps(asked: Asked) -> Iterator[Figure]:
    """One step of Adam on one batch, the same at every step; everyone takes turns in one process."""
    for precision in asked.precisions:
        for size in [SMALL] if asked.quick else list(SIZES.values())[: 3 if asked.device == "cuda" else 2]:
            yield from measured(size, asked, precision)
            gc.collect()  # tensors and programs of no more use
