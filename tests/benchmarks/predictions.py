"""Prediction: time and memory against the number of draws, and against the bare matrix products."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import pyro_dropout as pd
from pyro_dropout.generative.likelihoods.moments import Running, block_sums
from pyro_dropout.prediction.blocks import Walk
from pyro_dropout.prediction.weight_draws import PerExample
from tests.benchmarks.ours import dropout
from tests.benchmarks.report import Row, Section, Task, curve
from tests.benchmarks.sizes import SMALL, WIDE, Size
from tests.benchmarks.timing import Settings, seconds, wait
from tests.oracles.memory import peak_allocated

COLUMNS = {"what": "prediction", "precision": "products", "seconds": "seconds", "ratio": "ratio to the bare products"}


def peak_bytes(action: Callable[[], Any], device: str) -> int:
    """Return the most bytes that ``action`` held beyond those that were there before."""
    if device != "cuda":
        return peak_allocated(action)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    action()
    wait(device)
    return torch.cuda.max_memory_allocated() - before


def against_draws(settings: Settings) -> list[Row]:
    """Return time and peak memory of ``predict`` for ever more draws of a small network."""
    # Powers of two, so that all blocks are full: of the same size, however many they are.
    points = 8192 if settings.device == "cuda" else 128
    draws = [128, 1024] if settings.quick else [128, 1024, 8192]
    model = SMALL.model(settings.device)
    guide = dropout(model).to(settings.device)
    x = SMALL.data(settings.device, points)[0]
    taken, held = [], []
    for samples in draws:

        def predict(samples: int = samples) -> Any:
            return pd.predict(model, guide, x, samples=samples, keep_samples=False)

        taken.append(seconds(predict, settings.device, min(3, settings.rounds)))
        held.append(peak_bytes(predict, settings.device) / 2**20)
    case = f"{SMALL.name} at {points} points"
    return [
        curve("draws T", "seconds", case, draws, taken),
        curve("draws T", "peak memory in MiB", case, draws, held),
    ]


def walked(
    size: Size, settings: Settings, samples: int, points: int, compile: bool
) -> tuple[Callable[[], Any], list[int]]:
    """Return one prediction as ``predict`` makes it, compiled once for all calls, and the rows of its blocks."""
    model = size.model(settings.device)
    x = size.data(settings.device, points)[0]
    posterior = dropout(model).to(settings.device)
    walk = Walk(PerExample(model, posterior), x, samples, chunk=None, seed=None, compile=compile)

    def predict() -> Any:
        sums = Running(len(x))
        walk.first(
            "moments",
            lambda f: block_sums(model.likelihood, f),
            lambda block, result: sums.add(block.draws.start, block.count, block.points, result),
        )
        return sums.sums

    return predict, [block.rows for block in walk._blocks]


def bare_products(size: Size, device: str, blocks: list[int]) -> Callable[[], None]:
    """Return the matrix products of the same forward passes, and nothing else of them."""
    # Transposed, as a Linear layer has its weight: the two ways do not take the same time.
    weights = [torch.randn(b, a, device=device).mT / a**0.5 for a, b in size.shapes]
    most = max(blocks)
    buffers: list[Tensor] = [torch.randn(most, width, device=device) for width in size.layers]

    def multiply() -> None:
        for rows in blocks:
            for weight, source, target in zip(weights, buffers, buffers[1:], strict=False):
                torch.mm(source[:rows], weight, out=target[:rows])

    return multiply


def section(settings: Settings) -> tuple[Section, Iterator[Task]]:
    """Return both tables."""
    points, samples = (10_000, 1000) if settings.device == "cuda" else (200, 20)
    made = Section(
        "Prediction",
        f"T = {samples} draws of {WIDE.name} at {points} points, a draw for each pair, reduced to moments and class"
        " probabilities as `predict` does; compilation is left out. Each ratio is to products timed beside that row."
        " The bare products are the matrix products of the same blocks of rows."
        " The curves are whole calls of `predict`, uncompiled, with samples not kept; a slope"
        " of 0 is memory that does not grow.",
        COLUMNS,
    )

    def measured(precision: str) -> list[Row]:
        torch.set_float32_matmul_precision(precision)
        label, found = {"high": "TF32", "highest": "fp32"}[precision], list[Row]()
        for compile in [True, False] if settings.compile else [False]:
            predict, blocks = walked(WIDE, settings, samples, points, compile)
            multiply = bare_products(WIDE, settings.device, blocks)
            base, own = (seconds(action, settings.device, min(2, settings.rounds)) for action in (multiply, predict))
            if not found:
                found.append({"what": "bare products", "precision": label, "seconds": base, "ratio": 1.0})
            name = f"predict{'' if compile else ', uncompiled'}"
            found.append({"what": name, "precision": label, "seconds": own, "ratio": own / base})
        return found

    tasks: list[Task] = [("curves", lambda: against_draws(settings))]
    tasks += [(f"products {each}", lambda p=each: measured(p)) for each in settings.precisions]  # type: ignore[misc]
    return made, iter(tasks)
