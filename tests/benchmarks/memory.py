"""What trainings hold in memory, beside plain torch."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyro_dropout as pd
from tests.benchmarks.figures import Asked, Figure, apart, benchmark
from tests.benchmarks.ours import dropout
from tests.benchmarks.peers import plain
from tests.benchmarks.predictions import peak_bytes
from tests.benchmarks.sizes import Size

LAYERS, BATCH, STEPS = 4, 64, 3
PLAIN = "plain torch"
KINDS = {PLAIN: None, "fit eager": False, "fit recorded": "traced", "fit compiled": True}


def train(kind: str, width: int, device: str) -> None:
    """Make a network of one width and its data, and take some steps of Adam."""
    size = Size("", (width,) * (LAYERS + 1), BATCH)
    if kind == PLAIN:
        plain(size, device)[0](STEPS)
        return
    model = size.model(device)
    how: dict[str, Any] = {"compile": KINDS[kind], "lr": 1e-4, "progress": False}
    pd.fit(model, dropout(model), *size.data(device), steps=STEPS, **how)


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


def training_peak(kind: str, width: int, device: str, measure: str) -> int:
    """Return the most bytes that a training holds."""
    train(kind, 8, device)  # what is imported and set up once is no part of it
    if measure == "resident":
        return most_resident(lambda: train(kind, width, device))
    return peak_bytes(lambda: train(kind, width, device), device)


@benchmark("memory", "cpu", "cuda")
def trainings(asked: Asked) -> Iterator[Figure]:
    """A network of 100 million weights: ``fit`` beside plain dropout, each in a process of its own."""
    width = asked.pick(5000, 500)
    for measure in ("on the GPU",) if asked.device == "cuda" else ("allocated", "resident"):
        base = 0
        for kind in KINDS:
            held = apart(training_peak, kind, width, asked.device, measure)
            base = base or held
            yield Figure(f"{measure}, {kind}", held / 2**20, "MiB")
            if kind != PLAIN:
                yield Figure(f"{measure}, {kind} over {PLAIN}", held / base, most=1.25)
