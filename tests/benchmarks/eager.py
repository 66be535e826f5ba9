"""Eager steps of ``pd.fit`` beside plain dropout in torch: ``python -m tests.benchmarks.eager [--memory]``.

Times are those of steps on a CPU, the median of turns that the contestants take in one process. Memory is the most that
torch held in a training of a network with 100 million weights, by the allocator's own record, one process for each.
"""

import argparse
import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import pyro_dropout as pd
from tests.oracles.memory import peak_allocated

BATCH, KEEP = 64, 0.9
GUIDES: dict[str, Callable[[pd.BayesianNet], Any]] = {
    "dropout": lambda model: pd.AutoDropout(model, keep=KEEP),
    "mean field": pd.AutoMeanField,
    "low rank 2": lambda model: pd.AutoLowRank(model, rank=2),
    "row mixture": pd.AutoRowMixture,
}


def layers(width: int, count: int, *, dropout: bool) -> nn.Sequential:
    """Return weight layers of one width with ReLU, and dropout before each where asked for."""
    parts: list[nn.Module] = []
    for _ in range(count):
        parts += [*([nn.Dropout(1 - KEEP)] if dropout else []), nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*parts[:-1])


def plain(width: int, count: int) -> Callable[[int], float]:
    """Return what takes steps of plain dropout with Adam, and says how many seconds they took."""
    net = layers(width, count, dropout=True)
    optimiser = torch.optim.Adam(net.parameters(), lr=1e-4)
    x, y = torch.randn(BATCH, width), torch.randn(BATCH, width)

    def advance(steps: int) -> float:
        start = time.perf_counter()
        for _ in range(steps):
            optimiser.zero_grad()
            F.mse_loss(net(x), y).backward()
            optimiser.step()
        return time.perf_counter() - start

    return advance


def fitted(guide: str, width: int, count: int) -> Callable[[int], float]:
    """Return what takes eager steps of ``pd.fit`` with a guide, and says how many seconds they took."""
    model = pd.BayesianNet(layers(width, count, dropout=False))
    posterior = GUIDES[guide](model)
    x, y = torch.randn(BATCH, width), torch.randn(BATCH, width)
    how: dict[str, Any] = {"lr": 1e-4, "compile": False, "progress": False}
    return lambda steps: pd.fit(model, posterior, x, y, steps=steps, **how).seconds


def times(rounds: int, steps: int) -> None:
    """Print the time of a step with each guide, relative to plain dropout."""
    kinds = {"plain dropout": plain(1000, 3)} | {name: fitted(name, 1000, 3) for name in GUIDES}
    found: dict[str, list[float]] = {name: [] for name in kinds}
    for turn, (name, advance) in itertools.product(range(rounds + 1), kinds.items()):
        seconds = advance(steps)
        if turn:  # the first is for warming up
            found[name].append(seconds / steps)
    print(f"Eager steps, 3 layers of 1000 x 1000, {BATCH} points, {torch.get_num_threads()} thread")
    for name, taken in found.items():
        ratio = statistics.median(a / b for a, b in zip(taken, found["plain dropout"], strict=True))
        print(f"{name:<14} {1e3 * statistics.median(taken):8.2f} ms, {ratio:6.2f} of plain dropout", flush=True)


def peak(kind: str, width: int, count: int) -> int:
    """Return the most bytes held in a training of three steps, network and guide included."""

    def train() -> None:
        advance = plain(width, count) if kind == "plain dropout" else fitted(kind, width, count)
        advance(3)

    return peak_allocated(train)


def memory(width: int, count: int) -> None:
    """Print the peak of plain dropout and of ``pd.fit``, each measured in its own process."""
    found = {}
    for kind in ("plain dropout", "dropout"):
        call = f"from tests.benchmarks.eager import peak; print(peak({kind!r}, {width}, {count}))"
        done = subprocess.run([sys.executable, "-c", call], capture_output=True, text=True, check=True)
        found[kind] = int(done.stdout)
        ratio = found[kind] / found["plain dropout"]
        print(f"{count} x {width}² weights, {kind}: {found[kind] / 2**30:.2f} GiB at most, {ratio:.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--memory", action="store_true", help="measure memory, not time")
    parser.add_argument("--width", type=int, default=5000, help="of the layers whose memory is measured")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=10, help="in a turn")
    given = parser.parse_args()
    if given.memory:
        memory(given.width, 4)
    else:
        times(given.rounds, given.steps)


if __name__ == "__main__":
    main()
