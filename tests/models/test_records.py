"""The record of an experiment, and what is said of classifiers, beside counts of pairs and tables by hand."""

import json
import math
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from experiments.classifiers import auroc, error_table, rejection_table
from experiments.experiment import Experiment, read_rows
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from sklearn.metrics import roc_auc_score

from tests.oracles.both_types import dtypes


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
    assert read_rows(path.parent / "results.md") == record["tables"][0]["rows"]


FEW = st.lists(st.integers(0, 5), min_size=1, max_size=20)  # with many ties


@given(odd=FEW, ordinary=FEW, dtype=dtypes)
def test_an_area_counts_pairs(odd: list[int], ordinary: list[int], dtype: torch.dtype) -> None:
    found = auroc(torch.tensor(odd, dtype=dtype), torch.tensor(ordinary, dtype=dtype))
    pairs = [(a > b) + 0.5 * (a == b) for a in odd for b in ordinary]
    assert found.value == pytest.approx(sum(pairs) / len(pairs))
    labels = [1] * len(odd) + [0] * len(ordinary)
    assert found.value == pytest.approx(roc_auc_score(labels, odd + ordinary))
    mirrored = auroc(torch.tensor(ordinary, dtype=dtype), torch.tensor(odd, dtype=dtype))
    assert found.value + mirrored.value == pytest.approx(1)
    assert math.isnan(found.error) == (min(len(odd), len(ordinary)) < 2)
    assert mirrored.error == pytest.approx(found.error, nan_ok=True)


def answer(*chosen: int) -> Any:
    """A prediction that is all but sure of a class of three, for each input."""
    probs = torch.full((len(chosen), 3), 0.1).scatter(1, torch.tensor(chosen)[:, None], 0.8)
    return SimpleNamespace(probs=probs, log_prob=lambda y: probs[torch.arange(len(y)), y].log())


def test_a_gain_has_the_larger_of_two_errors() -> None:
    y = torch.tensor([0, 1, 2, 0])
    right, one_off = answer(0, 1, 2, 0), answer(0, 1, 2, 1)
    (row,) = error_table({"net": [(one_off, right), (right, right)]}, y, group="kind", ways=("plain", "MC"))
    assert row["kind"] == "net"
    assert (row["plain %"], row["MC %"], row["gain"]) == pytest.approx((12.5, 0.0, 12.5))
    assert row["± binomial"] == row["± over seeds"] == 0
    gain = torch.tensor([[0.0, 0, 0, 1], [0, 0, 0, 0]])
    over_seeds, over_inputs = (100 * gain.mean(d).std().item() / n**0.5 for d, n in ((1, 2), (0, 4)))
    assert row["± gain"] == pytest.approx(max(over_seeds, over_inputs))
    assert row["MC log p"] == pytest.approx(torch.tensor(0.8).log().item())


def test_rejection_by_hand() -> None:
    uncertainty, mistake = torch.arange(100.0), torch.zeros(100)
    mistake[[10, 97, 99]] = 1
    rows, figure = rejection_table({"a": {"good": (uncertainty, mistake), "bad": (-uncertainty, mistake)}})
    assert [list(row)[:2] for row in rows] == [["model", "by"]] * 2
    errors = [[row[f"error % at {share}%"] for share in (100, 99, 95)] for row in rows]
    assert errors[0] == pytest.approx([3.0, 200 / 99, 100 / 95])
    assert errors[1] == pytest.approx([3.0, 300 / 99, 300 / 95])
    assert rows[0]["of the oracle's gain"] > 0 > rows[1]["of the oracle's gain"]
    (axes,) = figure.axes
    assert axes.get_title() == "model: a"
    assert [line.get_ydata()[-1] for line in axes.lines] == pytest.approx([3.0, 3.0])
