"""The table: microseconds for one training step, and their ratio to plain dropout in eager PyTorch."""

import gc
import re
from collections.abc import Iterator

import pyro
import torch

from tests.benchmarks import jax_peers, ours, peers
from tests.benchmarks.ours import RANK
from tests.benchmarks.report import Section
from tests.benchmarks.settings import Settings
from tests.benchmarks.sizes import Size
from tests.benchmarks.timing import Contestant, interleave, median_ratio, reason

SHARE = 0.62  # of the time that there is, when the last of the steps must have begun
IN_FP32 = {peers.BASELINE, "pd.fit, AutoDropout", "pd.fit, AutoMeanField, one draw a step"}
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


def traffic(size: Size, microseconds: float) -> str:
    """Return how fast a low-rank step moves its parameters and Adam's state, which no step can leave unread."""
    factors = 4 * RANK * sum(a * b for a, b in size.shapes)
    means_and_widths = 4 * 2 * size.weights
    # Parameters and the two states of Adam are read and written; the factor is read once more, to draw with.
    total = 6 * (factors + means_and_widths) + factors
    return (
        f" AutoLowRank moves at least {total / 1e9:.2f} GB a step on {size.name}, parameters and Adam's state alone:"
        f" {total / microseconds / 1e3:,.1f} GB/s over the whole step, matrix products included."
    )


def made_ready(
    everyone: list[Contestant], settings: Settings, share: float, where: str, absent: dict[str, str]
) -> None:
    """Build the contestants, the urgent ones first; who cannot take part is struck off, with the reason."""
    for each in sorted(everyone, key=lambda each: each.urgency):
        if each.urgency and settings.deadline.over(share):
            why = "left out, for the time was up"
        else:
            try:
                each.prepare(settings.device, settings.turn)
                continue
            except Exception as cause:
                if not each.urgency:
                    raise  # without the baseline there is nothing to compare with
                why = reason(cause)
        everyone.remove(each)
        absent[each.name if why == "not installed" else f"{where}, {each.name}"] = why
        print(f"  {each.name}: {why}", flush=True)


def measure(settings: Settings) -> Iterator[Section]:
    """Measure every size in every precision, and yield the table as it grows."""
    section = Section(
        "Training steps",
        "One step of Adam on one batch, the same at every step. All contestants of a network are in one process; in"
        f" each of {settings.rounds} rounds everyone takes a turn of about {settings.turn:g} s or one step, and the"
        " best round counts. The ratio is to the baseline's best round; the median ratio is the middle of all rounds'."
        " Smaller is faster." + ("" if settings.compile else " Nothing is compiled here."),
        COLUMNS,
    )
    cases = [(size, precision) for precision in settings.precisions for size in settings.sizes]
    # The first precision has many contestants, another one few.
    parts = [3 if precision == settings.precisions[0] else 1 for _, precision in cases]
    for number, (size, precision) in enumerate(cases, 1):
        torch.set_float32_matmul_precision(precision)
        pyro.set_rng_seed(0)
        label = {"high": "TF32", "highest": "fp32"}[precision]
        where = f"{size.name} {label}"
        print(f"{where}: making ready", flush=True)
        everyone = lined_up(size, settings, precision)
        made_ready(everyone, settings, SHARE * sum(parts[:number]) / sum(parts), where, section.absent)
        interleave(everyone, settings.rounds, settings.device)
        baseline = everyone[0]
        for each in everyone:
            row = {
                "size": f"{size.name}, batch {size.batch}",
                "precision": label,
                "contestant": each.name,
                "us": each.best,
                "ratio": each.best / baseline.best,
                "median_ratio": median_ratio(each, baseline),
            }
            section.rows.append(row)
            print(f"  {each.name}: {each.best:.1f} µs, ratio {row['ratio']:.3f}", flush=True)
            if "AutoLowRank rank" in each.name and size is max(settings.sizes, key=lambda s: s.weights):
                section.note += traffic(size, each.best)
        del everyone, baseline, each  # their tensors and programs are of no more use
        gc.collect()
        yield section
