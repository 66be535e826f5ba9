"""Training on images that are never in memory at once: ``python -m tests.benchmarks.streaming``.

Synthetic images of 224 by 224 pixels, made as they are asked for, pass through a ``DataLoader`` into ``fit`` and then
through ``predict``. Memory must not grow with their number: the most that the process has had by the end of an epoch
is compared with the most by the end of its first fifth.
"""

import argparse
import json
import resource
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import pyro_dropout as pd

SIDE, CLASSES = 224, 4


class Images(Dataset[Any]):
    """Images of bytes: noise, brighter in the quarter that their class names."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.seen: list[int] = []  # the most bytes of memory so far, at each image
        self.noise = torch.randint(0, 128, (3, SIDE, SIDE), dtype=torch.uint8)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, k: int) -> tuple[Tensor, int]:
        self.seen.append(1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        label, half = k % CLASSES, SIDE // 2
        image = self.noise.roll(k % SIDE, 1).clone()
        image[:, half * (label // 2) :, half * (label % 2) :][:, :half, :half] += 100
        return image, label


class Small(nn.Module):
    """A tiny network of convolutions, which takes bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 7, stride=4), nn.ReLU(), nn.Conv2d(8, 8, 5, stride=4), nn.ReLU(), nn.AdaptiveAvgPool2d(2)
        )
        self.out = nn.Linear(32, CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        found: Tensor = self.out(self.layers(image.float() / 128 - 1).flatten(1))
        return found


def growth(seen: list[int]) -> dict[str, float]:
    """Return the most megabytes in the first fifth and in all, and by how much that is more, in per cent."""
    early, late = seen[len(seen) // 5], seen[-1]
    return {
        "most megabytes in the first fifth": round(early / 1e6, 1),
        "most megabytes": round(late / 1e6, 1),
        "growth in per cent": round(100 * (late / early - 1), 2),
    }


def stream(images: int, batch: int, samples: int, compile: bool) -> dict[str, object]:
    """Train on all images once, and predict some of them again."""
    torch.manual_seed(0)
    model = pd.BayesianNet(Small(), likelihood=pd.Categorical())
    guide = pd.AutoDropout(model, keep=0.95)
    train = Images(images)
    loader = DataLoader(train, batch_size=batch, shuffle=True)
    start = time.monotonic()
    history = pd.fit(model, guide, loader, epochs=1, lr=3e-3, seed=0, compile=compile, progress=False)
    seconds = time.monotonic() - start
    asked = Images(max(20 * batch, images // 10))
    answer = pd.predict(
        model, guide, DataLoader(asked, batch_size=batch), target=1, samples=samples, keep_samples=False
    )
    right = answer.probs.argmax(-1).cpu() == torch.arange(len(asked)) % CLASSES
    return {
        "images": images,
        "gigabytes of images": round(images * 3 * SIDE**2 / 1e9, 2),
        "compiled": history.compiled,
        "seconds": round(seconds, 1),
        "images a second": round(images / seconds),
        "fit": growth(train.seen),
        "predict": growth(asked.seen),
        "accuracy": round(right.double().mean().item(), 3),
    }


def main() -> None:
    """Train, predict, and print what it took as JSON; fail if memory grew by more than the limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=100_000)
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--samples", type=int, default=10, help="draws of a prediction")
    parser.add_argument("--limit", type=float, default=1.0, help="the most that memory may grow, in per cent")
    parser.add_argument("--compile", action="store_true", help="compile the training step")
    given = parser.parse_args()
    found = stream(given.images, given.batch, given.samples, given.compile)
    print(json.dumps(found, indent=2))
    for part in ("fit", "predict"):
        grown = found[part]["growth in per cent"]  # type: ignore[index]
        if grown > given.limit:
            raise SystemExit(f"memory grew by {grown} % in {part}; at most {given.limit} % is allowed.")


if __name__ == "__main__":
    main()
