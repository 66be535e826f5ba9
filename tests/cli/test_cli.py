"""The command line: what it writes, what it says to people and to machines, and what it says of mistakes."""

import json
import re
from pathlib import Path
from unittest import mock

import pytest
import torch

import pyro_dropout as pd
from pyro_dropout.tabular import recipe
from pyro_dropout.tabular import run_folder as runs_on_disk
from pyro_dropout.tabular.fitted import FittedTable
from pyro_dropout.training.checkpoints.training_checkpoint import Keeper
from tests.cli.command import houses, run, succeeded, table_of, written

ROOT = Path(__file__).parents[2]


# --- fit, resume, predict ---------------------------------------------------------------------------------------------


def test_numbers_are_predicted(fitted: Path, tmp_path: Path) -> None:
    out = tmp_path / "predictions.csv"
    new = written(tmp_path, "town,area\nb,35\na,61.5\n")  # in another order, and without the target
    how = ("--samples", 40, "--level", 0.8, "--quiet", "--device", "cpu")
    succeeded("predict", fitted / "houses", new, "--out", out, *how)
    rows = table_of(out)
    assert [row["row"] for row in rows] == ["2", "3"]
    found = FittedTable.load(fitted / "houses")
    x = torch.tensor([[35.0, 0.0, 1.0], [61.5, 1.0, 0.0]])
    answer = pd.predict(found.model, found.guide, x, samples=40, shared=True, seed=0)
    assert found.calibration.intervals is not None
    assert found.calibration.rows == 6
    low, high = found.calibration.intervals.interval(answer, 0.8)
    wanted = {
        "mean": answer.mean,
        "std": answer.std,
        "lower": low,
        "upper": high,
        "epistemic_std": answer.epistemic.sqrt(),
    }
    for name, values in wanted.items():
        assert [float(row[name]) for row in rows] == pytest.approx(values.flatten().tolist(), rel=1e-5)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_classes_are_predicted(fitted: Path, tmp_path: Path) -> None:
    out = tmp_path / "predictions.csv"
    done = run("predict", fitted / "trees", fitted / "trees.csv", "--out", out, "--samples", 20, "--quiet", "--json")
    assert json.loads(done.stdout) == {
        "folder": str(fitted / "trees"), "target": "kind", "rows": 30, "file": str(out), "level": 0.95, "samples": 20,
        "classes": ["ash", "elm", "oak"], "notes": [], "beyond": {"rows": 0, "inputs": {}},
        "calibrated": False, "unfamiliar": 0, "scores": {"rows": 30, "accuracy": mock.ANY, "log_lik": mock.ANY},
    }  # fmt: skip
    kinds = [row["kind"] for row in table_of(fitted / "trees.csv")]
    right = [row["class"] == kind for row, kind in zip(table_of(out), kinds, strict=True)]
    assert json.loads(done.stdout)["scores"]["accuracy"] == sum(right) / 30
    actual = [float(row[f"p={kind}"]) for row, kind in zip(table_of(out), kinds, strict=True)]
    mean = torch.tensor(actual).log().mean().item()
    assert json.loads(done.stdout)["scores"]["log_lik"] == pytest.approx(mean, abs=1e-4)
    for row in table_of(out):
        probs = {name: float(row[f"p={name}"]) for name in ("ash", "elm", "oak")}
        assert sum(probs.values()) == pytest.approx(1, abs=1e-5)
        assert row["class"] == max(probs, key=probs.__getitem__)
        entropy = sum(torch.special.entr(torch.tensor(p)).item() for p in probs.values())
        assert float(row["entropy"]) == pytest.approx(entropy, abs=1e-5)
        assert 0 <= float(row["mutual_information"]) <= entropy


def test_pieces_of_a_long_table_come_from_the_same_draws(
    fitted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outs = [tmp_path / "whole.csv", tmp_path / "pieces.csv"]
    for out, size in zip(outs, (2**22, 70), strict=True):  # 70 outputs at once: seven rows of ten draws
        monkeypatch.setattr(recipe, "_PIECE", size)
        succeeded("predict", fitted / "houses", fitted / "houses.csv", "--out", out, "--samples", 10, "--quiet")
    whole, pieces = (table_of(out) for out in outs)
    assert [row["row"] for row in whole] == [row["row"] for row in pieces]
    for one, other in zip(whole, pieces, strict=True):
        assert float(one["mean"]) == pytest.approx(float(other["mean"]), rel=1e-4)


@pytest.mark.deep
def test_a_run_that_is_taken_up_again_ends_as_one_that_never_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = written(tmp_path, houses())
    options = ["--width", 5, "--steps", 45, "--batch-size", 7, "--held-back", 0.2, "--no-compile", "--quiet", "--json"]
    whole = succeeded("fit", data, "--out", tmp_path / "whole", *options)
    scores = set(json.loads(whole.stdout)["scores"])
    assert scores == {"log_lik", "rmse", "rmse_of_mean", "coverage_95", "interval_score_95"}  # six rows: not calibrated
    write = Keeper.write

    def interrupted(self: Keeper, step: int, losses: torch.Tensor) -> None:
        write(self, step, losses)
        if self.folder.name == "checkpoints":  # not while the run is chosen
            raise KeyboardInterrupt

    monkeypatch.setattr(Keeper, "write", interrupted)
    done = run("fit", data, "--out", tmp_path / "part", "--checkpoint-every", 20, *options)
    assert done.exit_code == 130
    assert done.stderr.strip() == f"pyro-dropout: interrupted; to continue: pyro-dropout resume {tmp_path / 'part'}"
    monkeypatch.setattr(Keeper, "write", write)
    assert 0 < int(next((tmp_path / "part" / "checkpoints").iterdir()).stem.removeprefix("step-")) < 45
    assert "unfinished run" in run("predict", tmp_path / "part", data, "--out", tmp_path / "no.csv").stderr
    done = succeeded("resume", tmp_path / "part", "--quiet", "--json")
    alike = ("steps", "last_loss", "scores", "chosen")
    assert json.loads(whole.stdout)["chosen"] != ""
    assert {key: json.loads(done.stdout)[key] for key in alike} == {key: json.loads(whole.stdout)[key] for key in alike}
    means = [runs_on_disk.Run.read(tmp_path / name).loaded(tmp_path / name)[1].mean() for name in ("whole", "part")]
    assert all(torch.equal(means[0][site], means[1][site]) for site in means[0])
    data.write_text(houses(31), "utf-8")
    done = run("resume", tmp_path / "part", "--quiet")
    assert done.exit_code == 2
    assert done.stderr.strip().startswith(f"pyro-dropout: {data} has changed since the run started")


# --- the rest of the face ---------------------------------------------------------------------------------------------


def test_help_has_examples_and_needs_no_torch() -> None:
    for command in ("compare", "fit", "predict", "resume", "reproduce", "datasets", "info", "benchmark"):
        done = run(command, "--help")
        assert done.exit_code == 0
        assert f"pyro-dropout {command}" in done.stdout.split("Examples:")[1]
        assert "<bool>" not in done.stdout
    assert "<bool>" not in run("--help").stdout
    assert run().stdout == run("--help").stdout


def test_rows_beyond_the_training_table_are_named(fitted: Path, tmp_path: Path) -> None:
    new = written(tmp_path, "town,area\nb,35\na,900\nb,-2\n")
    out = tmp_path / "p.csv"
    done = succeeded("predict", fitted / "houses", new, "--out", out, "--samples", 5)
    assert [row["beyond"] for row in table_of(out)] == ["", "area", "area"]
    assert (
        "rows outside the training range, or with a new category or gap: 2; inputs concerned: area (2)" in done.stdout
    )
    told = run("predict", fitted / "houses", new, "--out", out, "--samples", 5, "--json")
    assert json.loads(told.stdout)["beyond"] == {"rows": 2, "inputs": {"area": 2}}
    inside = run("predict", fitted / "houses", written(tmp_path, "town,area\nb,35\n"), "--out", out, "--samples", 5)
    assert "outside the training range" not in inside.stdout


def test_predictions_come_with_the_columns_of_their_table_when_asked(fitted: Path, tmp_path: Path) -> None:
    asked = ["predict", fitted / "houses", fitted / "houses.csv", "--out", tmp_path / "p.csv", "--samples", 10]
    assert run(*asked).exit_code == 0
    plain = table_of(tmp_path / "p.csv")
    assert run(*asked, "--with-inputs", "--plot", tmp_path / "p.png").exit_code == 0
    whole, table = table_of(tmp_path / "p.csv"), table_of(fitted / "houses.csv")
    assert list(whole[0]) == ["row", *table[0], *list(plain[0])[1:]]
    assert whole == [{**one, **row} for one, row in zip(plain, table, strict=True)]
    clash = tmp_path / "clash.csv"
    clash.write_text((fitted / "houses.csv").read_text("utf-8").replace("price", "mean", 1), "utf-8")
    done = run("predict", fitted / "houses", clash, "--out", tmp_path / "no.csv", "--with-inputs")
    assert done.exit_code == 2
    assert "the column 'mean' has the name of one of the predictions" in " ".join(done.stderr.split())
    assert not (tmp_path / "no.csv").exists()


# --- the experiments and their data -----------------------------------------------------------------------------------


@pytest.mark.deep
def test_a_mean_that_is_absurd_is_pointed_out(tmp_path: Path, fitted: Path) -> None:
    data = written(tmp_path, "area,town\n60,a\n70,b\n1e30,b\n")
    table = "area,town,price\n" + "".join(f"{30 + 5 * k},{'ab'[k % 2]},{20 * 1.1**k}\n" for k in range(60))
    how = ["--guide", "mean-field", "--scale", "log", "--steps", 30, "--width", 5, "--quiet"]
    assert run("fit", written(tmp_path, table, "prices.csv"), "--out", tmp_path / "run", *how).exit_code == 0
    done = succeeded("predict", tmp_path / "run", data, "--out", tmp_path / "p.csv", "--plot", tmp_path / "p.png")
    assert "the mean is not finite, or outside its own interval, in row 4" in " ".join(done.stderr.split())


def test_the_help_names_every_column_that_is_written(fitted: Path, tmp_path: Path) -> None:
    said = " ".join(run("predict", "--help").stdout.split())
    for name, more in (("houses", ["--quantiles", 0.1, "--threshold", 100]), ("trees", [])):
        out = tmp_path / f"{name}.csv"
        run("predict", fitted / name, fitted / f"{name}.csv", "--out", out, "--samples", 10, "--quiet", *more)
        columns = {re.sub(r"(?<=[=>]).*", "", column) for column in table_of(out)[0]}
        assert {column for column in columns if not re.search(rf"\b{re.escape(column)}", said)} == set()
