"""What a training holds in memory beside plain dropout in torch: ``python -m tests.benchmarks.memory [--device cuda]``.

Plain torch (nn.Dropout, autograd and torch.optim.Adam, eager) and ``fit`` with eager, recorded and compiled steps,
each in a process of its own. Two numbers for each: the most bytes that torch's allocator held, and on a CPU the most
memory that the process had, beyond what it had after a training of a tiny network. Both count the network itself.
"""

import argparse
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn

import pyro_dropout as pd
from pyro_dropout.training import runner
from tests.oracles.memory import peak_allocated

KEEP, LAYERS, BATCH, STEPS = 0.9, 4, 64, 3
LIMIT = 1.25  # of what plain torch holds
PLAIN = "plain torch"
KINDS = {PLAIN: None, "fit eager": False, "fit recorded": "traced", "fit compiled": True}


def layers(width: int, *, dropout: bool) -> nn.Sequential:
    """Return weight layers of one width with ReLU, and dropout before each where asked for."""
    parts: list[nn.Module] = []
    for _ in range(LAYERS):
        parts += [*([nn.Dropout(1 - KEEP)] if dropout else []), nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*parts[:-1])


def train(kind: str, width: int, steps: int, device: str = "cpu") -> None:
    """Make a network of one width and its data, and take some steps of Adam."""
    net = layers(width, dropout=kind == PLAIN).to(device)
    x, y = torch.randn(BATCH, width, device=device), torch.randn(BATCH, width, device=device)
    if kind != PLAIN:
        model = pd.BayesianNet(net)
        how: dict[str, Any] = {"compile": KINDS[kind], "lr": 1e-4, "progress": False}
        pd.fit(model, pd.AutoDropout(model, keep=KEEP), x, y, steps=steps, **how)
        return
    optimiser = torch.optim.Adam(net.parameters(), lr=1e-4)
    for _ in range(steps):
        optimiser.zero_grad()
        F.mse_loss(net(x), y).backward()
        optimiser.step()


def status(name: str) -> int:
    """Return an entry of what Linux knows about this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def most_resident(action: Callable[[], object]) -> int:
    """Return the most memory that the process had during ``action``, beyond what it had before."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    before = status("VmRSS")
    action()
    return status("VmHWM") - before


def most_on_gpu(action: Callable[[], object]) -> int:
    """Return the most bytes that torch held on the GPU during ``action``, beyond those before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    action()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def peak(kind: str, width: int, steps: int, device: str, measure: str) -> int:
    """Return the most bytes that a training holds, by one of the three measures."""
    with mock.patch.multiple(runner, _LARGE=0, _SMALL=0):  # what is imported and set up once is no part of it
        train(kind, 8, 2, device)
    how = {"resident": most_resident, "allocated": peak_allocated, "gpu": most_on_gpu}[measure]
    return how(lambda: train(kind, width, steps, device))


def measured(width: int, steps: int, device: str, kinds: list[str]) -> dict[tuple[str, str], int]:
    """Return the peak of every kind by every measure, each from a process of its own; print them on the way."""
    found: dict[tuple[str, str], int] = {}
    for measure in ("gpu",) if device == "cuda" else ("allocated", "resident"):
        for kind in kinds:
            given = (kind, width, steps, device, measure)
            call = f"from tests.benchmarks.memory import peak; print(peak(*{given!r}))"
            done = subprocess.run([sys.executable, "-W", "ignore", "-c", call], capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(f"{kind}: {done.stderr.strip().splitlines()[-1]}")
            found[kind, measure] = int(done.stdout.split()[-1])
            print(told(kind, measure, found, width), flush=True)
    return found


def told(kind: str, measure: str, found: dict[tuple[str, str], int], width: int) -> str:
    """Return one line: bytes, how many copies of the weights these are, and the ratio to plain torch."""
    held, weights = found[kind, measure], 4 * LAYERS * width * (width + 1)
    ratio = held / found[PLAIN, measure]
    limit = "" if kind == PLAIN else f", limit {LIMIT}{'' if ratio <= LIMIT else ': MISSED'}"
    sizes = f"{held / 2**20:8.0f} MiB, {held / weights:5.2f} times the weights"
    return f"{measure:<9} {kind:<16} {sizes}, ratio {ratio:.2f}{limit}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", type=float, default=16e6, help="how many the network has")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", nargs="+", choices=list(KINDS)[1:], default=list(KINDS)[1:], metavar="KIND")
    given = parser.parse_args()
    width = round((given.weights / LAYERS) ** 0.5)
    print(f"{LAYERS} layers of {width} x {width}, {BATCH} points, {given.steps} steps of Adam, {given.device}")
    found = measured(width, given.steps, given.device, [PLAIN, *given.only])
    missed = [kind for (kind, measure), held in found.items() if held > LIMIT * found[PLAIN, measure]]
    raise SystemExit(f"more than {LIMIT} of plain torch: {', '.join(dict.fromkeys(missed))}" if missed else 0)


if __name__ == "__main__":
    main()
