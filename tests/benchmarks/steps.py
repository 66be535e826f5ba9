"""The table: microseconds for one training step, and their ratio to plain dropout in eager PyTorch."""

import gc
from collections.abc import Iterator

import pyro
import torch

from tests.benchmarks import jax_peers, ours, peers
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
    if precision == "highest" and "high" in settings.precisions:
        return [each for each in everyone if each.name in IN_FP32 or each.name.startswith("JAX")]
    return everyone


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
        del everyone, baseline, each  # their tensors and programs are of no more use
        gc.collect()
        yield section
