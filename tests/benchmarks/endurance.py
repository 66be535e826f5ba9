"""Large loads and long runs: does memory grow, are files closed, and what happens where it runs out?"""

import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

import pyro_dropout as pd
from tests.benchmarks.figures import Asked, Figure, benchmark
from tests.benchmarks.memory import status

WARM_UP = 0.1  # of the time: compiling, first checkpoints, the allocator's pools


def open_files() -> int:
    """Return how many files the process has open."""
    return len(os.listdir("/proc/self/fd"))


@benchmark("load")
def load(asked: Asked) -> Iterator[Figure]:
    """A million rows of a CSV file through ``pyro-dropout predict``."""
    rows = asked.pick(1_000_000, 300_000)
    with tempfile.TemporaryDirectory() as name:
        folder, header = Path(name), "age,height,weight\n"
        lines = [f"{k % 90},{150 + k % 47},{40 + k % 61 + 0.1 * (k % 90)}\n" for k in range(100_000)]
        (folder / "table.csv").write_text(header + "".join(lines[:400]))
        with (folder / "large.csv").open("w") as file:
            file.write(header)
            for _ in range(rows // len(lines)):
                file.writelines(lines)

        def run(*words: str) -> None:
            subprocess.run([sys.executable, "-m", "pyro_dropout", *words, "--quiet"], check=True, cwd=folder)

        run("fit", "table.csv", "--out", "run", "--target", "weight", "--steps", "200")
        start = time.monotonic()
        run("predict", "run", "large.csv", "--out", "said.csv", "--samples", "20")
        yield Figure("rows a second", rows / (time.monotonic() - start))
    yield Figure("memory at most", resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 1e6, "MB")


def train(steps: int, folder: str | None = None) -> pd.training.History:
    """Take so many steps of a small training with everything that ``fit`` has."""
    torch.manual_seed(0)
    x = torch.linspace(-1, 1, 2000).unsqueeze(-1)
    y = torch.sin(6 * x) + 0.1 * torch.randn_like(x)
    net = nn.Sequential(nn.Linear(1, 50), nn.ReLU(), nn.Linear(50, 1))
    model = pd.BayesianNet(net, likelihood=pd.Gaussian(100.0, learn=True))
    return pd.fit(
        model,
        pd.AutoDropout(model, keep=0.95),
        x[::2],
        y[::2],
        steps=steps,
        batch_size=128,
        schedule=pd.training.inverse_decay(),
        validation=(x[1::2], y[1::2]),
        patience=10**9,
        check_every=max(1, min(20_000, steps // 4)),
        checkpoint=None if folder is None else pd.training.Checkpoint(folder, seconds=30.0, keep_last=2),
        compile=True,
        progress=False,
        seed=0,
    )


@benchmark("soak")
def soak(asked: Asked) -> Iterator[Figure]:
    """An hour of ``fit``, watched by a thread."""
    seconds = asked.pick(3600, 20)
    steps = int(train(2000).steps_per_second * seconds)
    seen, over = list[tuple[float, int]](), threading.Event()

    def watch() -> None:
        while not over.wait(max(0.2, seconds / 240)):
            seen.append((status("VmRSS") / 1e6, open_files()))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with tempfile.TemporaryDirectory() as folder:
            train(steps, folder)
    finally:
        over.set()
        watcher.join()
    warm = seen[int(WARM_UP * len(seen)) :]
    tenth = max(1, len(warm) // 10)
    for when, part in (("after the warm-up", warm[:tenth]), (f"after {steps} steps", warm[-tenth:])):
        yield Figure(f"memory {when}", sum(memory for memory, _ in part) / len(part), "MB")
        yield Figure(f"open files {when}", min(files for _, files in part))
    yield Figure("open files at most", max(files for _, files in warm))


@benchmark("out-of-memory")
def out_of_memory(asked: Asked) -> Iterator[Figure]:
    """A GPU that is too small, 3 % of the one there is, for all points at once: `predict` uses smaller chunks."""
    torch.cuda.set_per_process_memory_fraction(0.03)
    points, width = 400_000, 2048
    net = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))
    model = pd.BayesianNet(net)
    guide = pd.AutoDropout(model)
    x = torch.randn(points, 16)
    for compiled in (False, "auto"):
        try:
            pd.fit(model, guide, x, x[:, :1], steps=5, compile=compiled, progress=False, device="cuda")
        except pd.errors.OutOfMemoryError:
            yield Figure(f"compile={compiled}: a step of {points} points is refused by name", 1)
    pd.predict(model.cuda(), guide.cuda(), x.cuda(), samples=20, chunk=10_000_000)
    yield Figure(f"a prediction of {points} points", torch.cuda.max_memory_allocated() / 2**30, "GiB at most")
