"""One table in all formats: the same cells, the same encoding, the same inputs, bit for bit."""

import datetime
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from typer.testing import CliRunner

import pyro_dropout as pd
from pyro_dropout.cli.main import app
from pyro_dropout.tables.files import read_file, read_pieces
from pyro_dropout.tables.frame import table_of
from pyro_dropout.tables.reading import read_input_pieces, read_table
from pyro_dropout.tables.table import Table
from tests.cli.command import FEW, run, written
from tests.cli.command import table_of as predictions_in

ROWS = 60


def houses() -> pandas.DataFrame:
    """A table with all that an ordinary one has."""
    drawn = np.random.default_rng(0)
    start = datetime.datetime(2021, 3, 1)
    return pandas.DataFrame(
        {
            "id": [7919 * k % 1009 for k in range(ROWS)],
            "area": [None if k % 7 == 0 else round(float(drawn.uniform(30, 200)), 2) for k in range(ROWS)],
            "short": np.array([k % 13 * 0.1 for k in range(ROWS)], np.float32),
            "rooms": pandas.array([None if k % 11 == 0 else k % 5 for k in range(ROWS)], "Int64"),
            "town": pandas.Categorical([None if k % 9 == 0 else ("Köln", "Ulm", "a, b")[k % 3] for k in range(ROWS)]),
            "pool": [k % 3 == 0 for k in range(ROWS)],
            "sold": [pandas.NaT if k == 5 else start + datetime.timedelta(days=20 * k) for k in range(ROWS)],
            "remark": [f"no {k}" for k in range(ROWS)],
            "price": [100_000 + 1_000 * (k * k % 37) for k in range(ROWS)],
        },
        index=[f"row {k}" for k in range(ROWS)],
    )


def as_csv(frame: pandas.DataFrame, folder: Path) -> Path:
    frame.to_csv(folder / "houses.csv", index=False)
    return folder / "houses.csv"


def as_parquet(frame: pandas.DataFrame, folder: Path) -> Path:
    frame.to_parquet(folder / "houses.parquet", index=False)
    return folder / "houses.parquet"


def as_json(orient: str, lines: bool = False) -> Callable[[pandas.DataFrame, Path], Path]:
    def write(frame: pandas.DataFrame, folder: Path) -> Path:
        path = folder / ("houses.jsonl" if lines else "houses.json")
        frame.to_json(path, orient=orient, lines=lines, date_format="iso", double_precision=15)
        return path

    return write


def as_lists(frame: pandas.DataFrame, folder: Path) -> Path:
    found = json.loads(frame.to_json(orient="columns", date_format="iso", double_precision=15))
    return written(folder, json.dumps({name: list(each.values()) for name, each in found.items()}), "houses.json")


def as_excel(frame: pandas.DataFrame, folder: Path) -> Path:
    pytest.importorskip("openpyxl")
    frame.to_excel(folder / "houses.xlsx", index=False)
    return folder / "houses.xlsx"


def as_frame(frame: pandas.DataFrame, folder: Path) -> Table:
    return table_of(frame)


FORMATS: dict[str, Callable[[pandas.DataFrame, Path], Any]] = {
    "parquet": as_parquet,
    "records": as_json("records"),
    "columns": as_json("columns"),
    "lists": as_lists,
    "lines": as_json("records", lines=True),
    "excel": as_excel,
    "frame": as_frame,
}


@pytest.mark.parametrize("name", FORMATS)
def test_all_formats_say_the_same(tmp_path: Path, name: str) -> None:
    frame = houses()
    one = read_table(as_csv(frame, tmp_path), target="price", seed=1)
    source = FORMATS[name](frame, tmp_path)
    other = read_table(source, target="price", seed=1)
    assert one.encoding is not None
    assert one.encoding.left_out == ("id", "remark")
    assert [column.name for column in one.encoding.inputs] == ["area", "short", "rooms", "town", "pool", "sold"]
    assert other.encoding == one.encoding
    assert other.note.partition(":")[2] == one.note.partition(":")[2]
    for mine, theirs in zip((*one.train, *one.test), (*other.train, *other.test), strict=True):
        assert torch.equal(mine, theirs)
    ((_, x),) = read_input_pieces(source, one.encoding, None)
    ((_, y),) = read_input_pieces(tmp_path / "houses.csv", one.encoding, None)
    assert torch.equal(x, y)


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "frame"])
def test_pieces_are_the_whole(tmp_path: Path, name: str) -> None:
    path = FORMATS[name](houses(), tmp_path)
    whole, pieces = read_file(path), list(read_pieces(path, 25))
    assert [len(piece) for piece in pieces] == [25, 25, 10]
    assert [row for piece in pieces for row in piece.rows] == whole.rows
    for column, cells in whole.columns.items():
        assert [cell for piece in pieces for cell in piece.columns[column]] == cells


# --- data frames ------------------------------------------------------------------------------------------------------


def test_a_data_frame_has_the_cells_of_its_file() -> None:
    zone = datetime.timezone(datetime.timedelta(hours=2))
    frame = pandas.DataFrame(
        {
            "mixed": [" oak ", 1, None],
            "moment": pandas.to_datetime(["2024-01-31 12:00", "2024-02-01 00:00", None]).tz_localize(zone),
            "flag": pandas.array([True, None, False], "boolean"),
            3: pandas.array(["n/a", "x", "y"], "string"),
            "span": pandas.to_timedelta([1, 2, 3], "D"),
            "list": [[1], [2], [3]],
        },
        index=[7, 7, 7],
    )
    table = table_of(frame)
    assert table.columns == {
        "mixed": ["oak", "1", None],
        "moment": ["2024-01-31 10:00:00+00:00", "2024-01-31 22:00:00+00:00", None],
        "flag": ["true", None, "false"],
        "3": [None, "x", "y"],
    }
    assert table.unread == {"span": "Timedelta", "list": "list"}
    assert table.rows == [0, 1, 2]


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        ([[1, 2], [3, 4]], "a data frame with named columns is needed; got list"),
        (np.zeros((3, 2)), "a data frame with named columns is needed; got ndarray"),
        (pandas.DataFrame([[1, 2]], columns=["a", "a "]), "two columns called 'a'"),
        (pandas.DataFrame({"a": [], "b": []}), "the table has no rows"),
        (
            pandas.DataFrame({"a": [1], "when": pandas.to_datetime(["2024-01-01 00:00:00.000000001"])}),
            "the table, row 0, column 'when': the date is finer than a microsecond",
        ),
    ],
)
def test_what_is_no_data_frame_is_refused(frame: Any, message: str) -> None:
    with pytest.raises(pd.PyroDropoutError, match=message):
        table_of(frame)


@pytest.mark.parametrize(("price", "kilometres"), [("20999.50", 202211.0), ("20999", None)])
def test_a_frame_is_read_as_its_file_is(tmp_path: Path, price: str, kilometres: float | None) -> None:
    """Its numbers have decimal points, which tell what 202,211 km means; without any, both files and frames ask."""
    path = tmp_path / "cars.csv"
    rows = [f'"{k},211 km",{price}{k}' for k in range(202, 182, -1)]
    path.write_text("\n".join(["run,price", *rows]))
    pandas.read_csv(path).to_parquet(tmp_path / "cars.parquet")
    for data in (path, tmp_path / "cars.parquet", table_of(pandas.read_csv(path))):
        if kilometres is None:
            with pytest.raises(pd.RangeError, match="decimal='point' or decimal='comma'"):
                read_table(data)
        else:
            assert read_table(data).rows[0].max() == kilometres


def test_short_floats_beside_huge_ones_are_the_numbers_that_were_written() -> None:
    frame = pandas.DataFrame({"x": np.array([0.1, 1e20], np.float32), "y": [1, 2]})
    assert table_of(frame).columns["x"] == ["0.1", "1e+20"]


# --- JSON -------------------------------------------------------------------------------------------------------------

BAD_JSON = {
    "half a file": ('[{"a": 1, "b": 2}, {"a"', "t.json is not valid JSON"),
    "lines": ('{"a": 1, "b": 2}\n{"a": 3, "b": 4}\n', "Extra data.*let its name end in .jsonl"),
    "a name twice": ('[{"a": 1, "a": 2, "b": 3}]', "'a' occurs twice in an object"),
    "a number": ("7", "t.json is not a table"),
    "no records": ("[1, 2]", "t.json, row 1 is not a record"),
    "no lists": ('{"a": 1, "b": 2}', "column 'a': it is not a list"),
    "columns of two lengths": ('{"a": [1, 2], "b": [3]}', "the column 'b' has other rows than the column 'a'"),
    "nothing": ("[]", "at least two columns"),
    "deep": ("[" * 100_000, "not valid JSON"),
    "a long number": ('[{"a": ' + "9" * 5000 + ', "b": 1}]', "not valid JSON"),
}


@pytest.mark.parametrize("case", BAD_JSON)
def test_json_that_is_no_table_is_refused(tmp_path: Path, case: str) -> None:
    text, message = BAD_JSON[case]
    with pytest.raises(pd.PyroDropoutError, match=message):
        read_file(written(tmp_path, text, "t.json"))


def test_records_may_lack_a_name_and_hold_what_cannot_be_read(tmp_path: Path) -> None:
    lines = ['{"a": 1, "b": "x"}', "", '{"b": null, "c": [1]}', '{"a": NaN, "b": 9007199254740993}']
    table = read_file(written(tmp_path, "\ufeff" + "\n".join(lines), "t.jsonl"))
    assert table.columns == {"a": [1, None, None], "b": ["x", None, "9007199254740993"]}
    assert table.rows == [1, 3, 4]
    assert table.unread == {"c": "list"}
    with pytest.raises(pd.PyroDropoutError, match=r"t.jsonl, row 2 is not valid JSON"):
        read_file(written(tmp_path, '{"a": 1, "b": 2}\n{"a"\n', "t.jsonl"))


# --- Excel ------------------------------------------------------------------------------------------------------------


def test_without_openpyxl_excel_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openpyxl", None)
    with pytest.raises(pd.PyroDropoutError, match=r't.xlsx: .*openpyxl; pip install "pyro-dropout\[excel\]"'):
        read_file(written(tmp_path, b"PK\x03\x04", "t.xlsx"))


def test_excel_reads_the_first_sheet_that_is_not_empty(tmp_path: Path) -> None:
    openpyxl = pytest.importorskip("openpyxl")
    book = openpyxl.Workbook()
    sheet = book.create_sheet("Data")
    sheet.append([None, None, None])
    sheet.append(["a", 2020, "when"])
    sheet.append([1, "oak ", datetime.datetime(2024, 1, 31)])
    sheet.append([2.5, "NA", None])
    book.create_sheet("Notes").append(["hello"])
    book.save(tmp_path / "t.xlsx")
    table = read_file(tmp_path / "t.xlsx")
    assert table.columns == {"a": [1, 2.5], "2020": ["oak", None], "when": ["2024-01-31", None]}
    assert table.rows == [3, 4]
    assert table.notes == ("sheet 'Data', the first of 2",)
    sheet["A5"] = "=A3+A4"
    book.save(tmp_path / "t.xlsx")
    with pytest.raises(pd.PyroDropoutError, match=r"the formula in cell A5 has no stored value"):
        read_file(tmp_path / "t.xlsx")
    sheet["A5"] = None
    sheet.merge_cells("A3:A4")
    book.save(tmp_path / "t.xlsx")
    with pytest.raises(pd.PyroDropoutError, match=r"the cells A3:A4 are merged"):
        read_file(tmp_path / "t.xlsx")
    with pytest.raises(pd.PyroDropoutError, match=r"t.xlsx is not a valid Excel file"):
        read_file(written(tmp_path, b"PK\x03\x04 and so on", "t.xlsx"))


# --- standard input ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["csv", "parquet", "records", "lines", "excel"])
def test_standard_input_is_a_table_of_any_format(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = (FORMATS | {"csv": as_csv})[name](houses(), tmp_path)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(path.read_bytes())))
    found = read_file("-")
    assert found.file == "standard input"
    assert found.columns == read_file(path).columns


def test_the_commands_read_standard_input(tmp_path: Path) -> None:
    text = houses().to_csv(index=False)
    options = ["--target", "price", "--guide", "dropout", *FEW]
    done = CliRunner().invoke(app, ["fit", "-", "--out", str(tmp_path / "run"), *options], input=text)
    assert done.exit_code == 0, done.stderr
    assert "standard input: 48 training rows and 12 test rows" in done.stdout
    asked = ["predict", str(tmp_path / "run"), "-", "--out", str(tmp_path / "p.csv"), "--samples", "5"]
    assert CliRunner().invoke(app, asked, input=text).exit_code == 0
    assert len(predictions_in(tmp_path / "p.csv")) == ROWS
    data = written(tmp_path, text, "kept.csv")
    assert run("resume", tmp_path / "run", "--data", data, "--steps", 4, "--quiet").exit_code == 0
    done = CliRunner().invoke(app, ["fit", "-", "--out", str(tmp_path / "none"), *options], input="")
    assert done.exit_code == 2
    assert "standard input is empty" in done.stderr
