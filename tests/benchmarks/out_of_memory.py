"""A GPU that is too small: ``python -m tests.benchmarks.out_of_memory``, with 3 % of the memory of the one there is.

A step on all points does not fit. What is printed: the batch that the error names, eager and compiled, that a training
with it runs, and the most memory that a prediction took that had asked for all points at once.
"""

from typing import Any

import torch
from torch import nn

import pyro_dropout as pd

SHARE, POINTS, WIDTH = 0.03, 400_000, 2048


def build() -> tuple[Any, Any]:
    """Return a network whose activations are what takes the memory."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
    model = pd.BayesianNet(net)
    return model, pd.AutoDropout(model)


def main() -> None:
    """Run out of memory in training and in prediction, and do what the errors say."""
    torch.cuda.set_per_process_memory_fraction(SHARE)
    x = torch.randn(POINTS, 16)
    y = x[:, :1]
    how: Any = {"progress": False, "device": "cuda"}
    for compiled in (False, "auto"):
        try:
            pd.fit(*build(), x, y, steps=5, compile=compiled, **how)
        except pd.errors.PyroDropoutError as lack:
            print(f"compile={compiled}: {type(lack).__name__}: {lack}", flush=True)
            size = int(str(lack).split("batch_size=")[1].split(")")[0])
            print(pd.fit(*build(), x, y, steps=40, batch_size=size, compile=compiled, **how), flush=True)
        else:
            print(f"compile={compiled}: {POINTS} points fit; this GPU is too large.", flush=True)
    model, guide = (part.cuda() for part in build())
    found = pd.predict(model, guide, x.cuda(), samples=20, chunk=10_000_000)
    print(f"predicted {len(found.mean)} points, {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB at most")


if __name__ == "__main__":
    main()
