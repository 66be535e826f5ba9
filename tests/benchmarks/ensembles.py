"""What an ensemble costs beside one network: ``python -m tests.benchmarks.ensembles``, on a GPU if there is one.

Times are those of compiled steps of ``fit``, the median of several trainings that take turns.
"""

import itertools
import statistics
from typing import Any

import torch
from torch import nn

import pyro_dropout as pd

CASES = {  # sizes of layers, members, points in a step
    "13-50-1": ((13, 50, 1), 32, 128),
    "1-1024x5-1": ((1, *[1024] * 5, 1), 8, 128),
}
ROUNDS = 5


def network(sizes: tuple[int, ...], seed: int) -> pd.BayesianNet:
    torch.manual_seed(seed)
    layers = [part for a, b in itertools.pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
    return pd.BayesianNet(nn.Sequential(*layers[:-1]), pd.Prior(), pd.Gaussian(10.0))


def microseconds(make: Any, sizes: tuple[int, ...], batch: int, steps: int, device: str) -> float:
    """Return the time of one step of a training."""
    model = network(sizes, 0)
    x = torch.randn(20 * batch, sizes[0])
    y = torch.randn(20 * batch, sizes[-1])
    history = pd.fit(
        model, make(model), x, y, steps=steps, batch_size=batch, device=device, compile=True, progress=False
    )
    return 1e6 * history.seconds / history.steps


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    print(f"{torch.cuda.get_device_name() if device == 'cuda' else 'CPU'}, torch {torch.__version__}, TF32")
    for name, (sizes, members, batch) in CASES.items():
        steps = 4000 if sizes[1] < 100 else 1000
        steps = steps if device == "cuda" else steps // 20
        kinds: dict[str, Any] = {
            "one point network": lambda model: pd.Ensemble(model, members=1, anchored=False),
            "one MC dropout network": pd.AutoDropout,
            f"{members} anchored members": lambda model, members=members: pd.Ensemble(model, members=members),
            f"{members} plain members": lambda model, members=members: pd.Ensemble(model, None, members, False),
        }
        found: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _, (kind, make) in itertools.product(range(ROUNDS), kinds.items()):
            found[kind].append(microseconds(make, sizes, batch, steps, device))
        one = statistics.median(found["one point network"])
        for kind, times in found.items():
            middle = statistics.median(times)
            print(f"{name:<12} {kind:<24} {middle:9.1f} µs a step, {middle / one:6.2f} of one network", flush=True)


if __name__ == "__main__":
    main()
