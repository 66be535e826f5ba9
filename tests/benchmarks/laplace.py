"""What Laplace approximations cost: ``python -m tests.benchmarks.laplace [--device cuda] [--memory]``.

Time: "kron" of 784-1024x3-10 on 60,000 images, beside two epochs of training with AutoDropout; at most as long. Memory:
"last" of a network with 100 million weights, of which the last layer alone is random (only=), beside a forward pass of
the same images; at most 1.2 times as much, by the allocator's own record, one process for each. Where all layers are
random, the guide has points of its own for the others, which is a second copy of the network.
"""

import argparse
import itertools
import subprocess
import sys
import warnings

import torch
from torch import nn

import pyro_dropout as pd
from tests.benchmarks.timing import seconds
from tests.oracles.memory import peak_allocated

LARGE = (784, 8000, 8000, 3500, 512, 10)  # 100.1 million weights


def network(sizes: tuple[int, ...], only: str | None = None) -> pd.BayesianNet:
    """Return a ReLU network of these widths that tells classes."""
    pairs = list(itertools.pairwise(sizes))
    layers = [layer for a, b in pairs for layer in (nn.Linear(a, b), nn.ReLU())]
    return pd.BayesianNet(nn.Sequential(*layers[:-1]), likelihood=pd.Categorical(), only=only)


def times(device: str, images: int, rounds: int) -> None:
    """Print the time of a Laplace approximation, and of two epochs of training."""
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model = network((784, 1024, 1024, 1024, 10)).to(device)
    x, y = torch.randn(images, 784, device=device), torch.randint(10, (images,), device=device)
    guide = pd.AutoDropout(model, keep=0.9).to(device)
    how = {"batch_size": 128, "progress": False, "seed": 0}
    pd.fit(model, guide, x, y, steps=40, **how)  # compiled now
    history = pd.fit(model, guide, x, y, epochs=2, **how)

    def kron() -> object:
        with warnings.catch_warnings(action="ignore"):  # two epochs are no maximum
            return pd.laplace(model, guide, x, y, "kron").posterior("0.weight").mean

    taken = seconds(kron, device, rounds)
    print(f"two epochs of AutoDropout, batches of 128: {history.seconds:.3f} s ({history.steps} steps)")
    ratio = taken / history.seconds
    print(f'laplace, "kron", {images} images, {device}: {taken:.3f} s, {ratio:.2f} of that (at most 1)')


def peak(kind: str, images: int) -> int:
    """Return the most bytes held, the network included."""

    def act() -> object:
        model = network(LARGE, None if kind == "last, all layers random" else "8.*")
        x, y = torch.randn(images, LARGE[0]), torch.randint(10, (images,))
        if kind == "forward pass":
            with torch.no_grad():
                return model.net(x)
        with warnings.catch_warnings(action="ignore"):
            return pd.laplace(model, model, x, y, "last")

    return peak_allocated(act)


def memory(images: int) -> None:
    """Print the peak of a forward pass and of a Laplace approximation of the last layer."""
    found = {}
    for kind in ("forward pass", "last", "last, all layers random"):
        call = f"from tests.benchmarks.laplace import peak; print(peak({kind!r}, {images}))"
        done = subprocess.run([sys.executable, "-c", call], capture_output=True, text=True, check=True)
        found[kind] = int(done.stdout)
        ratio = found[kind] / found["forward pass"]
        print(f"100 million weights, {images} images, {kind}: {found[kind] / 2**30:.3f} GiB at most, {ratio:.2f}")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--images", type=int, default=0, help="60,000 for times, 1,000 for memory")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory", action="store_true", help="measure memory, not time")
    given = parser.parse_args()
    if given.memory:
        memory(given.images or 1000)
    else:
        times(given.device, given.images or 60_000, given.rounds)


if __name__ == "__main__":
    main()
