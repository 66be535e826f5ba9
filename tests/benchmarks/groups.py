"""What an ensemble costs beside one network, and what a second process brings."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

import pyro_dropout as pd
from pyro_dropout.generative.model_call import ModelCall
from pyro_dropout.training.distributed.process_group import Group, join
from pyro_dropout.training.optimisers import named
from pyro_dropout.training.training_task import TrainingTask
from tests.benchmarks.figures import ROOT, Asked, Figure, benchmark
from tests.benchmarks.ours import dropout
from tests.benchmarks.sizes import DEEP, SMALL, Size
from tests.benchmarks.timing import Contestant, interleave, median_ratio

MEDIUM = Size("13-512x2-1", (13, 512, 512, 1), 1024)


@benchmark("ensembles")
def ensembles(asked: Asked) -> Iterator[Figure]:
    """Compiled steps of ``fit``, in trainings that take turns, on batches of 128 points."""
    for size, members in ((SMALL, 32), (DEEP, 8))[: asked.pick(2, 1)]:
        x, y = size.data("cpu", 20 * 128)

        def training(make: Callable[[Any], Any], size: Size = size, x: Any = x, y: Any = y) -> Any:
            model = pd.BayesianNet(size.net("cpu"), pd.Prior(), pd.Gaussian(10.0))
            posterior = make(model)
            how: Any = {"batch_size": 128, "device": asked.device, "compile": True, "progress": False}
            return lambda steps: pd.fit(model, posterior, x, y, steps=steps, **how).seconds, 20

        kinds: dict[str, Callable[[Any], Any]] = {
            "one point network": lambda model: pd.Ensemble(model, members=1, anchored=False),
            "one MC dropout network": pd.AutoDropout,
            f"{members} anchored members": lambda model, members=members: pd.Ensemble(model, members=members),
            f"{members} plain members": lambda model, members=members: pd.Ensemble(model, None, members, False),
        }
        everyone = [Contestant(kind, lambda make=make: training(make)) for kind, make in kinds.items()]  # type: ignore[misc]
        for each in everyone:
            each.prepare(asked.device, asked.pick(1.0, 0.1))
        interleave(everyone, asked.rounds, asked.device)
        for each in everyone:
            ratio = median_ratio(each, everyone[0])
            yield Figure(f"{size.name}, {each.name}, {each.best:.1f} µs a step, over one network", ratio)


def best_of(group: Group, actions: dict[str, Callable[[], Any]], rounds: int) -> dict[str, tuple[float, float]]:
    """Return the least microseconds of each action, by the clock and of this process's work; they take turns."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in actions}
    for _ in range(rounds):
        for name, action in actions.items():
            group.any(0)
            start, work = time.perf_counter(), time.process_time()
            if name != "alone" or group.first:
                action()
            taken[name].append((1e6 * (time.perf_counter() - start), 1e6 * (time.process_time() - work)))
    return {name: tuple(map(min, zip(*each, strict=True))) for name, each in taken.items()}


def in_two_processes(rounds: int) -> None:
    """Measure as one of the two processes; the first prints microseconds as JSON."""
    torch.set_num_threads(1)
    group = join("cpu")
    for size in (SMALL, MEDIUM, DEEP):
        torch.manual_seed(0)
        x, y = size.data("cpu")
        loss, update = pd.ELBO(), named("adam", 1e-3)
        models = [size.model("cpu") for _ in range(2)]
        tasks = [TrainingTask(dropout(model), loss, ModelCall(model, (x, y, len(x)))) for model in models]
        together = tasks[0].start(update, size.batch, False, 0, group)
        alone = tasks[1].start(update, size.batch, False)
        gradients = torch.zeros(size.weights)
        actions: dict[str, Callable[[], Any]] = {
            "together": lambda run=together: run.advance(1),  # type: ignore[misc]
            "alone": lambda run=alone: run.advance(1),  # type: ignore[misc]
            "messages": lambda numbers=gradients: dist.all_reduce(numbers),  # type: ignore[misc]
        }
        best_of(group, actions, 2)
        found = best_of(group, actions, rounds)
        if group.first:
            print(json.dumps({"network": size.name, **found}), flush=True)


@benchmark("processes")
def processes(asked: Asked) -> Iterator[Figure]:
    """Eager steps of two processes with one thread each on one batch, and of the first alone while the other waits.

    The gain in work is that of processor time, which does not count the time in which a process waits.
    """
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command += ["-m", "tests.benchmarks.groups", str(asked.pick(40, 3))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True)
    for line in done.stdout.splitlines():
        found = json.loads(line)
        name = found.pop("network")
        for kind, (taken, _) in found.items():
            yield Figure(f"{name}, {kind}", taken, "µs")
        for k, what in enumerate(("by the clock", "in work")):
            yield Figure(f"{name}, gain {what}", found["alone"][k] / found["together"][k])


if __name__ == "__main__":
    in_two_processes(int(sys.argv[1]))
