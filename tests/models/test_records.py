"""The record of an experiment."""

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from experiments.experiment import Experiment
from matplotlib.figure import Figure


def started(tmp_path: Path, *words: str) -> Experiment:
    experiment = Experiment("coin", "How often?\n\nMore.")
    experiment.option("--throws", type=int, default=1000, quick=10, help="of the coin")
    experiment.option("--names", nargs="+", default=["a"], help="of coins")
    experiment.start(["--out", str(tmp_path / "out"), *words])
    return experiment


def test_quick_changes_defaults_and_not_what_was_given(tmp_path: Path) -> None:
    assert started(tmp_path).args.throws == 1000
    assert started(tmp_path, "--quick").args.throws == 10
    assert started(tmp_path, "--quick", "--throws", "7").args.throws == 7


def test_the_record_is_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    experiment = started(tmp_path, "--seed", "5", "--names", "x y", "z")
    experiment.table("Throws", [{"coin": "a", "heads": 0.5}, {"coin": "b", "heads": torch.tensor(0.25)}], "A note.")
    experiment.claim("it is fair", "holds in part", "1 of 2")
    figure = Figure()
    figure.subplots().plot([0, 1])
    experiment.figure("line", figure, "A line.")
    path = experiment.finish()
    record: dict[str, Any] = json.loads(path.read_text("utf-8"))
    assert record["tables"][0]["rows"] == [{"coin": "a", "heads": 0.5}, {"coin": "b", "heads": 0.25}]
    assert record["claims"] == [{"claim": "it is fair", "verdict": "holds in part", "number": "1 of 2"}]
    assert (path.parent / "line.png").read_bytes().startswith(b"\x89PNG")
    how = record["how"]
    assert how["command"].startswith("pyro-dropout reproduce coin --out")
    assert "--names 'x y' z" in how["command"]
    assert how["seed"] == 5
    assert how["versions"]["torch"] == version("torch")
    said, page = capsys.readouterr().out, (path.parent / "results.md").read_text("utf-8")
    assert "b     0.25" in said
    assert "HOLDS IN PART: it is fair (1 of 2)" in said
    for words in ("| b | 0.25 |", "| it is fair | **holds in part** | 1 of 2 |", "![A line.](line.png)", "A note."):
        assert words in page
