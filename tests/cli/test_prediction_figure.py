"""The picture of predictions: every row is in it, numbers and classes, over numbers and categories."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pyro_dropout as pd
from pyro_dropout.cli import predict
from pyro_dropout.cli.predict import _Shown
from pyro_dropout.cli.prediction_figure import holes, plot_predictions, widest
from pyro_dropout.tables.files import Table
from tests.cli.command import run

ANSWERS: dict[str, Any] = {
    "mean": [1.0, 2.0, 4.0],
    "std": [0.5, 0.5, 0.7],
    "epistemic_std": [0.1, 0.2, 0.3],
    "lower": [0.0, 1.0, 2.5],
    "upper": [2.0, 3.0, 5.5],
}
CLASSES: dict[str, Any] = {
    "class": ["oak", "ash", "oak"],
    "probability": [0.9, 0.6, 0.7],
    "entropy": [0.3, 0.6, 0.5],
    "mutual_information": [0.1, 0.2, 0.1],
}


def points(axes: Any, label: str) -> list[tuple[float, float]]:
    (line,) = [line for line in axes.lines if line.get_label() == label]
    return list(zip(line.get_xdata(), line.get_ydata(), strict=True))


def test_each_row_stands_where_its_cell_says() -> None:
    figure = plot_predictions("age", ["7", "3", 5.0], ANSWERS, "height", 0.9, (["1", "2"], ["10", "20"]))
    upper, lower = figure.axes
    assert points(upper, "prediction") == [(7.0, 1.0), (3.0, 2.0), (5.0, 4.0)]
    assert points(upper, "height in the training table") == [(1.0, 10.0), (2.0, 20.0)]
    assert points(lower, "epistemic std") == [(7.0, 0.1), (3.0, 0.2), (5.0, 0.3)]
    intervals, doubt = (group.get_segments() for group in upper.collections)
    assert [tuple(ends[:, 1]) for ends in intervals] == [(0.0, 2.0), (1.0, 3.0), (2.5, 5.5)]
    assert [tuple(ends[:, 1].round(6)) for ends in doubt] == [(0.8, 1.2), (1.6, 2.4), (3.4, 4.6)]
    assert "90 % interval" in [text.get_text() for text in figure.legends[0].get_texts()]
    assert lower.get_xlabel() == "age"


def test_categories_have_places_of_their_own() -> None:
    figure = plot_predictions("soil", ["sand", "clay", None], CLASSES, "tree")
    upper, lower = figure.axes
    assert [text.get_text() for text in lower.get_xticklabels()] == ["clay", "sand"]
    assert points(upper, "tree: ash") == [(0.0, 0.6)]
    assert points(upper, "tree: oak")[0] == (1.0, 0.9)
    with pytest.raises(pd.PyroDropoutError, match="no predictions to plot"):
        plot_predictions("soil", [], {}, "tree")


def test_where_there_were_no_data_is_shaded() -> None:
    known = [*range(10), *range(20, 30)]
    assert holes([float(value) for value in known]) == [(9.0, 20.0)]
    assert holes([float(value) for value in range(30)]) == []
    assert holes([1.0, 9.0]) == []
    assert holes([3.0] * 20) == []
    behind = ([str(value) for value in known], ["1"] * 20)
    figure = plot_predictions("age", ["7", "3", "15"], ANSWERS, "height", measured=behind, title="heights")
    assert figure.axes[0].get_title() == "heights"
    for axes in figure.axes:
        (shade,) = axes.patches
        assert (shade.get_x(), shade.get_x() + shade.get_width()) == (9.0, 20.0)


def test_a_dollar_is_a_dollar(tmp_path: Path) -> None:
    name = "US$_a_b$"  # as mathematics, a mistake
    figure = plot_predictions(name, ["$x_a_b$", "3", "15"], CLASSES, name, title=name)
    figure.savefig(tmp_path / "p.png")
    figure = plot_predictions(name, ["7", "3", "15"], ANSWERS, name, 0.9, (["1", "2"], ["10", "20"]), name)
    figure.savefig(tmp_path / "p.svg")
    assert figure.axes[0].get_ylabel() == name


def test_it_is_drawn_over_what_varies_most() -> None:
    assert widest({"a": ["1", "1", "2"], "b": ["x", "y", "z"]}, ["a", "b"]) == "b"


@pytest.mark.parametrize("name", ["houses", "trees"])
def test_the_command_writes_it(fitted: Path, tmp_path: Path, name: str) -> None:
    asked = ["predict", fitted / name, fitted / f"{name}.csv", "--out", tmp_path / "p.csv", "--samples", 20]
    done = run(*asked, "--plot", tmp_path / "p.png", "--quiet", "--json")
    assert done.exit_code == 0, done.stderr
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads(done.stdout)["plot"].endswith("p.png")


def test_a_picture_says_why_the_data_of_the_fit_are_not_in_it(fitted: Path, tmp_path: Path) -> None:
    copy, table = tmp_path / "run", tmp_path / "houses.csv"
    shutil.copytree(fitted / "houses", copy)
    table.write_bytes((fitted / "houses.csv").read_bytes())
    record = json.loads((copy / "run.json").read_text("utf-8"))
    record["data"]["file"] = str(table)
    (copy / "run.json").write_text(json.dumps(record), "utf-8")
    asked = ["predict", copy, fitted / "houses.csv", "--out", tmp_path / "p.csv", "--samples", 20]
    asked += ["--plot", tmp_path / "p.png", "--over", "area"]
    assert "the plot does not show" not in run(*asked).stdout
    with table.open("a") as file:
        file.write("# a remark\n")
    assert "houses.csv has changed since the fit, so the plot does not show it" in run(*asked).stdout
    table.unlink()
    assert "houses.csv no longer exists, so the plot does not show the training data" in run(*asked).stdout


@given(st.lists(st.integers(1, 23), min_size=1, max_size=40))
def test_rows_of_a_picture_are_all_or_a_choice_from_all(sizes: list[int]) -> None:
    total, shown = 0, _Shown(True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(predict, "_DRAWN", 10)
        for size in sizes:
            rows = list(range(total, total + size))
            piece = Table("new.csv", {"age": [str(row) for row in rows]}, rows)
            assert list(shown.passing([({"row": rows}, piece)])) == [{"row": rows}]
            total += size
    kept = shown._answers["row"]
    assert kept == sorted(set(kept))  # in order, none twice
    assert shown._cells["age"] == [str(row) for row in kept]
    assert kept == list(range(total)) if total <= 20 else 0 < len(kept) <= 20


def test_every_row_is_as_likely_to_be_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predict, "_DRAWN", 500)
    shown = _Shown(True)
    for start in range(0, 20_000, 250):
        rows = list(range(start, start + 250))
        list(shown.passing([({"row": rows}, Table("new.csv", {"town": ["A", "B"] * 125}, rows))]))
    kept = shown._answers["row"]
    assert 400 < len(kept) <= 1000
    for part in range(4):  # quarters of the file, each within four standard errors of its share
        assert abs(sum(row // 5000 == part for row in kept) / len(kept) - 0.25) < 4 * (0.1875 / len(kept)) ** 0.5
    assert abs(shown._cells["town"].count("A") / len(kept) - 0.5) < 4 * (0.25 / len(kept)) ** 0.5


def test_many_measurements_are_thinned_and_no_hole_is_lost() -> None:
    known = [0.1 * k for k in range(9000) if not 300 < k % 4500 < 3000]
    behind = ([str(value) for value in known], ["1"] * len(known))
    figure = plot_predictions("age", ["7", "3", "15"], ANSWERS, "height", measured=behind)
    dots = [place for place, _ in points(figure.axes[0], "height in the training table")]
    assert len(dots) == len(set(dots)) == 2000
    assert set(dots) <= set(known)
    assert abs(sum(place < 450 for place in dots) / 2000 - 0.5) < 0.05
    assert len(figure.axes[0].patches) == 2


def test_bad_wishes_are_refused_and_nothing_is_written(fitted: Path, tmp_path: Path) -> None:
    asked = ["predict", fitted / "houses", fitted / "houses.csv", "--out", tmp_path / "p.csv"]
    for wish, said in (
        (["--plot", tmp_path / "p.txt"], "must end in .png, .pdf or .svg"),
        (["--plot", tmp_path / "no" / "p.png"], "there is no folder"),
        (["--plot", tmp_path / "p.png", "--over", "colour"], "'colour' is not an input of the run; choose from"),
        (["--over", "rooms"], "requires --plot FILE"),
    ):
        done = run(*asked, *wish)
        assert done.exit_code == 2
        assert said in " ".join(done.stderr.split())
        assert not list(tmp_path.iterdir())
