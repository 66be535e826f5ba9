"""How long ``maximise_evidence`` takes, and what it finds: ``python -m tests.benchmarks.evidence [--large]``.

Data are made by a network with 10 hidden units and noise of 0.3; the model has 50 hidden units and standardised data.
Seconds are those of one core. The error is that of the mean on 1,000 other points: 0.3 is the noise alone.
"""

import argparse
import time
import warnings
from typing import Any

import torch
from torch import nn

import pyro_dropout as pd

NOISE, HIDDEN = 0.3, 50
ROWS = ((450, 13, "Tanh", "full"), (450, 13, "Tanh", "kron"), (450, 13, "ReLU", "full"), (8000, 8, "Tanh", "full"))
LARGE = ((45_000, 9, "Tanh", "full"),)


def measured(points: int, inputs: int, activation: str, structure: Any) -> str:
    """Return a row of the table."""
    torch.manual_seed(1)
    teacher = nn.Sequential(nn.Linear(inputs, 10), nn.Tanh(), nn.Linear(10, 1))
    x = torch.randn(points + 1000, inputs)
    with torch.no_grad():
        for value in teacher.parameters():
            value *= 2.5
        f = teacher(x) / teacher(x).std()
    y = f + NOISE * torch.randn_like(f)
    net = nn.Sequential(nn.Linear(inputs, HIDDEN), getattr(nn, activation)(), nn.Linear(HIDDEN, 1))
    model = pd.Standardised(pd.BayesianNet(net, pd.Prior()), x[:points], y[:points])
    start = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = pd.training.maximise_evidence(model, x[:points], y[:points], structure, progress=False)
    seconds = time.process_time() - start
    answer = pd.predict(model, found.guide, x[points:], method="linearised")
    error = (answer.mean - y[points:]).square().mean().sqrt().item()
    true, weights = float(model.y_std) ** 2 / NOISE**2, sum(value.numel() for value in net.parameters())
    cells = (f"{points:,}", inputs, weights, activation, structure, len(found.trace), f"{seconds:.0f}")
    return "| " + " | ".join(map(str, (*cells, f"{found.tau:.1f} ({true:.1f})", f"{error:.3f}"))) + " |"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--large", action="store_true", help="also 45,000 points, for some minutes")
    torch.set_num_threads(1)
    print("| points | inputs | weights | activation | structure | rounds | seconds | τ found (made with) | error |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in (*ROWS, *(LARGE if parser.parse_args().large else ())):
        print(measured(*row), flush=True)
