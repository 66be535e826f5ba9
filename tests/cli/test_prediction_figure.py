"""The picture of predictions: every row is in it, numbers and classes, and it says what the file says."""

import csv
from pathlib import Path
from typing import Any

import pytest

from pyro_dropout.cli import predict
from tests.cli.command import run


@pytest.mark.parametrize("name", ["houses", "trees"])
def test_picture_file_and_chart_show_the_same_numbers(
    fitted: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures: list[Any] = []
    monkeypatch.setattr(predict, "_save", lambda figure, path: figures.append(figure))
    target = {"houses": "price", "trees": "kind"}[name]
    with (fitted / f"{name}.csv").open(newline="") as file:
        rows = [{key: cell for key, cell in row.items() if key != target} for row in csv.DictReader(file)]
    rows[0] |= {key: "99999" for key in rows[0] if key in ("area", "age")}
    with (tmp_path / "new.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    asked = ["predict", fitted / name, tmp_path / "new.csv", "--out", tmp_path / "p.csv", "--quiet"]
    done = run(*asked, "--plot", tmp_path / "p.png", "--explain", tmp_path / "e.png")
    assert done.exit_code == 0, done.stderr
    picture, chart = figures
    with (tmp_path / "p.csv").open(newline="") as file:
        said = [row for row in csv.DictReader(file) if not row["beyond"]]
    assert len(said) == len(rows) - 1
    bars = [[bar.get_width() for bar in axes.patches] for axes in (picture.axes[0], chart.axes[0])]
    assert bars[0] == bars[1]
    left = "1 more left out: a number outside its training range"
    assert left in picture._suptitle.get_text()
    for title in (picture.axes[0].get_title(), chart._suptitle.get_text()):
        assert f"{len(rows) - 1} rows within the training range, each column shuffled 3 times" in title


def test_bad_wishes_are_refused_and_nothing_is_written(fitted: Path, tmp_path: Path) -> None:
    asked = ["predict", fitted / "houses", fitted / "houses.csv", "--out", tmp_path / "p.csv"]
    for wish, said in (
        (["--plot", tmp_path / "p.txt"], "must end in .png, .pdf or .svg"),
        (["--plot", tmp_path / "no" / "p.png"], "there is no folder"),
        (["--plot", tmp_path / "p.png", "--explain", tmp_path / "p.png"], "is also the --plot file"),
    ):
        done = run(*asked, *wish)
        assert done.exit_code == 2
        assert said in " ".join(done.stderr.split())
        assert not list(tmp_path.iterdir())
