"""The experiment with holes in tables: which rows a hole has, which inputs have none, and its verdicts."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from experiments.experiment import Experiment

import pyro_dropout as pd
from tests.models.test_scripts import FOLDER, loaded

script = loaded(FOLDER / "holes.py")


@pytest.mark.parametrize("count", [9, 10, 11])
def test_a_hole_is_the_middle_third_of_an_input(count: int) -> None:
    values = torch.randperm(count, generator=torch.Generator().manual_seed(0)).float()
    rest, inside = script.hole(values, seed=0)
    assert sorted(torch.cat([rest, inside]).tolist()) == list(range(count))
    assert sorted(values[inside].tolist()) == list(range(3, count - 3))


def test_rows_of_equal_value_are_ranked_at_random() -> None:
    values = torch.tensor([0.0] * 5 + [1.0] * 5 + [2.0] * 20)  # 2 from rank 10 on: the hole is ten of these twenty
    drawn = [script.hole(values, seed)[1] for seed in range(40)]
    assert all((values[inside] == 2).all() for inside in drawn)
    often = torch.cat(drawn).bincount(minlength=30)[10:].double() / 40
    assert (often - 0.5).abs().max() < 0.4  # five standard errors


def test_inputs_without_a_middle_are_left_out_by_name() -> None:
    generator = torch.Generator().manual_seed(0)
    three = torch.arange(30).float() % 3
    x = torch.stack([torch.rand(30, generator=generator), three.clamp(max=1), torch.ones(30), three], 1)
    (train, test), told = script.holes(x, seed=0, most=99)
    assert told["inputs_used"] == ["input 1", "input 4"]
    assert told["left_out"] == ["input 2", "input 3"]
    assert told["ties"] == [0.0, 0.0]
    assert (x[test[1], 3] == 1).all()
    assert (x[train[1], 3] != 1).all()
    assert script.holes(x, seed=0, most=1)[1]["inputs_used"] == ["input 1"]
    x[0, 3] = 1.0  # one more row of the middle value than the hole has room for
    assert script.holes(x, seed=0, most=99)[1]["ties"] == [0.0, 1.0]


def test_data_are_standardised_by_the_rest_alone() -> None:
    x, y = torch.rand(40, 3), torch.rand(40, 1)
    model = script.model(x[:20], y[:20], 5, drop=0.1, decay=1e-6)
    torch.testing.assert_close(model.x_mean, x[:20].mean(0))
    torch.testing.assert_close(model.y_std, y[:20].std(0))
    assert isinstance(script.guide(model, "dropout", 0.1), pd.AutoDropout)
    assert isinstance(script.guide(model, "mean-field", 0.0), pd.AutoMeanField)


def made(name: str, kind: str, scores: list[float]) -> dict[str, Any]:
    return {
        "set": name, "source": "made", "kind": kind, "log_likelihood": scores, "rmse": [1.0, 2.0],
        "coverage": [0.9, 0.95], "inputs_used": ["input 1", "input 3"], "left_out": ["input 2"], "ties": [0.0, 0.5],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("better", "verdict"), [(9, "holds"), (7, "holds"), (6, "holds in part"), (0, "does not hold")]
)
@pytest.mark.thinned(2)
def test_the_verdict_counts_sets(tmp_path: Path, better: int, verdict: str) -> None:
    experiment = Experiment("holes", "x")
    experiment.start(["--out", str(tmp_path)])
    records = [made(f"set {k}", "dropout", [-2.0, -4.0]) for k in range(9)]
    records += [made(f"set {k}", "ensemble", [-2.5, -3.4 if k < better else -3.6]) for k in range(9)]
    script.report(experiment, records)
    found = json.loads(experiment.finish().read_text("utf-8"))
    assert [claim["verdict"] for claim in found["claims"]] == [verdict]
    assert f"on {better} of 9" in found["claims"][0]["number"]
    about, likelihood, coverage, rmse = (table["rows"][0] for table in found["tables"])
    assert about == {"set": "set 0", "source": "made", "holes": 2, "left out": "input 2", "ties": "25%"}
    assert likelihood["dropout"] == "-3.00 ± 1.00"
    assert coverage["ensemble"] == "92.5%"
    assert rmse["ensemble"] == "1.50 ± 0.50"
    assert (tmp_path / "gains.png").stat().st_size > 5000


@pytest.mark.deep  # the script runs whole
def test_the_record_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYRO_DROPOUT_DATA", raising=False)
    script.main(["--quick", "--quiet", "--device", "cpu", "--out", str(tmp_path)])
    records = json.loads((tmp_path / "records.json").read_text("utf-8"))
    assert [record["kind"] for record in records] == list(script.KINDS)
    for record in records:
        numbers = [*record["log_likelihood"], *record["rmse"], *record["coverage"]]
        assert len(numbers) == 6
        assert all(math.isfinite(number) for number in numbers)
        assert record["inputs_used"] == ["input 1", "input 2"]
        assert record["source"] == "made"  # there is no data folder here, and the table says so
    assert "members" not in records[0]
    assert records[2]["members"] == 3
    before = (tmp_path / "records.json").read_bytes()
    script.main(["--quick", "--quiet", "--device", "cpu", "--out", str(tmp_path)])  # has all records already
    assert (tmp_path / "records.json").read_bytes() == before
