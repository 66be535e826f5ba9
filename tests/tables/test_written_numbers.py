"""Numbers, dates and truth values as people and programs write them: read as what they are, or refused by name."""

import datetime
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas
import pyarrow
import pyarrow.parquet
import pytest
import torch

import pyro_dropout as pd
from pyro_dropout.tables.encoding import Encoding
from pyro_dropout.tables.files import read_file
from pyro_dropout.tables.reading import read_inputs
from pyro_dropout.tables.settings import built
from pyro_dropout.tables.table import table_of
from tests.cli.command import FEW, as_csv, read_table, run, succeeded, written

# (cells, the numbers that they are, what is said about the column)
WRITTEN: dict[str, tuple[Sequence[str], Sequence[float], str]] = {
    "plain": (["1.5", "-2", "3e2"], [1.5, -2, 300], ""),
    "decimal comma": (["1,5", "-2", "0,125"], [1.5, -2, 0.125], "decimal comma"),
    "thousands": (["1,234,567", "1,200", "950"], [1234567, 1200, 950], "thousands comma"),
    "thousands and a point": (["1,200.50", "12"], [1200.5, 12], "thousands comma"),
    "thousands points": (["1.234.567", "1.200", "950"], [1234567, 1200, 950], "decimal comma, thousands point"),
    "both the other way": (["1.200,50", "12"], [1200.5, 12], "decimal comma, thousands point"),
    "spaces": (["1 200", "1 234 567", "9"], [1200, 1234567, 9], "thousands space"),
    "apostrophes": (["1'200.5", "9"], [1200.5, 9], "thousands apostrophe"),
    "percent": (["12%", "3.5 %", "-1%"], [12, 3.5, -1], "12% is 12"),
    "dollars": (["$30", "-$4.50", "$-5"], [30, -4.5, -5], "$"),
    "euros": (["30 €", "4,50 €"], [30, 4.5], "decimal comma, €"),
    "a proper minus": (["−3", "4"], [-3, 4], ""),
    "dates": (["2024-01-01", "2024-03-01", "1969-12-31"], [19723, 19783, -1], "dates, in days"),
    "times": (["2024-01-01 06:00", "2024-01-01T12:00:00.5"], [19723.25, 19723.5 + 0.5 / 86400], "dates, in days"),
    "times with a zone": (["2024-01-01T06:00Z", "2024-01-01T06:00+06:00"], [19723.25, 19723], "dates, in days, UTC"),
}  # fmt: skip


def column(cells: Sequence[object], **more: Sequence[object]) -> dict[str, list[object]]:
    """Columns of twenty-four rows: these cells over and over, and a plain target."""
    columns = {"x": cells, **more, "y": [3 * k for k in range(24)]}
    return {name: [each[k % len(each)] for k in range(24)] for name, each in columns.items()}


def as_parquet(folder: Path, columns: dict[str, Any], name: str = "table.parquet") -> Path:
    pyarrow.parquet.write_table(pyarrow.table(columns), folder / name)
    return folder / name


def learned(path: Path, **options: Any) -> Encoding:
    encoding = read_table(path, held_back=0.0, **options).encoding
    assert encoding is not None
    return encoding


def inputs(path: Path, encoding: Encoding) -> torch.Tensor:
    return read_inputs(path, encoding)[1]


@pytest.mark.parametrize("name", WRITTEN)
def test_numbers_are_read_as_numbers_and_told(tmp_path: Path, name: str) -> None:
    cells, numbers, told = WRITTEN[name]
    path = as_csv(tmp_path, column(cells))
    data = read_table(path, target="y", held_back=0.0)
    encoding = data.encoding
    assert encoding is not None
    assert encoding.features[0] == "x"
    centre = encoding.inputs[0].centre
    exact = [numbers[k % len(numbers)] - centre for k in range(24)]
    assert inputs(path, encoding)[:, 0].tolist() == pytest.approx(exact, rel=1e-6)
    assert (f"read as numbers: x ({told})" in data.note) == bool(told)
    # the rule is the run's, and the same text in a Parquet file is read alike
    again = built(Encoding, json.loads(json.dumps(asdict(encoding))))
    other = as_parquet(tmp_path, column(cells))
    assert torch.equal(inputs(other, again), inputs(path, encoding))
    assert learned(other, target="y") == encoding


def test_a_date_is_no_target(tmp_path: Path) -> None:
    path = as_csv(tmp_path, column([1, 2], when=["2024-01-01", "2024-01-02"]))
    with pytest.raises(
        pd.errors.RangeError, match=r"column 'when': a date cannot be the target.*--task classification"
    ):
        read_table(path, target="when")
    assert read_table(path, target="when", task="classification").classes == ("2024-01-01", "2024-01-02")


# --- two readings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cells", [["1,200", "3,450"], ["1,200", "950"], ["-1,200", "12"], ["$1,200", "$9"], ["1,200", "3.450"]]
)
def test_a_comma_that_may_mean_either_is_asked_for(tmp_path: Path, cells: list[str]) -> None:
    path = as_csv(tmp_path, column(cells))
    with pytest.raises(pd.errors.RangeError) as caught:
        read_table(path, target="y")
    said = str(caught.value)
    for word in (
        "table.csv, row 2, column 'x'",
        "1200",
        "1.2",
        "--decimal point",
        "--decimal comma",
        "--categorical x",
    ):
        assert word in said
    large, small = (learned(path, target="y", decimal=mark).inputs[0] for mark in ("point", "comma"))
    assert abs(large.notation.value(cells[0]) or 0) == 1200
    assert abs(small.notation.value(cells[0]) or 0) == 1.2
    assert learned(path, target="y", categorical=["x"]).inputs[0].categories is not None


def test_a_point_means_what_it_always_meant_unless_the_table_has_commas(tmp_path: Path) -> None:
    doubtful = column(["1.200", "3.450"], z=[1, 2])
    assert learned(as_csv(tmp_path, doubtful), target="y").inputs[0].notation.value("1.200") == 1.2
    commas = as_csv(tmp_path, column(["1.200", "3.450"], z=["1,5", "2,5"]))
    with pytest.raises(
        pd.errors.RangeError, match=r"row 2, column 'x': '1.200' may mean 1.2 or 1200.*--decimal comma for 1200"
    ):
        read_table(commas, target="y")
    assert learned(commas, target="y", decimal="comma").inputs[0].notation.value("1.200") == 1200
    assert learned(commas, target="y", decimal="point").inputs[0].notation.value("1.200") == 1.2
    clear = column(["1.200", "3.450"], z=["1,5", "2,5"]) | {"x": ["1.200", "3.45"] * 12}
    assert learned(as_csv(tmp_path, clear), target="y").inputs[0].notation.value("1.200") == 1.2


def test_a_point_in_a_table_with_semicolons_needs_a_witness(tmp_path: Path) -> None:
    rows = [f"{k}.200;{k % 7};{k}" for k in range(1, 25)]
    lonely = written(tmp_path, "\n".join(["x;z;y", *rows]))
    with pytest.raises(pd.errors.RangeError, match=r"row 2, column 'x': '1.200' may mean 1.2 or 1200"):
        read_table(lonely)
    witness = written(tmp_path, "\n".join(["x;z;y", *(f"{row}.5" for row in rows)]))
    assert read_table(witness, held_back=0.0).train[0][:, 0].max() == pytest.approx(24.2)


def test_the_answer_travels_with_the_run(tmp_path: Path) -> None:
    path = as_csv(tmp_path, column(["1,200", "3,450"]))
    refused = run("fit", path, "--target", "y", "--out", tmp_path / "run", *FEW)
    assert refused.exit_code == 2
    assert "--decimal point for 1200" in refused.stderr
    done = succeeded(
        "fit", path, "--target", "y", "--decimal", "comma", "--guide", "dropout", "--out", tmp_path / "run", *FEW
    )
    assert "read as numbers: x (decimal comma)" in done.stdout
    record = json.loads((tmp_path / "run" / "run.json").read_text("utf-8"))
    assert record["data"]["decimal"] == "comma"
    assert record["encoding"]["inputs"][0]["notation"]["decimal"] == ","
    asked = ["predict", tmp_path / "run", written(tmp_path, 'x,y\n"2,300",\n', "new.csv"), "--out", tmp_path / "p.csv"]
    assert run(*asked).exit_code == 0
    asked[2] = written(tmp_path, "x,y\n2.300,\n", "new.csv")
    assert "new.csv, row 2, column 'x': '2.300' is not a number such as 1234,5;" in run(*asked).stderr
    assert run("resume", tmp_path / "run", "--quiet").exit_code == 0


# --- what does not fit ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cells", "row", "message"),
    [
        (["12%", "13%", "14"], 4, "'14' is not a number such as 1234.5%"),
        (["$3", "$4", "€5"], 4, "'€5' is not a number such as \\$1234.5"),
        (["3", "4", "5 €"], 4, "'5 €' is not a number such as 1234.5"),
        (["1,5", "2,5", "3.5"], 4, "'3.5' is not a number such as 1234,5"),
        (["1,5", "2,5", "unknown"], 4, "'unknown' is not a number such as 1234,5, and 16 other"),
        (["12%", "13%", "-"], 4, "'-' is not a number"),
        (["2024-01-01", "2024-02-30", "2024-01-02"], 3, "'2024-02-30' is not a date such as 2024-01-31"),
        (["2024-01-01", "soon"], 3, "'soon' is not a date"),
        (["2024-01-01T00:00Z", "2024-01-01T00:00"], 3, "'2024-01-01T00:00' is not a date such as 2024-01-31T12:00Z"),
        (["true", "false", "2"], 2, "'true' is not a number"),
    ],
)
def test_columns_that_do_not_agree_are_refused(tmp_path: Path, cells: list[str], row: int, message: str) -> None:
    with pytest.raises(
        pd.errors.RangeError, match=rf"table.csv, row {row}, column 'z': {message}.*--task classification"
    ):
        read_table(as_csv(tmp_path, column([1, 2], z=cells)), target="z")


@pytest.mark.parametrize(
    "cells",
    [
        ["30 kg", "41 lb", "5 kg"],
        ["12a", "13b", "14c"],
        ["1st", "2nd", "3rd"],
        ["oak", "elm"],
        ["a1", "a2", "a3"],
        ["2WD", "4WD"],
        ["Q1", "Q2"],
        ["01", "02", "10"],
    ],
)
def test_names_with_digits_are_names_and_codes_keep_their_zeros(tmp_path: Path, cells: list[str]) -> None:
    assert learned(as_csv(tmp_path, column(cells)), target="y").inputs[0].categories == tuple(sorted(cells))


@pytest.mark.parametrize("cells", [["30 kg", "41 kg", "5 kg"], ["30°C", "4°C", "5.5°C"], ["1.5k", "2M", "3k"]])
def test_numbers_with_units_are_left_out_by_name_or_refused(tmp_path: Path, cells: list[str]) -> None:
    path = as_csv(tmp_path, column(cells, z=[1, 2]))
    assert f"left out: x ('{cells[0]}' is a number with a unit; write the number alone)" in read_table(path).note
    with pytest.raises(pd.errors.RangeError, match=r"row 2, column 'x': .* is a number with a unit; write the number"):
        read_table(path, target="x")


@pytest.mark.parametrize(
    ("trained", "new", "example"),
    [
        ("12%", "12", "1234.5%"),
        ("12%", 0.12, "1234.5%"),
        ("$31", "30 €", r"\$1234.5"),
        ("1,5", "1.5", "1234,5"),
        ("1.5", "1,5", "1234.5"),
        ("1.5", "1,200", "1234.5"),
        ("1,200.5", "1.200,5", r"1,234.5"),
        ("2024-01-01", "01/01/2024", "2024-01-31"),
        ("2024-01-01", 19723, "2024-01-31"),
        ("1.5", datetime.datetime(2024, 1, 1), "1234.5"),
        ("1.5", True, "1234.5"),
    ],
)
def test_a_new_value_must_be_written_as_the_old_ones(tmp_path: Path, trained: str, new: object, example: str) -> None:
    encoding = learned(as_csv(tmp_path, column([trained, trained.replace("1", "2")])), target="y")
    path = as_parquet(tmp_path, {"x": [new], "y": [1]})
    message = rf"table.parquet, row 1, column 'x': .* is not a (number|date) such as {example}; write it like that"
    with pytest.raises(pd.errors.RangeError, match=message):
        inputs(path, encoding)


@pytest.mark.parametrize(
    ("trained", "number"), [("12,5 €", 12.5), ("1.200,50 €", 1200.5), ("1.234,50", 1234.5), ("$31", 31), ("1,5", 1.5)]
)
def test_a_number_of_a_data_frame_is_that_number(tmp_path: Path, trained: str, number: float) -> None:
    """Marks and currency signs are of texts; only of percent may a program hold a hundredth."""
    path = as_csv(tmp_path, column([trained, trained.replace("1", "2")]))
    encoding = learned(path, target="y", decimal="comma" if "," in trained else None)
    frame = pandas.DataFrame({"x": [number, number + 1]})
    assert encoding.inputs[0].numbers(table_of(frame)).tolist() == [number, number + 1]
    assert encoding.inputs[0].numbers(read_file(path))[0] == number


# --- one category, however it is written ------------------------------------------------------------------------------


def test_truth_has_two_values(tmp_path: Path) -> None:
    path = as_csv(tmp_path, column(["True", "true", "TRUE", "1", "1.0", "False", "0", "false"]))
    encoding = learned(path, target="y")
    assert encoding.inputs[0].categories == ("false", "true")
    truths = [True] * 5 + [False] * 3
    assert inputs(path, encoding)[:8, 1].tolist() == [float(truth) for truth in truths]
    for cells in (truths * 3, [str(truth) for truth in truths] * 3, [int(truth) for truth in truths] * 3):
        other = as_parquet(tmp_path, {"x": cells, "y": range(24)})
        assert torch.equal(inputs(other, encoding), inputs(path, encoding))


DAY = datetime.date(2024, 1, 31)


def test_a_zone_is_part_of_a_date(tmp_path: Path) -> None:
    encoding = learned(as_csv(tmp_path, column(["2024-01-31T00:00Z", "2024-02-01T00:00Z"])), target="y")
    moment = datetime.datetime(2024, 1, 31, tzinfo=datetime.UTC)
    zoned = as_parquet(tmp_path, {"x": pyarrow.array([moment], pyarrow.timestamp("us", "Europe/Berlin")), "y": [1]})
    assert inputs(zoned, encoding).item() == 19753 - float(encoding.inputs[0].centre)
    with pytest.raises(pd.errors.RangeError, match=r"'2024-01-31' is not a date such as 2024-01-31T12:00Z"):
        inputs(as_parquet(tmp_path, {"x": [DAY], "y": [1]}), encoding)


def test_whole_numbers_are_one_category(tmp_path: Path) -> None:
    path = as_csv(tmp_path, column(["1", "1.0", "2", "007"]))
    encoding = learned(path, target="y", categorical=["x"])
    assert encoding.inputs[0].categories == ("007", "1", "2")
    other = as_parquet(tmp_path, {"x": pyarrow.array([1, 2], pyarrow.float32()), "y": [1, 2]})
    assert inputs(other, encoding).tolist() == [[0, 1, 0], [0, 0, 1]]
    versions = learned(as_csv(tmp_path, column(["1.1", "1.10"])), target="y", categorical=["x"])
    assert versions.inputs[0].categories == ("1.1", "1.10")
