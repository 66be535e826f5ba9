"""The paper's long regression run: a million steps of SGD with momentum of a network of five layers of 1024 units."""

import math
import time
from collections.abc import Iterator

import torch

import pyro_dropout as pd
from tests.benchmarks.ours import dropout
from tests.benchmarks.report import Section
from tests.benchmarks.settings import Settings
from tests.benchmarks.sizes import DEEP
from tests.benchmarks.timing import reason

STEPS = {"cuda": 1_000_000, "cpu": 100}
COLUMNS = {"steps": "steps", "seconds": "seconds in all", "compiling": "of which compiling", "us": "µs a step"}


def measure(settings: Settings) -> Iterator[Section]:
    """Take all the steps, on a GPU; a CPU takes a hundred, for the time of one."""
    torch.set_float32_matmul_precision(settings.precisions[0])
    steps = STEPS[settings.device] // (10 if settings.quick else 1)
    section = Section(
        "The long run",
        f"One call of `pd.fit`: AutoDropout, {DEEP.name}, a wave with a trend in {DEEP.batch} points, all of them in"
        " every step, SGD with momentum 0.9 and the schedule `inverse_decay()`.",
        COLUMNS,
    )
    x = torch.linspace(-1.7, 1.7, DEEP.batch).unsqueeze(-1)
    y = torch.sin(4 * math.pi * x) / 2 + x
    model = DEEP.model("cpu")
    start = time.perf_counter()
    try:
        history = pd.fit(
            model,
            dropout(model),
            x,
            y,
            steps=steps,
            optim="sgd",
            lr=1e-5,
            schedule=pd.inverse_decay(),
            device=settings.device,
            compile=settings.compile,
            progress=False,
            seed=0,
        )
    except Exception as cause:
        section.absent["the run"] = reason(cause)
        print(f"  the run: {reason(cause)}", flush=True)
    else:
        taken = time.perf_counter() - start
        row = {
            "steps": steps,
            "seconds": taken,
            "compiling": history.compile_seconds,
            "us": 1e6 / history.steps_per_second,
        }
        section.rows.append(row)
        print(
            f"  {steps} steps: {taken:.1f} s, {row['us']:.1f} µs a step, last loss {history.losses[-1]:.4g}", flush=True
        )
    yield section
