"""``pyro-dropout compare``: the folder it writes, what it says, and the series and guides that it offers."""

import json
import math
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import xarray

import pyro_dropout as pd
from pyro_dropout.tabular import recipe
from tests.cli.command import FEW, contents, houses, run, succeeded, table_of, trees, written


@pytest.mark.deep
def test_a_table_of_ones_own_is_compared(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "down"
    data = written(tmp_path, houses())
    options = ["--guides", "dropout,mean-field", "--seeds", 2, "--samples", 30, "--out", out, *FEW]
    done = succeeded("compare", data, "--target", "price", *options)
    (errors,) = [line.split()[1:] for line in done.stdout.splitlines() if line.strip().startswith("RMSE")]
    assert len(errors) == 9  # a mean, ± and an error for each of the three
    assert "table.csv: 24 training rows and 6 test rows, chosen at random; one-hot encoded: town (2)" in done.stdout
    assert str(out / "report.html")[-20:] in done.stdout
    assert "scored best on the held-back rows" in done.stdout
    assert sorted(contents(tmp_path / "deep")) == [
        "down",
        "down/comparison.json",
        "down/figures",
        "down/figures/scores.png",
        "down/posteriors",
        "down/posteriors/dropout.nc",
        "down/posteriors/mean-field.nc",
        "down/posteriors/what-fit-would-do.nc",
        "down/report.html",
        "down/table.csv",
    ]
    rows = {row["posterior"]: row for row in table_of(out / "table.csv")}
    assert set(rows) == {"what fit would do", "dropout", "mean-field"}
    assert rows["dropout"]["elbo"] == ""
    assert float(rows["mean-field"]["elbo"]) < 0
    assert f"{float(rows['dropout']['rmse']):.3f}" == errors[3]
    page = (out / "report.html").read_text("utf-8")
    assert page.startswith("<!doctype html>")
    assert "one-hot encoded: town (2)" in page
    stats = {name: open_group(out / "posteriors" / f"{name}.nc", "sample_stats") for name in rows if " " not in name}
    assert set(stats["mean-field"]) == {"lp", "log_q"}
    assert set(stats["dropout"]) == {"lp"}  # no density, no log q


def open_group(path: Path, group: str) -> list[str]:
    with xarray.open_dataset(path, group=group, engine="h5netcdf") as found:
        return list(found.data_vars)


OLD = ("comparison.json", "posteriors/low-rank.nc", "figures/bands.png", "report.html")


def test_classes_are_compared_for_machines_and_an_older_comparison_makes_room(tmp_path: Path) -> None:
    out = tmp_path / "out"
    data = tmp_path / "trees.parquet"
    lines = [line.split(",") for line in trees().splitlines()]
    columns = {name: [row[k] for row in lines[1:]] for k, name in enumerate(lines[0])}
    numbers = {name: [float(value) for value in columns[name]] for name in ("width", "age")}
    pyarrow.parquet.write_table(pyarrow.table({**numbers, "kind": columns["kind"]}), data)
    for name in (*OLD, "mine.txt", "figures/mine.png"):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("old")
    (out / "comparison.json").write_text(json.dumps({"files": OLD}))
    (out / ".lock").touch()  # of a comparison that was killed
    options = ["--guides", "dropout", "--seeds", 1, "--seed", 4, "--samples", 20, "--out", out, *FEW]
    done = succeeded("compare", data, "--target", "kind", "--json", *options)
    found = json.loads(done.stdout)
    assert 0 <= found["scores"]["dropout"]["accuracy"]["mean"] <= 1
    assert found["scores"]["dropout"]["elbo"] == {
        "mean": None, "error": None, "values": [], "note": "undefined, σ = 0",
    }  # fmt: skip
    assert "read as one of 3 classes" in found["about"]
    new = {name: what for name, what in contents(out).items() if what is not None}
    assert new.pop("mine.txt") == new.pop("figures/mine.png") == b"old"  # what is not the comparison's stays
    assert f"an earlier comparison into {out} was killed; all guides are trained again" in " ".join(done.stderr.split())
    assert json.loads(new["comparison.json"])["files"] == found["files"]
    assert sorted(new) == found["files"]
    assert "posteriors/dropout.nc" in new
    assert "posteriors/low-rank.nc" not in new
    assert "figures/bands.png" not in new
    assert b"old" not in new.values()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "trees.parquet"]


def test_where_nothing_can_be_computed_the_code_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def diverge(*args: Any, **options: Any) -> None:
        raise pd.errors.DivergedError("the loss is nan at step 1")

    monkeypatch.setattr(recipe, "fit", diverge)
    done = run("compare", written(tmp_path, houses()), "--guides", "dropout", "--out", tmp_path / "out", *FEW)
    assert done.exit_code == 1
    assert done.stderr.strip() == "pyro-dropout: no guide could be trained; the notes in the table say why."
    assert "- dropout diverged: the loss is nan at step 1" in done.stdout
    assert "the loss is nan at step 1" in (tmp_path / "out" / "report.html").read_text("utf-8")


def test_links_are_not_followed(tmp_path: Path) -> None:
    data = written(tmp_path, houses())
    (tmp_path / "far").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "comparison.json").write_text("{}")
    (tmp_path / "out" / "figures").symlink_to(tmp_path / "far")
    done = run("compare", data, "--out", tmp_path / "out", *FEW)
    assert (done.exit_code, "figures' is a symbolic link" in done.stderr) == (2, True)
    assert sorted(contents(tmp_path / "out")) == ["comparison.json", "figures"]


@pytest.mark.parametrize(
    ("target", "names"),
    [
        pytest.param("price", ["mean-field"], marks=pytest.mark.deep),
        pytest.param("price", ["laplace"], marks=pytest.mark.deep),
        pytest.param("kind", ["mean-field"], marks=pytest.mark.deep),
    ],
)
def test_a_row_has_the_score_that_fit_prints_with_the_same_options(
    tmp_path: Path, target: str, names: list[str]
) -> None:
    """One name is one recipe; and the row of what fit would do is that of plain fit."""
    rows = ["area,price,kind", *(f"{k},{math.exp(k / 10) + k % 3},{'ab'[k % 7 > 2]}" for k in range(1, 41))]
    data = written(tmp_path, "\n".join(rows))
    few = ["--target", target, "--steps", 12, "--width", 5, "--seed", 3, "--no-compile", "--quiet", "--json"]
    done = succeeded("compare", data, "--guides", ",".join(names), "--seeds", 2, *few, "--out", tmp_path / "out")
    scores = json.loads(done.stdout)["scores"]
    for row, own in {"what fit would do": [], **{name: ["--guide", name] for name in names}}.items():
        fitted = succeeded("fit", data, *own, *few, "--out", tmp_path / row)
        alone = json.loads(fitted.stdout)["scores"]["log_lik"]
        assert scores[row]["log_lik"]["values"][0] == pytest.approx(alone, rel=1e-5), row
        assert len(scores[row]["log_lik"]["values"]) == 2


def test_classes_and_series_have_no_scale_to_choose(tmp_path: Path) -> None:
    data = written(tmp_path, trees())
    for options, complaint in {
        (data, "--target", "kind", "--scale", "log"): "classes have no scale and no noise; got scale='log'",
        (data, "--target", "kind", "--noise", "by-input"): "classes have no scale and no noise",
        ("co2", "--noise", "by-input"): "'--noise': 'co2' has its own target and model",
    }.items():
        done = run("compare", *options, "--guides", "dropout", *FEW, "--out", tmp_path / "out")
        assert (done.exit_code, complaint in done.stderr) == (2, True), done.stderr
