"""How the time of a compiled step grows with width, depth, batch and rank, and what a long run of them takes."""

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

import pyro_dropout as pd
from tests.benchmarks.ours import dropout, fitting
from tests.benchmarks.report import Row, Section, Task, curve
from tests.benchmarks.sizes import DEEP, Size
from tests.benchmarks.timing import Contestant, Settings, interleave

Network = Callable[[int], Size]
LONG = {"cuda": 1_000_000, "cpu": 100}
LONG_COLUMNS = {"steps": "steps", "seconds": "seconds in all", "compiling": "of which compiling", "us": "µs a step"}


def sweeps(settings: Settings) -> list[tuple[str, str, Network, list[int]]]:
    """Return what grows, what is fixed, the network at a value, and the values, as far as the device takes them."""
    if settings.device == "cuda":
        width, batch, deep = 1024, 512, 1024
        ranges = [[2, 4, 8, 16], [512, 2048, 8192, 32768], [256, 1024, 2048, 4096], [2, 8, 32]]
    else:
        width, batch, deep = 128, 128, 256
        ranges = [[2, 4, 8], [256, 1024, 4096], [64, 256, 1024], [4, 16, 64]]

    def net(batch: int, *hidden: int) -> Size:
        return Size("-".join(map(str, (13, *hidden, 1))), (13, *hidden, 1), batch)

    found: list[tuple[str, str, Network]] = [
        ("hidden layers", f"AutoDropout, width {deep}, batch {batch}", lambda d: net(batch, *[deep] * d)),
        ("batch (points)", f"AutoDropout, 13-{width}-{width}-1", lambda b: net(b, width, width)),
        ("width (units)", f"AutoDropout, two hidden layers, batch {batch}", lambda w: net(batch, w, w)),
        ("rank", f"AutoLowRank, 13-{width}-{width}-1, batch {batch}", lambda r: net(batch, width, width)),
    ]
    return [(*each, values[:2] if settings.quick else values) for each, values in zip(found, ranges, strict=True)]


def section(settings: Settings) -> tuple[Section, Iterator[Task]]:
    """Return the curves."""
    torch.set_float32_matmul_precision(settings.precisions[0])
    made = Section(
        "Growth",
        "A compiled step of `fit`, the best of the rounds in µs. The slope is that of log time against log size over"
        " the upper half of each curve: 1 is linear, 2 is quadratic, below 1 is not yet limited by arithmetic.",
    )

    def best(against: str, size: Size, value: int) -> float:
        low_rank = against == "rank"
        guide: Any = (lambda model: pd.AutoLowRank(model, rank=value)) if low_rank else dropout
        how: Any = {"per_example": not low_rank, "compile": settings.compile}
        one = Contestant(against, lambda: fitting(size, settings.device, guide, **how))
        one.prepare(settings.device, settings.turn)
        interleave([one], settings.rounds, settings.device)
        return one.best

    def measured(against: str, case: str, network: Network, values: list[int]) -> list[Row]:
        taken = [best(against, network(value), value) for value in values]
        return [curve(against, "µs a step", case, values, taken)]

    return made, ((sweep[0], lambda s=sweep: measured(*s)) for sweep in sweeps(settings))


def long_run(settings: Settings) -> tuple[Section, Iterator[Task]]:
    """Return the time of the paper's million steps on a GPU; a CPU takes a hundred, for the time of one."""
    torch.set_float32_matmul_precision(settings.precisions[0])
    made = Section(
        "The long run",
        f"One call of `fit`: AutoDropout, {DEEP.name}, a wave with a trend in {DEEP.batch} points, all of them in"
        " every step, SGD with momentum 0.9 and the schedule `inverse_decay()`.",
        LONG_COLUMNS,
    )

    def measured() -> list[Row]:
        steps = LONG[settings.device] // (10 if settings.quick else 1)
        x = torch.linspace(-1.7, 1.7, DEEP.batch).unsqueeze(-1)
        y = torch.sin(4 * math.pi * x) / 2 + x
        model = DEEP.model("cpu")
        how: Any = {"optim": "sgd", "lr": 1e-5, "schedule": pd.training.inverse_decay(), "compile": settings.compile}
        start = time.perf_counter()
        history = pd.fit(
            model, dropout(model), x, y, steps=steps, device=settings.device, progress=False, seed=0, **how
        )
        taken, us = time.perf_counter() - start, 1e6 / history.steps_per_second
        return [{"steps": steps, "seconds": taken, "compiling": history.compile_seconds, "us": us}]

    return made, iter([("the run", measured)])
