"""What it costs to make a part of a large network Bayesian: ``python -m tests.benchmarks.adapters``, on a CPU.

The network is a small language model of 3.5 million weights, with classes of whole texts. Three ways: all linear layers
random, the last one alone (``only=``), adapters of rank 8 (LoRA) on a frozen network; each with several guides. Memory
is the most that torch allocates in three steps, beyond the network itself.
"""

import itertools
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pyro_dropout as pd
from tests.benchmarks.language import Block
from tests.oracles.memory import peak_allocated

WIDTH, DEPTH, HEADS, WORDS, LENGTH, CLASSES, BATCH = 256, 4, 4, 2000, 32, 10, 16
GUIDES: dict[str, Callable[[Any], Any]] = {
    "AutoDropout": lambda model: pd.AutoDropout(model, keep=0.9),
    "AutoMeanField": pd.AutoMeanField,
    "AutoLowRank": lambda model: pd.AutoLowRank(model, rank=2),
    "AutoRowMixture": pd.AutoRowMixture,
}
PLAIN = "plain torch, dropout"


class Classifier(nn.Module):
    """Words to the logits of a class of the whole text."""

    def __init__(self, rank: int = 0, drop: float = 0.0) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block(WIDTH, HEADS, drop, rank) for _ in range(DEPTH)))
        self.norm, self.classifier = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)
        if rank:
            for name, parameter in self.named_parameters():
                parameter.requires_grad_(".down." in name or ".up." in name or name.startswith("classifier."))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.blocks(self.words(ids) + self.positions.weight)
        out: Tensor = self.classifier(self.norm(x).mean(1))
        return out


def linear_alone(name: str, module: nn.Module) -> bool:
    """Hide everything but linear layers."""
    return not isinstance(module, nn.Linear)


WAYS: dict[str, Callable[[], pd.BayesianNet]] = {
    "all layers": lambda: pd.BayesianNet(Classifier(), pd.Prior(hide=linear_alone), pd.Categorical()),
    "last layer": lambda: pd.BayesianNet(Classifier(), likelihood=pd.Categorical(), only="classifier.*"),
    "LoRA": lambda: pd.BayesianNet(Classifier(rank=8), likelihood=pd.Categorical()),
}


def plain() -> tuple[Callable[[int], float], int]:
    """Return what takes steps of plain dropout with Adam, and how many numbers are trained."""
    import time

    net = Classifier(drop=0.1)
    optimiser = torch.optim.Adam(net.parameters(), lr=1e-4)
    x, y = data()

    def advance(steps: int) -> float:
        start = time.perf_counter()
        for _ in range(steps):
            optimiser.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimiser.step()
        return time.perf_counter() - start

    return advance, sum(p.numel() for p in net.parameters())


def ours(way: str, guide: str) -> tuple[Callable[[int], float], int]:
    """Return what takes eager steps of ``fit``, and how many numbers are trained."""
    model = WAYS[way]()
    posterior = GUIDES[guide](model)
    x, y = data()
    how: Any = {"lr": 1e-4, "compile": False, "progress": False}
    trained = [*posterior.parameters(), *(p for name, p in model.net.named_parameters() if name not in model.sites)]
    count = sum(p.numel() for p in trained if p.requires_grad)
    return lambda steps: pd.fit(model, posterior, x, y, steps=steps, **how).seconds, count


def data() -> tuple[Tensor, Tensor]:
    return torch.randint(WORDS, (BATCH, LENGTH)), torch.randint(CLASSES, (BATCH,))


def main() -> None:
    torch.manual_seed(0)
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    rows = {(PLAIN, ""): plain()} | {pair: ours(*pair) for pair in itertools.product(WAYS, GUIDES)}
    peaks = {pair: peak_allocated(lambda advance=advance: advance(3)) for pair, (advance, _) in rows.items()}
    times: dict[tuple[str, str], list[float]] = {pair: [] for pair in rows}
    for _ in range(3):
        for pair, (advance, _) in rows.items():
            times[pair].append(advance(steps) / steps)
    base = times[PLAIN, ""]
    print("| random | guide | trained numbers | memory beyond the network, MiB | step, relative to plain torch |")
    print("|---|---|---|---|---|")
    for pair, (_, count) in rows.items():
        ratio = statistics.median(a / b for a, b in zip(times[pair], base, strict=True))
        print(f"| {pair[0]} | {pair[1]} | {count:,} | {peaks[pair] / 2**20:.0f} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
