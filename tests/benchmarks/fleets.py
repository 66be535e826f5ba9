"""Many networks in one computation: the time of one step of all of them."""

from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

import pyro_dropout as pd
from pyro_dropout.training.fleet import fleet as fleet_module
from pyro_dropout.training.loop import loop
from tests.benchmarks.figures import Asked, Figure, benchmark
from tests.benchmarks.ours import dropout
from tests.benchmarks.peers import plain
from tests.benchmarks.sizes import SMALL
from tests.benchmarks.timing import Contestant, interleave

LIMITS = {80: 35.0, 1600: 120.0}  # µs for a step of so many networks on a GPU


def build(seed: int) -> tuple[Any, Any]:
    """Return one replica."""
    torch.manual_seed(seed)
    model = SMALL.model("cpu")
    return model, dropout(model)


def step_of_all(nets: int, steps: int, asked: Asked) -> float:
    """Return the microseconds of one step of ``nets`` networks, by the history that ``Fleet.fit`` returns."""
    x, y = SMALL.data("cpu", 4 * SMALL.batch)
    fleet = pd.Fleet(build, {"seed": list(range(nets))})
    how: Any = {"batch_size": SMALL.batch, "device": asked.device, "compile": asked.compile, "progress": False}

    def best(*run: Any, **more: Any) -> Any:  # one compiled training, taken up again in every round
        return min((loop(*run, **more) for _ in range(1 + asked.rounds // 2)), key=lambda history: history.seconds)

    with mock.patch.object(fleet_module, "loop", best):
        return 1e6 / fleet.fit(x, y, steps=steps, **how).steps_per_second


@benchmark("fleets", "cpu", "cuda")
def fleets(asked: Asked) -> Iterator[Figure]:
    """One step of all networks of a ``Fleet`` of 13-50-1, each with mini-batches of its own, beside plain steps."""
    alone = Contestant("plain", lambda: plain(SMALL, asked.device))
    alone.prepare(asked.device, asked.turn)
    interleave([alone], asked.rounds, asked.device)
    on_gpu = asked.device == "cuda"
    counts = [(1, 2000), (80, 2000), (1600, 500)] if on_gpu else [(1, 500), (10, 200), (80, 50)]
    for nets, steps in asked.pick(counts, [(1, 5), (8, 5)]):
        us = step_of_all(nets, steps, asked)
        yield Figure(f"{nets} networks", us, "µs a step of all", most=LIMITS.get(nets) if on_gpu else None)
        yield Figure(f"{nets} networks, over as many plain steps", us / (nets * alone.best))
