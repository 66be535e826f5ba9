"""How the time of a compiled step grows with width, depth, batch and rank."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

import pyro_dropout as pd
from tests.benchmarks.ours import dropout, fitting
from tests.benchmarks.report import Curve, Section
from tests.benchmarks.settings import Settings
from tests.benchmarks.sizes import Size
from tests.benchmarks.timing import Contestant, interleave, reason


@dataclass
class Sweep:
    """One thing that grows.

    Attributes:
        against: its name, with its unit.
        case: what is held fixed.
        size: the network at a value.
        values: where to measure.
        low_rank: whether the value is the rank of AutoLowRank; otherwise the guide is AutoDropout.
    """

    against: str
    case: str
    size: Callable[[int], Size]
    values: list[int]
    low_rank: bool = False

    def guide(self, value: int) -> Callable[[Any], Any]:
        """Return what builds the guide."""
        return (lambda model: pd.AutoLowRank(model, rank=value)) if self.low_rank else dropout


def sweeps(settings: Settings) -> list[Sweep]:
    """Return what grows, as far as the device can take it in little time."""
    if settings.device == "cuda":
        width, batch, deep = 1024, 512, 1024
        ranges = [[256, 1024, 2048, 4096], [2, 4, 8, 16], [512, 2048, 8192, 32768], [2, 8, 32]]
    else:
        width, batch, deep = 128, 128, 256
        ranges = [[64, 256, 1024], [2, 4, 8], [256, 1024, 4096], [4, 16, 64]]
    if settings.quick:
        ranges = [values[:2] for values in ranges]

    def net(layers: list[int], points: int) -> Size:
        return Size("-".join(map(str, layers)), tuple(layers), points)

    return [
        Sweep(
            "hidden layers",
            f"AutoDropout, width {deep}, batch {batch}",
            lambda d: net([13, *[deep] * d, 1], batch),
            ranges[1],
        ),
        Sweep(
            "batch (points)", f"AutoDropout, 13-{width}-{width}-1", lambda b: net([13, width, width, 1], b), ranges[2]
        ),
        Sweep(
            "width (units)",
            f"AutoDropout, two hidden layers, batch {batch}",
            lambda w: net([13, w, w, 1], batch),
            ranges[0],
        ),
        Sweep(
            "rank",
            f"AutoLowRank, 13-{width}-{width}-1, batch {batch}",
            lambda r: net([13, width, width, 1], batch),
            ranges[3],
            low_rank=True,
        ),
    ]


def measure(settings: Settings) -> Iterator[Section]:
    """Measure every curve, and yield them as they come."""
    torch.set_float32_matmul_precision(settings.precisions[0])
    section = Section(
        "Growth",
        "A compiled step of `pd.fit`, the best of the rounds in µs. The slope is that of log time against log size over"
        " the upper half of each curve: 1 is linear, 2 is quadratic, below 1 is not yet limited by arithmetic.",
    )
    for sweep in sweeps(settings):
        curve = Curve(sweep.against, "µs a step", sweep.case)
        for value in sweep.values:
            label = f"{sweep.against} {value}"
            if settings.deadline.over():
                section.absent[label] = "left out, for the time was up"
                continue
            own = not sweep.low_rank
            size, guide = sweep.size(value), sweep.guide(value)
            one = Contestant(
                label,
                lambda s=size, g=guide, o=own: fitting(s, settings.device, g, per_example=o, compile=settings.compile),
            )
            try:
                one.prepare(settings.device, settings.turn)
                interleave([one], settings.rounds, settings.device)
            except Exception as cause:
                section.absent[label] = reason(cause)
                print(f"  {label}: {section.absent[label]}", flush=True)
                continue
            curve.x.append(value)
            curve.y.append(one.best)
            print(f"  {label}: {one.best:.1f} µs", flush=True)
        if curve.x:
            section.curves.append(curve)
        yield section
