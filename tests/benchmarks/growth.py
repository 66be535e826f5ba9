"""How the time of a compiled step grows with width, depth, batch and rank, and what a long run of them takes."""

import math
import time
from collections.abc import Iterator
from typing import Any

import torch

import pyro_dropout as pd
from tests.benchmarks.figures import Asked, Figure, benchmark
from tests.benchmarks.ours import dropout, fitting
from tests.benchmarks.sizes import DEEP, SMALL, Size
from tests.benchmarks.timing import Contestant, interleave


def net(batch: int, *hidden: int) -> Size:
    """Return a network of these hidden layers."""
    return Size("-".join(map(str, (13, *hidden, 1))), (13, *hidden, 1), batch)


@benchmark("growth", "cpu", "cuda")
def growth(asked: Asked) -> Iterator[Figure]:
    """A compiled step of ``fit``, while one of depth, batch, width and rank grows."""
    on_gpu = asked.device == "cuda"
    width, batch, deep = (1024, 512, 1024) if on_gpu else (128, 128, 256)
    sweeps: dict[str, Any] = {
        "hidden layers": (lambda d: net(batch, *[deep] * d), [2, 4, 8, 16][: 4 if on_gpu else 3]),
        "points": (lambda b: net(b, width, width), [512, 2048, 8192, 32768] if on_gpu else [256, 1024, 4096]),
        "units": (lambda w: net(batch, w, w), [256, 1024, 2048, 4096] if on_gpu else [64, 256, 1024]),
        "rank": (lambda r: net(batch, width, width), [2, 8, 32] if on_gpu else [4, 16, 64]),
    }
    for against, (network, values) in sweeps.items():
        for value in asked.pick(values, values[:1]):
            low = against == "rank"
            guide: Any = (lambda model, rank=value: pd.AutoLowRank(model, rank=rank)) if low else dropout
            how: Any = {"per_example": not low, "compile": asked.compile}
            size = network(value)
            one = Contestant(against, lambda s=size, g=guide, h=how: fitting(s, asked.device, g, **h))  # type: ignore[misc]
            one.prepare(asked.device, asked.turn)
            interleave([one], asked.rounds, asked.device)
            yield Figure(f"{value} {against}, {size.name}, batch {size.batch}", one.best, "µs a step")


@benchmark("long", "cuda")
def long_run(asked: Asked) -> Iterator[Figure]:
    """The paper's million steps on a GPU: SGD with momentum on a wave with a trend; a CPU takes a hundred."""
    size = asked.pick(DEEP, SMALL)
    steps = (1_000_000 if asked.device == "cuda" else 100) // asked.pick(1, 10)
    x = torch.linspace(-1.7, 1.7, size.batch).unsqueeze(-1).repeat(1, size.layers[0])
    y = torch.sin(4 * math.pi * x[:, :1]) / 2 + x[:, :1]
    model = size.model("cpu")
    how: Any = {"optim": "sgd", "lr": 1e-5, "schedule": pd.training.inverse_decay(), "compile": asked.compile}
    start = time.perf_counter()
    history = pd.fit(model, dropout(model), x, y, steps=steps, device=asked.device, progress=False, seed=0, **how)
    yield Figure(f"{steps} steps", time.perf_counter() - start, "s")
    yield Figure("of which compiling", history.compile_seconds, "s")
    yield Figure("a step", 1e6 / history.steps_per_second, "µs")
