"""Prediction: time and memory against the number of draws, and against the bare matrix products."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import pyro_dropout as pd
from pyro_dropout.generative.likelihoods.moments import Running, block_sums
from pyro_dropout.generative.precision import products_in
from pyro_dropout.prediction.blocks import Walk
from pyro_dropout.prediction.weight_draws import PerExample
from tests.benchmarks.figures import Asked, Figure, benchmark
from tests.benchmarks.memory import peak_bytes
from tests.benchmarks.settings import GUIDES, SMALL, WIDE, Setting
from tests.benchmarks.timing import seconds


def walked(size: Setting, device: str, samples: int, points: int, compile: bool) -> tuple[Callable[[], Any], list[int]]:
    """Return one prediction as ``predict`` makes it, compiled once for all calls, and the rows of its blocks."""
    model = size.model(device)
    x = size.data(device, points)[0]
    posterior = GUIDES["dropout"](model).to(device)
    walk = Walk(PerExample(model, posterior), x, samples, chunk=None, seed=None, compile=compile)

    def predict() -> Any:
        sums = Running(len(x))
        walk.run(
            lambda f: block_sums(model.likelihood, f),
            lambda block, result: sums.add(block.draws.start, block.count, block.points, result),
        )
        return sums.sums

    return predict, [block.rows for block in walk.blocks]


def bare_products(size: Setting, device: str, blocks: list[int]) -> Callable[[], None]:
    """Return the matrix products of the same forward passes, and nothing else of them."""
    # Transposed, as a Linear layer has its weight: the two ways do not take the same time.
    weights = [torch.randn(b, a, device=device).mT / a**0.5 for a, b in itertools.pairwise(size.layers)]
    most = max(blocks)
    buffers: list[Tensor] = [torch.randn(most, width, device=device) for width in size.layers]

    def multiply() -> None:
        for rows in blocks:
            for weight, source, target in zip(weights, buffers, buffers[1:], strict=False):
                torch.mm(source[:rows], weight, out=target[:rows])

    return multiply


@benchmark("predictions", "cpu", "cuda")
def predictions(asked: Asked) -> Iterator[Figure]:
    """Draws of a wide network, reduced as ``predict`` does, over their matrix products; then ever more draws."""
    points, samples = (10_000, 1000) if asked.device == "cuda" else (200, 20)
    size = asked.pick(WIDE, SMALL)
    for precision, label in asked.precisions.items():
        torch.set_float32_matmul_precision(precision)
        for compile in [True, False] if asked.compile else [False]:
            predict, blocks = walked(size, asked.device, samples, points, compile)
            multiply = bare_products(size, asked.device, blocks)
            base, own = (seconds(action, asked.device, 2) for action in (multiply, predict))
            name = f"{label}, predict{'' if compile else ', uncompiled'}"
            yield Figure(name, own, "s")
            yield Figure(f"{name}, over its products, {base:.3f} s", own / base)
            if compile and precision == "high":
                with products_in("bf16"):
                    low = seconds(walked(size, asked.device, samples, points, compile)[0], asked.device, 2)
                yield Figure(f"predict in bf16, {low:.3f} s, over {label}", low / own, most=0.6)
    # Powers of two, so that all blocks are full: of the same size, however many they are.
    points = 8192 if asked.device == "cuda" else 128
    model = SMALL.model(asked.device)
    guide, x = GUIDES["dropout"](model).to(asked.device), SMALL.data(asked.device, points)[0]
    for draws in asked.pick([128, 1024, 8192], [128]):

        def predict(draws: int = draws) -> Any:
            return pd.predict(model, guide, x, samples=draws, keep_samples=False)

        what = f"{SMALL.name} at {points} points, {draws} draws"
        yield Figure(what, seconds(predict, asked.device, 2), "s")
        yield Figure(f"{what}, peak memory", peak_bytes(predict, asked.device) / 2**20, "MiB")
