"""How long a fresh process takes to its first compiled step, with an empty cache and with a full one."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import torch

from tests.benchmarks.figures import ROOT, Asked, Figure, benchmark

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


@benchmark("first-step", "cpu", "cuda")
def first_step(asked: Asked) -> Iterator[Figure]:
    """From the start of Python to the end of a compiled step: with an empty cache, and with what that one has left."""
    with tempfile.TemporaryDirectory() as cache:
        for state in ("empty", "warm"):
            taken, compiling = once(asked.device, torch.get_num_threads(), cache)
            yield Figure(f"inductor's cache {state}", taken, "s")
            yield Figure(f"inductor's cache {state}, of which compiling", compiling, "s")
