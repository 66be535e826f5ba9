"""The table: microseconds for one training step, and their ratio to plain dropout in eager PyTorch."""

import gc
import re
from collections.abc import Iterator

import pyro
import torch

from tests.benchmarks import jax_peers, ours, peers
from tests.benchmarks.report import Row, Section, Task
from tests.benchmarks.sizes import Size
from tests.benchmarks.timing import Contestant, Settings, interleave, median_ratio, ready

IN_FP32 = {peers.BASELINE, "fit, AutoDropout", "fit, AutoMeanField, one draw a step"}
COLUMNS = {
    "size": "network",
    "precision": "products",
    "contestant": "who",
    "us": "µs a step",
    "ratio": "ratio",
    "median_ratio": "median ratio",
}


def lined_up(size: Size, settings: Settings, precision: str) -> list[Contestant]:
    """Return the contestants in the order of the table; where TF32 was measured, fp32 has the main ones only."""
    device = settings.device
    baseline, *others = peers.contestants(size, device)
    everyone = [baseline, *ours.contestants(size, device, compile=settings.compile)]
    everyone += [*others, *jax_peers.contestants(size, device, precision)]
    everyone = [each for each in everyone if each is baseline or re.search(settings.who, each.name)]
    if precision == "highest" and "high" in settings.precisions:
        return [each for each in everyone if each.name in IN_FP32 or each.name.startswith("JAX")]
    return everyone


def measured(size: Size, precision: str, settings: Settings, absent: dict[str, str]) -> list[Row]:
    """Return a row for each contestant on one network; those that are absent are noted, with the reason."""
    torch.set_float32_matmul_precision(precision)
    pyro.set_rng_seed(0)
    label, missing = {"high": "TF32", "highest": "fp32"}[precision], dict[str, str]()
    everyone = ready(lined_up(size, settings, precision), settings.device, settings.turn, missing)
    absent |= {f"{who} ({size.name} {label})": why for who, why in missing.items()}
    interleave(everyone, settings.rounds, settings.device)
    baseline = everyone[0]
    if baseline.name != peers.BASELINE:
        raise RuntimeError("without the baseline there is nothing to compare with")
    found: list[Row] = [
        {
            "size": f"{size.name}, batch {size.batch}",
            "precision": label,
            "contestant": each.name,
            "us": each.best,
            "ratio": each.best / baseline.best,
            "median_ratio": median_ratio(each, baseline),
        }
        for each in everyone
    ]
    del everyone, baseline  # their tensors and programs are of no more use
    gc.collect()
    return found


def section(settings: Settings) -> tuple[Section, Iterator[Task]]:
    """Return the table of every size in every precision."""
    made = Section(
        "Training steps",
        "One step of Adam on one batch, the same at every step. All contestants of a network are in one process; in"
        f" each of {settings.rounds} rounds everyone takes a turn of about {settings.turn:g} s or one step, and the"
        " best round counts. The ratio is to the baseline's best round; the median ratio is the middle of all rounds'."
        " Smaller is faster." + ("" if settings.compile else " Nothing is compiled here."),
        COLUMNS,
    )
    cases = ((size, precision) for precision in settings.precisions for size in settings.sizes)
    return made, (
        (f"{size.name} {precision}", lambda s=size, p=precision: measured(s, p, settings, made.absent))
        for size, precision in cases
    )
