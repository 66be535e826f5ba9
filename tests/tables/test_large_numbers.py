"""Large numbers that differ little: seconds since 1970, identifiers beyond 2^53; their differences are kept."""

import functools
import json
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pyro_dropout as pd
from pyro_dropout.tables import reading
from pyro_dropout.tables.precision import centre_of, exact_numbers, rounded
from pyro_dropout.tables.reading import read_input_pieces
from tests.cli.command import FEW, run, table_of, written

read_table = functools.partial(reading.read_table, strict=True)
NOW = 1_700_000_000
HUGE = 2**62


def as_parquet(folder: Path, columns: dict[str, Any]) -> Path:
    pyarrow.parquet.write_table(pyarrow.table(columns), folder / "table.parquet")
    return folder / "table.parquet"


def as_csv(folder: Path, columns: dict[str, Any], name: str = "table.csv") -> Path:
    rows = zip(*columns.values(), strict=True)
    return written(folder, "\n".join([",".join(columns), *(",".join(map(str, row)) for row in rows)]), name)


@pytest.mark.parametrize("file", [as_csv, as_parquet])
@pytest.mark.parametrize(("start", "step"), [(NOW, 100), (NOW, 1), (HUGE, 1), (-HUGE, 7), (NOW * 10**9, 1000)])
@pytest.mark.parametrize("place", ["input", "target"])
def test_differences_survive_single_precision(tmp_path: Path, file: Any, start: int, step: int, place: str) -> None:
    large, small = [start + step * k for k in range(400)], [k % 7 * 0.5 for k in range(400)]
    columns = {"t": large, "y": small} if place == "input" else {"x": small, "t": large}
    data = read_table(file(tmp_path, columns), held_back=0.0)
    found = data.train[0 if place == "input" else 1][:, 0].double().sort().values
    assert found.diff().tolist() == [step] * 399
    assert "centred for single precision: t (at " in data.note
    assert f"t - {start + 200 * step}" in (data.x_name, data.y_name)


def test_seconds_that_are_drawn_at_random_stay_apart(tmp_path: Path) -> None:
    drawn = np.random.default_rng(0).choice(40_000, 400, replace=False) + NOW
    data = read_table(as_csv(tmp_path, {"t": drawn.tolist(), "y": range(400)}), held_back=0.0)
    assert len(data.train[0].unique()) == 400


def test_ordinary_numbers_are_left_alone(tmp_path: Path) -> None:
    columns = {"year": [1990 + k % 30 for k in range(60)], "x": [k / 7 for k in range(60)], "y": range(60)}
    data = read_table(as_csv(tmp_path, columns), held_back=0.0)
    assert data.encoding is not None
    assert [column.centre for column in data.encoding.inputs] == [0, 0]
    assert data.x_name == "year, x"
    assert "centred" not in data.note


@given(
    st.one_of(st.integers(-(2**63), 2**64), st.floats(-1e12, 1e12)),
    st.lists(st.integers(0, 10**5), min_size=2, max_size=30),
)
def test_rounding_errs_by_a_ten_thousandth_of_the_range(start: float, steps: list[int]) -> None:
    values = [start + step for step in steps]
    array = exact_numbers(values)
    exact = [Fraction(start) + step for step in steps]
    if [Fraction(value) for value in values] != exact:
        return  # float64 itself cannot hold them
    centre = centre_of(array)
    found = rounded(array, centre)
    assert len(found.unique()) == len(set(steps)) or not float(start).is_integer()
    for value, each in zip(exact, found.tolist(), strict=True):
        assert abs(Fraction(each) - (value - Fraction(centre))) <= Fraction(max(steps) - min(steps) or 1) / 10**4


@pytest.mark.parametrize("file", [as_csv, as_parquet])
def test_large_whole_numbers_are_categories_of_their_own(tmp_path: Path, file: Any) -> None:
    ids = [HUGE + k % 5 for k in range(60)]
    data = read_table(file(tmp_path, {"id": ids, "y": range(60)}), categorical=["id"], held_back=0.0)
    assert data.encoding is not None
    assert data.encoding.inputs[0].categories == tuple(str(HUGE + k) for k in range(5))
    classes = read_table(file(tmp_path, {"x": range(60), "id": ids}), task="classification").classes
    assert classes == tuple(str(HUGE + k) for k in range(5))


def test_unsigned_numbers_and_decimals_keep_all_digits(tmp_path: Path) -> None:
    for kind, exact in ((pyarrow.uint64(), int), (pyarrow.decimal128(25, 0), Decimal)):
        ids = pyarrow.array([exact(2**63 + k % 3) for k in range(30)], kind)
        path = as_parquet(tmp_path, {"id": ids, "y": range(30)})
        data = read_table(path, held_back=0.0)
        assert len(data.train[0].unique()) == 3
        assert data.encoding is not None
        ((_, x),) = read_input_pieces(as_csv(tmp_path, {"id": [2**63 + 2, 2**63], "y": [1, 2]}), data.encoding, None)
        assert x.flatten().diff().tolist() == [-2.0]


@pytest.mark.deep
def test_a_run_knows_its_centres(tmp_path: Path) -> None:
    columns = {"t": [NOW + k for k in range(60)], "when": [NOW * 10**9 + 5 * k for k in range(60)]}
    data = as_csv(tmp_path, columns)
    done = run(
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
    assert done.exit_code == 0, done.stderr
    record = json.loads((tmp_path / "run" / "run.json").read_text("utf-8"))
    assert record["encoding"]["inputs"][0]["centre"] == NOW + 30
    assert record["encoding"]["target_centre"] == NOW * 10**9 + 150
    asked = ["predict", tmp_path / "run", data, "--out", tmp_path / "p.csv", "--samples", 50]
    assert run(*asked, "--plot", tmp_path / "p.png").exit_code == 0
    for k, row in enumerate(table_of(tmp_path / "p.csv")):
        mean, lower, upper = (Fraction(row[name]) - NOW * 10**9 for name in ("mean", "lower", "upper"))
        assert abs(mean - 5 * k) < 300  # of a number with nineteen digits
        assert lower < mean < upper
        assert 0.5 < float(upper - lower) / (2 * 1.96 * float(row["std"])) < 2  # only the interval is calibrated
        assert row["beyond"] == ""
    assert run("resume", tmp_path / "run", "--steps", 201, "--quiet").exit_code == 0


def test_values_that_single_precision_takes_for_zero_are_refused_for_that(tmp_path: Path) -> None:
    with pytest.raises(pd.RangeError, match=r"table.csv, column 't': its values are too small.*change the unit"):
        read_table(as_csv(tmp_path, {"t": [1e-50 * k for k in range(30)], "y": range(30)}))


def test_values_in_far_apart_heaps_are_refused(tmp_path: Path) -> None:
    heaps = [10**k + j for k in range(9, 15) for j in range(5)]
    with pytest.raises(pd.RangeError, match=r"table.csv, column 't': its values lie so far apart.*take logarithms"):
        read_table(as_csv(tmp_path, {"t": heaps, "y": range(30)}))


def test_one_stray_value_does_not_hide_the_others(tmp_path: Path) -> None:
    data = read_table(as_csv(tmp_path, {"t": [0] + [NOW + k for k in range(59)], "y": range(60)}), held_back=0.0)
    assert len(data.train[0].unique()) == 60
    assert torch.isfinite(data.train[0]).all()


def test_predictions_of_ordinary_targets_have_seven_digits(tmp_path: Path) -> None:
    data = as_csv(tmp_path, {"x": range(12), "y": [k * 0.1 for k in range(12)]})
    assert run("fit", data, "--out", tmp_path / "run", *FEW).exit_code == 0
    assert run("predict", tmp_path / "run", data, "--out", tmp_path / "p.csv", "--samples", 5).exit_code == 0
    assert all(len(row["mean"].lstrip("-0.")) <= 8 for row in table_of(tmp_path / "p.csv"))
