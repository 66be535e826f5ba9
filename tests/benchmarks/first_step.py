"""How long a fresh process takes to its first compiled step, with an empty cache and with a full one."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.benchmarks.report import Section
from tests.benchmarks.settings import Settings
from tests.benchmarks.timing import reason

SHARE = 0.93
ROOT = Path(__file__).parents[2]
COLUMNS = {"cache": "inductor's cache", "seconds": "seconds to the first step", "compiling": "of which compiling"}
CHILD = """
import time
import torch
import pyro_dropout as pd
torch.set_num_threads({threads})
x, y = torch.randn(128, 13), torch.randn(128, 1)
net = torch.nn.Sequential(torch.nn.Linear(13, 50), torch.nn.ReLU(), torch.nn.Linear(50, 1))
model = pd.BayesianNet(net, likelihood=pd.Gaussian(tau=10.0))
guide = pd.AutoDropout(model, keep=0.9)
history = pd.fit(model, guide, x, y, steps=1, device={device!r}, compile=True, progress=False)
print("compiling", history.compile_seconds)
"""


def once(device: str, threads: int, cache: str) -> tuple[float, float]:
    """Return the seconds of a process that takes one step, and how many of them it spent on compilation."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/triton"}
    environment["PYTHONDONTWRITEBYTECODE"] = ""  # Python's own default, as on most machines
    command = [sys.executable, "-c", CHILD.format(device=device, threads=threads)]
    start = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    taken = time.perf_counter() - start
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["the process failed"])[-1])
    return taken, float(done.stdout.split("compiling")[-1])


def measure(settings: Settings, threads: int) -> Iterator[Section]:
    """Measure a process with an empty cache, then the same with what that one has left."""
    section = Section(
        "First step",
        "Seconds from the start of Python to the end of the first compiled step of `pd.fit` (13-50-1, AutoDropout),"
        " imports and exit included.",
        COLUMNS,
    )
    with tempfile.TemporaryDirectory() as cache:
        for state in ("empty", "warm"):
            if settings.deadline.over(SHARE):
                section.absent[state] = "left out, for the time was up"
                continue
            try:
                taken, compiling = once(settings.device, threads, cache)
            except Exception as cause:
                section.absent[state] = reason(cause)
                print(f"  first step, {state} cache: {reason(cause)}", flush=True)
                continue
            section.rows.append({"cache": state, "seconds": taken, "compiling": compiling})
            print(f"  first step, {state} cache: {taken:.1f} s, of which compiling {compiling:.1f} s", flush=True)
    yield section
