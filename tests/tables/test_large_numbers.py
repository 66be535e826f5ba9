"""Large numbers that differ little, such as seconds since 1970: their differences are kept."""

import json
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pyro_dropout as pd
from pyro_dropout.tables.learning import centre_of
from tests.cli.command import as_csv, read_table, run, succeeded, table_of

NOW = 1_700_000_000


@pytest.mark.parametrize(("start", "step"), [(NOW, 100), (NOW, 1), (-(2**52), 7), (NOW * 10**6, 1000)])
@pytest.mark.parametrize("place", ["input", "target"])
def test_differences_survive_single_precision(tmp_path: Path, start: int, step: int, place: str) -> None:
    large, small = [start + step * k for k in range(400)], [k % 7 * 0.5 for k in range(400)]
    columns = {"t": large, "y": small} if place == "input" else {"x": small, "t": large}
    data = read_table(as_csv(tmp_path, columns), held_back=0.0)
    found = data.train[0 if place == "input" else 1][:, 0].double().sort().values
    assert found.diff().tolist() == [step] * 399
    assert "centred for single precision: t (at " in data.note
    assert f"t - {start + 200 * step}" in (data.x_name, data.y_name)


@given(st.integers(-(2**52), 2**52), st.lists(st.integers(0, 10**5), min_size=2, max_size=30))
def test_rounding_errs_by_a_ten_thousandth_of_the_range(start: int, steps: list[int]) -> None:
    array = np.array([float(start + step) for step in steps])
    centre = centre_of(array)
    found = (array - centre).astype(np.float32)
    assert len(np.unique(found)) == len(set(steps))
    for step, each in zip(steps, found.tolist(), strict=True):
        assert abs(Fraction(each) - (start + step - Fraction(centre))) <= Fraction(max(steps) - min(steps) or 1) / 10**4


def test_whole_numbers_beyond_double_precision_are_named_or_categories(tmp_path: Path) -> None:
    ids = [2**62 + k % 5 for k in range(60)]
    path = as_csv(tmp_path, {"id": ids, "x": [k % 9 for k in range(60)], "y": range(60)})
    assert (
        f"left out: id ('{2**62 + 1}' has more digits than a number here; subtract a constant)" in read_table(path).note
    )
    with pytest.raises(pd.errors.RangeError, match=r"row 3, column 'id': .* has more digits.*--categorical id"):
        read_table(path, keep=["id"])
    data = read_table(path, categorical=["id"], held_back=0.0)
    assert data.encoding is not None
    assert data.encoding.inputs[0].categories == tuple(str(2**62 + k) for k in range(5))
    assert read_table(path, target="id", task="classification").classes == tuple(str(2**62 + k) for k in range(5))


@pytest.mark.deep
def test_a_run_knows_its_centres(tmp_path: Path) -> None:
    columns = {"t": [NOW + k for k in range(60)], "when": [NOW * 10**3 + 5 * k for k in range(60)]}
    data = as_csv(tmp_path, columns)
    succeeded(
        "fit",
        data,
        "--out",
        tmp_path / "run",
        "--steps",
        200,
        "--width",
        5,
        "--guide",
        "dropout",
        "--no-compile",
        "--quiet",
    )
    record = json.loads((tmp_path / "run" / "run.json").read_text("utf-8"))
    assert record["encoding"]["inputs"][0]["centre"] == NOW + 30
    assert record["encoding"]["target_centre"] == NOW * 10**3 + 150
    asked = ["predict", tmp_path / "run", data, "--out", tmp_path / "p.csv", "--samples", 50]
    assert run(*asked, "--plot", tmp_path / "p.png").exit_code == 0
    for k, row in enumerate(table_of(tmp_path / "p.csv")):
        mean, lower, upper = (Fraction(row[name]) - NOW * 10**3 for name in ("mean", "lower", "upper"))
        assert abs(mean - 5 * k) < 300  # of a number with thirteen digits
        assert lower < mean < upper
        assert 0.5 < float(upper - lower) / (2 * 1.96 * float(row["std"])) < 2  # only the interval is calibrated
        assert row["beyond"] == ""
    assert run("resume", tmp_path / "run", "--quiet").exit_code == 0


def test_values_in_far_apart_heaps_are_refused(tmp_path: Path) -> None:
    heaps = [10**k + j for k in range(9, 15) for j in range(5)]
    with pytest.raises(
        pd.errors.RangeError, match=r"table.csv, column 't': single precision cannot tell most.*take logarithms"
    ):
        read_table(as_csv(tmp_path, {"t": heaps, "y": range(30)}))


def test_ordinary_numbers_are_left_alone(tmp_path: Path) -> None:
    columns = {"year": [1990 + k % 30 for k in range(60)], "x": [k / 7 for k in range(60)], "y": range(60)}
    data = read_table(as_csv(tmp_path, columns), held_back=0.0)
    assert data.encoding is not None
    assert [column.centre for column in data.encoding.inputs] == [0, 0]
    assert data.x_name == "year, x"
    assert "centred" not in data.note
