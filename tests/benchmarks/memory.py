"""What trainings hold in memory, beside plain torch."""

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

import pyro_dropout as pd
from tests.benchmarks.contestants import plain
from tests.benchmarks.figures import Asked, Figure, benchmark
from tests.benchmarks.settings import GUIDES, Setting
from tests.benchmarks.timing import wait
from tests.oracles.memory import peak_allocated

LAYERS, BATCH, STEPS = 4, 64, 3
PLAIN = "plain torch"
KINDS = {PLAIN: None, "fit eager": False, "fit recorded": "traced", "fit compiled": True}


def peak_bytes(action: Callable[[], Any], device: str) -> int:
    """Return the most bytes that ``action`` held beyond those that were there before."""
    if device != "cuda":
        return peak_allocated(action)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    action()
    wait(device)
    return torch.cuda.max_memory_allocated() - before


def train(kind: str, width: int, device: str) -> None:
    """Make a network of one width and its data, and take some steps of Adam."""
    setting = Setting(layers=(width,) * (LAYERS + 1), batch=BATCH, points=BATCH)
    if kind == PLAIN:
        plain(setting, device).build()[0](STEPS)
        return
    model = setting.model(device)
    how: dict[str, Any] = {"compile": KINDS[kind], "lr": 1e-4, "progress": False}
    pd.fit(model, GUIDES["dropout"](model), *setting.data(device), steps=STEPS, **how)


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
    width, spawned = asked.pick(5000, 500), multiprocessing.get_context("spawn")
    for measure in ("on the GPU",) if asked.device == "cuda" else ("allocated", "resident"):
        base = 0
        for kind in KINDS:
            with ProcessPoolExecutor(1, mp_context=spawned) as alone:
                held = alone.submit(training_peak, kind, width, asked.device, measure).result()
            base = base or held
            yield Figure(f"{measure}, {kind}", held / 2**20, "MiB")
            if kind != PLAIN:
                yield Figure(f"{measure}, {kind} over {PLAIN}", held / base, most=1.25)
