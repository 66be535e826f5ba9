"""Low rank beside mean field on a CPU: what a step of ``pyro-dropout compare`` costs with each.

``python -m tests.benchmarks.low_rank [--rows 1600] [--columns 13] [--threads 1]`` writes a table, gives it to the
command, and takes the trainings that the command would run: its networks, batches and decision to compile, three seeds
as one fleet. Both guides then step in turns, in this process. The ratio should be at most 3.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pandas as pd
import torch
from typer.testing import CliRunner

from pyro_dropout.cli.main import app
from pyro_dropout.training.fleet import fleet as fleet_module
from pyro_dropout.training.fleet.fleet import FleetRun
from tests.benchmarks.machine import cpu_model, moment
from tests.benchmarks.report import Row, table
from tests.benchmarks.timing import Advance, Contestant, interleave, median_ratio

AT_MOST = 3.0
HELD_BACK = 0.2
GUIDES = ("mean-field", "low-rank")
COLUMNS = {
    "setting": "compare ...",
    "steps": "steps are",
    "mean-field": "mean field, ms",
    "low-rank": "low rank, ms",
    "ratio": "ratio",
    "limit": "at most",
}


class _Taken(Exception):
    """A training was ready to start, and is taken from the command here."""


def write_table(path: Path, rows: int, columns: int) -> None:
    """Write a table whose training part has so many rows."""
    random = np.random.default_rng(0)
    x = random.standard_normal((round(rows / (1 - HELD_BACK)), columns))
    y = np.sin(x[:, 0]) + x[:, 1] * x[:, 2] + 0.1 * random.standard_normal(len(x))
    pd.DataFrame({**{f"x{k}": x[:, k] for k in range(columns)}, "y": y}).to_csv(path, index=False)


def training(file: Path, guide: str, options: list[str]) -> FleetRun:
    """Return the training that ``pyro-dropout compare`` runs for a guide, ready to start."""
    found: list[FleetRun] = []

    def take(run: FleetRun, *rest: Any, **how: Any) -> None:
        found.append(run)
        raise _Taken

    command = ["compare", str(file), "--target", "y", "--guides", guide, "--device", "cpu", "--quiet", *options]
    with mock.patch.object(fleet_module, "loop", take):
        shown = CliRunner().invoke(app, [*command, "--out", str(file.parent / f"out-{guide}")])
    if len(found) != 1 or "_Taken" not in shown.output:
        raise RuntimeError(f"the command trained something else than one fleet:\n{shown.output}")
    return found[0]


def stepping(run: FleetRun) -> tuple[Advance, int]:
    """Return what takes some steps of a training."""

    def advance(steps: int) -> None:
        while steps > 0:
            steps -= len(run.advance(steps))

    return advance, 1


def how(run: FleetRun) -> str:
    """Say how the steps of a training are taken."""
    return "recorded" if run.compiled and run.traced else "compiled" if run.compiled else "eager"


def measured(file: Path, options: list[str], rounds: int, turn: float) -> Row:
    """Return the milliseconds of a step with each guide, in the best round, and the middle of the rounds' ratios."""
    runs: dict[str, FleetRun] = {}

    def build(guide: str) -> tuple[Advance, int]:
        runs[guide] = training(file, guide, options)
        return stepping(runs[guide])

    contestants = {guide: Contestant(guide, lambda guide=guide: build(guide)) for guide in GUIDES}  # type: ignore[misc]
    for each in contestants.values():
        each.prepare("cpu", turn)
    interleave(list(contestants.values()), rounds, "cpu")
    return {
        "setting": " ".join(options) or "as it is",
        "steps": " and ".join(sorted({how(run) for run in runs.values()})),
        **{guide: each.best / 1e3 for guide, each in contestants.items()},
        "ratio": median_ratio(contestants["low-rank"], contestants["mean-field"]),
        "limit": AT_MOST,
    }


def settings(rows: int) -> list[list[str]]:
    """Return the options of the command that are measured: steps recorded, compiled and eager, and mini-batches."""
    whole = ["--batch-size", str(rows)]
    return [whole, [*whole, "--steps", "2000"], [*whole, "--no-compile"], []]


def main(argv: list[str] | None = None) -> int:
    """Print the table; return 1 if a ratio is above its limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=1600, help="that are trained on")
    parser.add_argument("--columns", type=int, default=13)
    parser.add_argument("--threads", type=int, default=None, help="of torch; as it is by default")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--turn", type=float, default=1.0, help="seconds of a turn")
    given = parser.parse_args(argv)
    if given.threads is not None:
        torch.set_num_threads(given.threads)
    print(f"{given.rows} rows x {given.columns} columns, {cpu_model()}, {torch.get_num_threads()} threads, {moment()}")
    found = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "table.csv"
        write_table(file, given.rows, given.columns)
        for options in settings(given.rows):
            found.append(measured(file, options, given.rounds, given.turn))
            print(f"  {found[-1]['setting']}: ratio {found[-1]['ratio']:.2f}", flush=True)
    print(table(COLUMNS, found))
    return int(any(row["ratio"] > AT_MOST for row in found))


if __name__ == "__main__":
    sys.exit(main())
