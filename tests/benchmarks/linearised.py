"""Linearised predictions of a last layer: how many forward passes they cost.

``python -m tests.benchmarks.linearised [--device cuda] [--images 10000]`` prints the time of a network 784-1024x3-10,
that of its linearised predictions with a Laplace approximation of the last layer, and the ratio, which should be at
most 3. The ratio is that of all that ``predict`` does, the class probabilities included.
"""

import argparse
import itertools
import warnings

import torch
from torch import nn

import pyro_dropout as pd
from tests.benchmarks.timing import seconds

AT_MOST = 3.0


def measured(device: str, images: int, rounds: int, samples: int) -> dict[str, float]:
    """Return the seconds of a forward pass, of ``predict`` with the mean weights, and of linearised predictions."""
    torch.manual_seed(0)
    sizes = [784, 1024, 1024, 1024]
    hidden = [layer for a, b in itertools.pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
    model = pd.BayesianNet(nn.Sequential(*hidden, nn.Linear(1024, 10)), likelihood=pd.Categorical()).to(device)
    x, y = torch.randn(images, 784, device=device), torch.randint(10, (images,), device=device)
    with warnings.catch_warnings(action="ignore"):  # the network is not trained, which costs nothing here
        guide = pd.laplace(model, model, x[:2000], y[:2000], structure="last")

    def forward() -> object:
        with torch.no_grad():
            return model.net(x)

    def plain() -> object:
        return pd.predict(model, guide, x, method="standard").probs

    def linearised() -> object:
        return pd.predict(model, guide, x, method="linearised", samples=samples, seed=0).probs

    asked = {"forward pass": forward, "predict, mean weights": plain, "predict, linearised": linearised}
    return {name: seconds(run, device, rounds) for name, run in asked.items()}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=1000)
    given = parser.parse_args()
    found = measured(given.device, given.images, given.rounds, given.samples)
    for name, taken in found.items():
        print(f"{name:24} {1e3 * taken:9.2f} ms  {taken / found['forward pass']:6.2f} forward passes")
    ratio = found["predict, linearised"] / found["forward pass"]
    print(f"784-1024x3-10, {given.images} images, {given.device}: ratio {ratio:.2f} (at most {AT_MOST:g})")


if __name__ == "__main__":
    main()
