"""Many networks in one computation: the time of one step of all of them."""

from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

import pyro_dropout as pd
from pyro_dropout.training.fleet import fleet as fleet_module
from pyro_dropout.training.loop import loop
from tests.benchmarks.ours import dropout
from tests.benchmarks.peers import plain
from tests.benchmarks.report import Row, Section, Task, curve
from tests.benchmarks.sizes import SMALL
from tests.benchmarks.timing import Contestant, Settings, interleave

COLUMNS = {
    "nets": "networks",
    "us": "µs for a step of all",
    "each": "µs for each network",
    "ratio": "ratio to as many plain steps",
}


def build(seed: int) -> tuple[Any, Any]:
    """Return one replica."""
    torch.manual_seed(seed)
    model = SMALL.model("cpu")
    return model, dropout(model)


def step_of_all(nets: int, steps: int, settings: Settings) -> float:
    """Return the microseconds of one step of ``nets`` networks, by the history that ``Fleet.fit`` returns."""
    x, y = SMALL.data("cpu", 4 * SMALL.batch)
    fleet = pd.Fleet(build, {"seed": list(range(nets))})
    options: Any = {
        "batch_size": SMALL.batch,
        "device": settings.device,
        "compile": settings.compile,
        "progress": False,
    }
    # One compiled training, taken up again in every round, so that here too the best round counts.
    rounds = 1 + settings.rounds // 2

    def best(*run: Any, **how: Any) -> Any:
        return min((loop(*run, **how) for _ in range(rounds)), key=lambda history: history.seconds)

    with mock.patch.object(fleet_module, "loop", best):
        return 1e6 / fleet.fit(x, y, steps=steps, **options).steps_per_second


def counts(settings: Settings) -> list[tuple[int, int]]:
    """Return how many networks to measure, and for how many steps."""
    if settings.device == "cuda":
        return [(1, 2000), (80, 2000), (1600, 500)]
    return [(1, 200), (8, 100)] if settings.quick else [(1, 500), (10, 200), (80, 50)]


def section(settings: Settings) -> tuple[Section, Iterator[Task]]:
    """Return the table of fleets of growing size."""
    torch.set_float32_matmul_precision(settings.precisions[0])
    made = Section(
        "Fleets",
        f"One step of all networks of a `Fleet` of {SMALL.name}, each with mini-batches of {SMALL.batch} of its own,"
        " as `fit` reports it, the best of a few rounds. The ratio is to plain eager PyTorch steps of as many networks,"
        " one after another.",
        COLUMNS,
    )
    alone = Contestant("plain", lambda: plain(SMALL, settings.device))
    alone.prepare(settings.device, settings.turn)
    interleave([alone], settings.rounds, settings.device)

    def measured(nets: int, steps: int) -> list[Row]:
        us = step_of_all(nets, steps, settings)
        return [{"nets": nets, "us": us, "each": us / nets, "ratio": us / (nets * alone.best)}]

    def grown() -> list[Row]:
        nets, us = ([row[key] for row in made.rows] for key in ("nets", "us"))
        return [curve("networks in the fleet", "µs a step of all", SMALL.name, nets, us)]

    tasks = [(f"fleet of {nets}", lambda n=nets, s=steps: measured(n, s)) for nets, steps in counts(settings)]
    return made, iter([*tasks, ("growth of fleets", grown)])
