"""Records of chosen settings: a run continues from those that were made with the same options, and from no others."""

import json
from pathlib import Path
from typing import Any

from experiments.experiment import Experiment
from experiments.selected_records import add_options, collect

TASKS = [{"set": "yacht", "kind": kind} for kind in ("dropout", "ensemble")]


def collected(out: Path, *options: str) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the kinds that were run, and all records."""
    experiment = Experiment("uci", "x")
    experiment.option("--sets", nargs="+", default=["yacht"])
    add_options(experiment, steps=100)
    experiment.start(["--out", str(out), "--device", "cpu", *options])
    ran: list[str] = []

    def run(task: dict[str, Any]) -> dict[str, Any]:
        ran.append(task["kind"])
        return {"score": len(ran)}

    return ran, collect(experiment, "x.py", run, TASKS, ("steps", "seed"))


def test_a_run_continues_from_records_with_the_same_options(tmp_path: Path) -> None:
    assert collected(tmp_path)[0] == ["dropout", "ensemble"]
    ran, records = collected(tmp_path)
    assert ran == []
    assert records == json.loads((tmp_path / "records.json").read_text("utf-8"))
    assert records[1] == TASKS[1] | {"score": 2, "steps": 100, "seed": 0, "members": 16, "fold_members": 4}
    ran, records = collected(tmp_path, "--members", "5")  # which a single network does not have
    assert ran == ["ensemble"]
    assert [record.get("members") for record in records] == [None, 5]
    ran, records = collected(tmp_path, "--steps", "7")
    assert ran == ["dropout", "ensemble"]
    assert [record["steps"] for record in records] == [7, 7]
