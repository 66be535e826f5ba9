"""What a second process brings, and what messages cost: ``python -m tests.benchmarks.scaling``.

Starts two processes by torchrun on this machine, who take turns: both together, then the first alone while the other
waits, round after round. Then computes, for networks whose step was measured on a GPU, how long the messages of R
processes would take. Everything is printed, and written to docs/benchmarks/scaling.md.
"""

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import pyro_dropout as pd
from pyro_dropout.generative.model_call import ModelCall
from pyro_dropout.training.distributed.process_group import Group, join
from pyro_dropout.training.optimisers import named
from pyro_dropout.training.training_task import TrainingTask
from tests.benchmarks.machine import cpu_model, moment, version
from tests.benchmarks.ours import dropout
from tests.benchmarks.report import table
from tests.benchmarks.sizes import SIZES, Size

FOLDER = Path(__file__).parents[2] / "docs" / "benchmarks"
MEDIUM = Size("13-512x2-1", (13, 512, 512, 1), 1024)
# Of one direction, in bytes a second, and of one message, in seconds: round numbers of what is sold, not measurements.
LINKS = {
    "10 Gbit/s Ethernet": (1.25e9, 50e-6),
    "400 Gbit/s InfiniBand": (50e9, 10e-6),
    "NVLink, 450 GB/s": (450e9, 10e-6),
}
RANKS = 8


# --- measured ---------------------------------------------------------------------------------------------------------


def best_of(group: Group, actions: dict[str, Callable[[], Any]], rounds: int) -> dict[str, tuple[float, float]]:
    """Return the least seconds of each action, by the clock and of this process's work.

    They take turns, and what is named "alone" is the first rank's.
    """
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in actions}
    for _ in range(rounds):
        for name, action in actions.items():
            group.any(0)
            start, work = time.perf_counter(), time.process_time()
            if "alone" not in name or group.first:
                action()
            taken[name].append((time.perf_counter() - start, time.process_time() - work))
    return {name: tuple(map(min, zip(*each, strict=True))) for name, each in taken.items()}


def measured(group: Group, size: Size, rounds: int) -> dict[str, Any]:
    """Return what a step takes with one process and with two, the same batch in all, and what its messages take."""
    torch.manual_seed(0)
    x, y = size.data("cpu")
    loss, update = pd.ELBO(), named("adam", 1e-3)
    models = [size.model("cpu") for _ in range(2)]
    guides = [dropout(model) for model in models]
    tasks = [TrainingTask(g, loss, ModelCall(m, (x, y, len(x)))) for m, g in zip(models, guides, strict=True)]
    together, alone = (
        task.start(update, size.batch, False, 0, each) for task, each in zip(tasks, (group, None), strict=True)
    )
    gradients = torch.zeros(size.weights)
    actions: dict[str, Callable[[], Any]] = {
        "together": lambda: together.advance(1),
        "alone": lambda: alone.advance(1),
        "messages": lambda: dist.all_reduce(gradients),
    }
    best_of(group, actions, 2)
    found = best_of(group, actions, rounds)
    return {
        "network": size.name,
        "batch": size.batch,
        "parameters": size.weights,
        "alone": 1e6 * found["alone"][0],
        "together": 1e6 * found["together"][0],
        "messages": 1e6 * found["messages"][0],
        "gain": found["alone"][0] / found["together"][0],
        "work": found["alone"][1] / found["together"][1],
    }


def worker(rounds: int, out: Path) -> None:
    """Measure, as one of the two processes."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    group = join("cpu")
    rows = [measured(group, size, rounds) for size in (SIZES["13-50-1"], MEDIUM, SIZES["1-1024x5-1"])]
    if group.first:
        out.write_text(json.dumps(rows))


# --- computed ---------------------------------------------------------------------------------------------------------


def ring_bytes(parameters: int, ranks: int) -> float:
    """Return the bytes that each of R ranks sends to average 4-byte gradients in a ring: 2(R - 1)/R of them all."""
    return 2 * (ranks - 1) / ranks * 4 * parameters


def ring_seconds(parameters: int, ranks: int, bandwidth: float, latency: float) -> float:
    """Return how long that takes: 2(R - 1) messages one after the other, each a share of the gradients."""
    return ring_bytes(parameters, ranks) / bandwidth + 2 * (ranks - 1) * latency


def extrapolated(folder: Path) -> list[dict[str, Any]]:
    """Return, for the networks whose compiled step one GPU was measured on, the time of the messages of R of them."""
    steps = json.loads((folder / "h200.json").read_text("utf-8"))["sections"]["steps"]["rows"]
    rows = []
    for size in SIZES.values():
        step = next(
            row["us"]
            for row in steps
            if row["size"].startswith(size.name)
            and row["contestant"] == "fit, AutoDropout"
            and row["precision"] == "TF32"
        )
        row = {"network": size.name, "parameters": size.weights, "step": step}
        row["megabytes"] = ring_bytes(size.weights, RANKS) / 1e6
        for name, (bandwidth, latency) in LINKS.items():
            row[name] = 1e6 * ring_seconds(size.weights, RANKS, bandwidth, latency)
        rows.append(row)
    return rows


# --- the page ---------------------------------------------------------------------------------------------------------

MEASURED = {
    "network": "network",
    "batch": "batch",
    "parameters": "parameters",
    "alone": "one process, µs a step",
    "together": "two processes, µs a step",
    "messages": "an all-reduce alone, µs",
    "gain": "gain by the clock",
    "work": "gain in work",
}
COMPUTED = {
    "network": "network",
    "parameters": "parameters",
    "step": "compiled step of one H200, µs",
    "megabytes": f"MB sent by each of {RANKS}",
    **{name: f"messages by {name}, µs" for name in LINKS},
}


def page(rows: list[dict[str, Any]], folder: Path, taken: str) -> str:
    """Return both tables as Markdown."""
    return "\n\n".join(
        [
            "### Measured: two processes on two cores",
            f"{cpu_model()}, {os.cpu_count()} cores, one thread for each process, torch {version('torch')}, gloo. One"
            " step of Adam on one batch, AutoDropout, eager in both columns, the best of the rounds. The gain by the"
            " clock is their ratio. The gain in work is the same ratio of the processor time of one process, which"
            " does not count the time in which other programs had the core, or in which it waited: what two free cores"
            " and free messages would give. The messages alone are an all-reduce of as many numbers.",
            table(MEASURED, rows),
            f"Taken {taken}.",
            f"### Computed, not measured: the messages of {RANKS} GPUs",
            "The step is the row `fit, AutoDropout`, TF32, of the benchmarks' page. The messages are the formula of"
            " that page with round numbers for bandwidth and latency (a hop: "
            + ", ".join(f"{name} {1e6 * latency:.0f} µs" for name, (_, latency) in LINKS.items())
            + ").",
            table(COMPUTED, extrapolated(folder)) + "\n",
        ]
    )


def main() -> None:
    """Start the two processes, and write what they found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40, help="turns that everyone has")
    parser.add_argument("--out", type=Path, default=FOLDER, help="where to write the page")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is not None:
        worker(args.rounds, args.worker)
        return
    taken = moment()
    args.out.mkdir(parents=True, exist_ok=True)
    said = args.out / ".scaling.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "tests.benchmarks.scaling"]
    command += ["--rounds", str(args.rounds), "--worker", str(said)]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    rows = json.loads(said.read_text())
    said.unlink()
    text = page(rows, FOLDER, taken)
    (args.out / "scaling.md").write_text(text, "utf-8")
    print(text)


if __name__ == "__main__":
    main()
