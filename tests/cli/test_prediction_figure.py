"""The picture of predictions: every row is in it, numbers and classes, over numbers and categories."""

import csv
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
from pyro_dropout.cli.prediction_figure import draw_over, far_rows, holes, plot_predictions, widest
from pyro_dropout.prediction.plot_style import PALETTE
from pyro_dropout.tables.column import Column
from pyro_dropout.tables.encoding import Encoding
from pyro_dropout.tables.table import Table
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
        low, high = axes.get_xlim()
        assert shades(axes) == [(low, 0.0), (9.0, 20.0), (29.0, high)]


def shades(axes: Any) -> list[tuple[float, float]]:
    return sorted((shade.get_x(), pytest.approx(shade.get_x() + shade.get_width())) for shade in axes.patches)


@pytest.mark.parametrize("answers", [ANSWERS, CLASSES])
def test_everything_outside_the_training_range_is_shaded_to_the_ends_of_the_axis(answers: dict[str, Any]) -> None:
    figure = plot_predictions("age", ["-40", "3", "90"], answers, "y", span=(0.0, 50.0))
    for axes in figure.axes:
        low, high = axes.get_xlim()
        assert low < -40
        assert high > 90
        assert shades(axes) == [(low, 0.0), (50.0, high)]
    assert any("no data here" in text.get_text() for text in figure.legends[0].get_texts())
    figure = plot_predictions("age", ["60", "70", "90"], answers, "y", span=(0.0, 50.0))  # all of them outside
    assert shades(figure.axes[0]) == [figure.axes[0].get_xlim()]


def test_what_is_certain_does_not_stick_out_of_the_interval() -> None:
    wide = ANSWERS | {"epistemic_std": [3.0, 0.2, 0.3]}
    figure = plot_predictions("age", ["7", "3", "5"], wide, "height")
    doubt = figure.axes[0].collections[1].get_segments()
    assert [tuple(ends[:, 1].round(6)) for ends in doubt] == [(0.0, 2.0), (1.6, 2.4), (3.4, 4.6)]
    assert "cut at the interval" in " ".join(text.get_text() for text in figure.legends[0].get_texts())
    plain = plot_predictions("age", ["7", "3", "5"], ANSWERS, "height")
    assert "cut at the interval" not in " ".join(text.get_text() for text in plain.legends[0].get_texts())


@pytest.mark.parametrize("answers", [ANSWERS, CLASSES])
def test_rows_beyond_the_training_rows_have_a_ring(answers: dict[str, Any]) -> None:
    marked = answers | {"beyond": ["", "age; soil", ""]}
    figure = plot_predictions("age", ["7", "3", "5"], marked, "height")
    height = answers["mean" if "mean" in answers else "probability"][1]
    assert points(figure.axes[0], "outside the training range, or a new category") == [(3.0, height)]
    figure = plot_predictions("age", ["7", "3", "5"], answers | {"beyond": [""] * 3}, "height")
    assert "outside" not in " ".join(text.get_text() for text in figure.legends[0].get_texts())


def test_no_two_entries_of_a_legend_look_the_same() -> None:
    many = {name: values * 3 for name, values in CLASSES.items()} | {"class": [f"c{k}" for k in range(9)]}
    figure = plot_predictions("age", [str(k) for k in range(9)], many, "tree")
    looks = [(line.get_color(), line.get_marker()) for axes in figure.axes for line in axes.lines]
    assert len(set(looks)) == len(looks) == 11


CARS = Encoding(
    (Column("km", centre=100), Column("make", ("a", "b")), Column("power")),
    "price",
    ranges=((-100.0, 400.0), (0.0, 1.0), (0.0, 1.0), (10.0, 10.0)),
)


def test_rows_are_far_where_a_number_is_farther_outside_than_the_range_is_wide() -> None:
    cells = {"km": ["0", "1000", "1001", "-500", "-501", None], "make": ["a"] * 6, "power": ["10"] * 6}
    assert far_rows(CARS, cells) == [False, False, True, False, True, False]
    assert far_rows(CARS, cells | {"power": ["10", "21", "20", "0", "10", "10"]})[:2] == [False, True]


def test_far_rows_are_left_out_and_counted_in_the_title() -> None:
    four = {name: [*values, values[-1]] for name, values in ANSWERS.items()} | {"beyond": ["", "", "", "km"]}
    cells = {"km": ["50", "400", "700", "9900000"], "make": ["a"] * 4, "power": ["10"] * 4}
    figure = draw_over(CARS, "km", cells, four, guide="dropout", rows=4)
    upper = figure.axes[0]
    assert [place for place, _ in points(upper, "prediction")] == [50.0, 400.0, 700.0]
    assert upper.get_xlim()[1] < 800
    assert shades(upper) == [(500.0, upper.get_xlim()[1])]
    assert upper.get_title().split("\n") == [
        "price by dropout, with 95 % intervals; rows differ in their other columns too",
        "4 rows; 1 of them left out: far outside the training range",
    ]
    figure = draw_over(
        CARS, "km", cells | {"km": ["9900000"] * 4}, four, guide="dropout", rows=9
    )  # nothing else to show
    assert figure.axes[0].get_title().endswith("\n4 of 9 rows")
    figure = draw_over(CARS, "km", cells | {"km": ["50", None, "NA", "60"]}, four, guide="dropout", rows=4)
    assert figure.axes[0].get_title().endswith("\n4 rows; 2 of them without km")


def test_a_picture_of_classes_speaks_of_no_intervals() -> None:
    pets = Encoding(CARS.inputs, "pet", ("oak", "ash"), ranges=CARS.ranges)
    cells = {"km": ["50", "400", "700"], "make": ["a"] * 3, "power": ["10"] * 3}
    title = draw_over(pets, "km", cells, CLASSES, guide="dropout", rows=3).axes[0].get_title()
    assert title.startswith("pet by dropout: probability of the most probable class; rows differ")


def test_a_class_has_its_colour_even_if_others_are_not_predicted() -> None:
    shares = {f"p={name}": [0.1, 0.2, 0.3] for name in ("elm", "oak", "ash")}
    lines = plot_predictions("age", ["7", "3", "5"], CLASSES | shares, "tree").axes[0].lines
    assert [(line.get_label(), line.get_color()) for line in lines] == [
        ("tree: oak", PALETTE[1]),
        ("tree: ash", PALETTE[2]),
    ]


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
    wanted = sorted(float(row["mean" if name == "houses" else "probability"]) for row in said)
    lines = [line for line in picture.axes[0].lines if line.get_label() != "unlike the training rows"]
    drawn = sorted(float(height) for line in lines for height in line.get_ydata())
    dots = [line for line in picture.axes[0].lines if line.get_label() == "unlike the training rows"]
    drawn += [float(height) for line in dots for height in line.get_ydata()] if name == "houses" else []
    assert sorted(drawn) == pytest.approx(wanted, rel=1e-5)
    bars = [[bar.get_width() for bar in axes.patches] for axes in (picture.axes[1], chart.axes[0])]
    assert bars[0] == bars[1]
    left = "1 more left out: a number outside its training range"
    assert left in picture._suptitle.get_text()
    for title in (picture.axes[1].get_title(), chart._suptitle.get_text()):
        assert f"{len(rows) - 1} rows within the training range, each column shuffled 3 times" in title


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
    assert len(figure.axes[0].patches) == 4  # the holes, and both sides


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
