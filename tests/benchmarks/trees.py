"""What a batch in a dict costs beside the same tensors handed in by position: ``python -m tests.benchmarks.trees``."""

import argparse
import itertools
import sys
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

import pyro_dropout as pd
from tests.benchmarks.timing import Advance, Contestant, interleave, median_ratio

ROWS, COLUMNS, BATCHES = 50, 8, 16


def by_position(x: Tensor, y: Tensor) -> None:
    """Linear regression, on two tensors."""
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([1, COLUMNS]).to_event(2))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal((x @ w.mT).squeeze(-1), 1.0), obs=y)


def by_dict(batch: dict[str, Tensor]) -> None:
    """Linear regression, on a dict."""
    by_position(batch["x"], batch["y"])


def contestant(name: str, model: Callable[..., None], batches: list[tuple[Any, ...]]) -> Contestant:
    """Someone who steps through the batches again and again."""

    def build() -> tuple[Advance, int]:
        svi = pd.SVI(model, pd.AutoMeanField(model), pyro.optim.Adam({"lr": 0.001}))
        steps = itertools.cycle(batches)

        def advance(n: int) -> None:
            for _ in range(n):
                svi.step(*next(steps))

        return advance, 1

    return Contestant(name, build)


def measure(rounds: int, turn: float) -> tuple[float, Contestant, Contestant]:
    """Return the ratio of a step on a dict to one on tensors, in the middle of all rounds."""
    maker = torch.Generator().manual_seed(0)
    pairs = [(torch.randn(ROWS, COLUMNS, generator=maker), torch.randn(ROWS, generator=maker)) for _ in range(BATCHES)]
    tensors = contestant("tensors", by_position, list(pairs))
    dicts = contestant("a dict", by_dict, [({"x": x, "y": y},) for x, y in pairs])
    for each in (tensors, dicts):
        each.prepare("cpu", turn)
    interleave([tensors, dicts], rounds, "cpu")
    return median_ratio(dicts, tensors), dicts, tensors


def main(argv: list[str] | None = None) -> int:
    """Print the ratio; the exit status is 1 above ``--at-most``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60, help="turns of each (default: 60)")
    parser.add_argument("--at-most", type=float, default=1.05, help="the largest ratio allowed (default: 1.05)")
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    ratio, dicts, tensors = measure(given.rounds, 0.1)
    print(f"a step on a dict {dicts.best:.0f} us, on tensors {tensors.best:.0f} us (best); ratio {ratio:.3f} (median)")
    return 0 if ratio <= given.at_most else 1


if __name__ == "__main__":
    sys.exit(main())
