"""One table in all formats: the same cells, the same encoding, the same inputs, bit for bit."""

import datetime
import io
import json
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import pyro_dropout as pd
from pyro_dropout.cli.main import app
from pyro_dropout.tables import cells as cells_module
from pyro_dropout.tables.cells import Cells, as_number
from pyro_dropout.tables.files import read_file, read_pieces
from pyro_dropout.tables.reading import read_input_pieces, read_table
from pyro_dropout.tables.table import Table, table_of
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


def test_pieces_are_the_whole(tmp_path: Path) -> None:
    path = as_parquet(houses(), tmp_path)
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
    with pytest.raises(pd.errors.PyroDropoutError, match=message):
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
            with pytest.raises(pd.errors.RangeError, match="decimal='point' or decimal='comma'"):
                read_table(data)
        else:
            assert read_table(data).rows[0].max() == kilometres


# --- JSON -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"a": 1, "b": 2}, {"a"', "t.json is not a JSON table"),
        ('{"a": 1, "b": 2}\n{"a": 3, "b": 4}\n', "let its name end in .jsonl"),
        ("7", "t.json is not a"),
        ("[1, 2]", "t.json is not a table"),
        ('{"a": 1, "b": 2}', "t.json is not a"),
        ('{"a": [1, 2], "b": [3]}', "t.json is not a JSON table.*same length"),
        ("[]", "t.json"),
        ('[{"a": 1, "a": 2, "b": 3}]', "a name occurs twice"),
        ("[" * 100_000, "t.json is not a JSON table"),
    ],
)
def test_json_that_is_no_table_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(pd.errors.PyroDropoutError, match=message):
        read_file(written(tmp_path, text, "t.json"))


def test_records_may_lack_a_name_and_hold_what_cannot_be_read(tmp_path: Path) -> None:
    lines = ['{"a": 1, "b": "x"}', '{"b": null, "c": [1]}', '{"a": 2.5, "b": 9007199254740993}']
    table = read_file(written(tmp_path, "\ufeff" + "\n".join(lines), "t.jsonl"))
    assert table.columns == {"a": [1, None, 2.5], "b": ["x", None, "9007199254740993"]}
    assert table.rows == [1, 2, 3]
    assert table.unread == {"c": "list"}


# --- Excel ------------------------------------------------------------------------------------------------------------


def test_without_openpyxl_excel_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openpyxl", None)
    with pytest.raises(pd.errors.PyroDropoutError, match=r't.xlsx: .*openpyxl; pip install "pyro-dropout\[excel\]"'):
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
    with pytest.raises(pd.errors.PyroDropoutError, match=r"the formula in cell A5 has no stored value"):
        read_file(tmp_path / "t.xlsx")
    sheet["A5"] = None
    sheet.merge_cells("A3:A4")
    book.save(tmp_path / "t.xlsx")
    with pytest.raises(pd.errors.PyroDropoutError, match=r"the cells A3:A4 are merged"):
        read_file(tmp_path / "t.xlsx")
    with pytest.raises(pd.errors.PyroDropoutError, match=r"t.xlsx is not a valid Excel file"):
        read_file(written(tmp_path, b"PK\x03\x04 and so on", "t.xlsx"))


# --- standard input ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["csv", "parquet", "lines"])
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


# --- odd columns, in a file and in a frame ----------------------------------------------------------------------------

# Each column is one of these, over and over.
ODD = {
    "plain": ["1", "-2.5", "3e2", ".5", "7.", "-0", "+4", "1E-3"],
    "digits": ["0.30000000000000004", "123456789.123456789", "4503599627370497.5", "2.2250738585072014e-308", "1e-320"],
    "gaps": ["1", "", "2", "NA", "n/a", "NaN", "<NA>", "null", "None", "?", "3"],
    "blanks": ["1", "-", "2.5", "unknown", "--", "3"],
    "spaces": [" 1", "2 ", "   3", "     4     ", "\u00a05", "6\u2003", "7"],
    "quotes": ['say "hi"', "a,b", "two\nlines", "a"],
    "exponents": ["1e3", "1e-3", "2E+2", "1.5e0"],
    "commas": ["1,5", "2,25", "-0,5", "3"],
    "two readings": ["1,200", "3,400", "12,000"],
    "thousands": ["1,234,567", "12,000.5", "7"],
    "points or thousands": ["1.200", "3.400", "12.000"],
    "three decimals": ["1.200", "0.400", "12.000"],
    "apostrophes": ["1'234.5", "12'000.25"],
    "plus": ["+1", "+2", "3"],
    "hex": ["0x1f", "0xa0", "0x11"],
    "infinite": ["inf", "1", "-Infinity", "2"],
    "too large": ["1e400", "1", "2"],
    "wide digits": ["１２", "٣", "4"],
    "underscores": ["1_000", "2_000", "3"],
    "long": ["9007199254740993", "9007199254740992", "1"],
    "very long": ["9" * 40, "1" + "0" * 70, "12"],
    "clock": ["1700000000", "1700000001", "1700000077"],
    "padded": ["007", "012", "3"],
    "dates": ["2024-01-31", "2023-12-01", "2022-07-15"],
    "moments": ["2024-01-31 10:00", "2023-12-01T11:30", "2020-07-15"],
    "zones": ["2024-01-31T10:00Z", "2023-12-01T11:30+02:00"],
    "some zones": ["2024-01-31T10:00Z", "2023-12-01T11:30"],
    "other dates": ["31.01.2024", "1.2.2024", "15.07.2020"],
    "booleans": ["true", "False", "TRUE", "0", "1.0"],
    "binary": ["0", "1", "0.0"],
    "binary words": ["0", "1", "true"],
    "prices": ["$1,200.50", "$3", "$12.5"],
    "percents": ["12%", "7.5 %", "3 $"],
    "kilograms": ["12 kg", "7 kg", "9 kg", "8 kg"],
    "categories": ["oak", "Elm", "größe", "élan ", "north", "nan", "new"],
    "versions": ["1.1", "1.10", "1.2", "x"],
    "codes": ["A/5 21171", "113803", "PC 17599", "17463"],
    "mixed": ["1", "oak", "2024-01-31", "2"],
    "one misfit": ["1", "2", "3", "4", "5", "6", "7", "8", "9", "l0"],
    "constant": ["1", "1.0"],
    "empty": ["", "NA"],
    "texts": ["x" * 65, "y" * 64, "z"],
}


def outcome(table: Any, new: Any) -> list[Any]:
    """What becomes of a table, and of new rows: all that a person can see, or the error."""
    told: list[Any] = []
    try:
        data = read_table(table, target="y")
        assert data.encoding is not None
        told += [data.note, data.x_name, data.encoding.as_json(), *data.train, *data.test]
        ((rows, x),) = read_input_pieces(new, data.encoding, None)
        told += [rows.notes, x, data.encoding.beyond(x, rows)]
        assert bool(x.isfinite().all())
    except pd.errors.PyroDropoutError as refused:
        told += [type(refused), str(refused)]
    return told


@pytest.mark.parametrize("kind", ODD)
def test_odd_columns_are_the_same_in_a_file_and_in_a_frame(tmp_path: Path, kind: str) -> None:
    cells = (ODD[kind] * 40)[:40]
    y = [f"{random.Random(row).gauss(0, 1):.4f}" for row in range(40)]
    columns = {"x": [str(row % 7 + 0.5) for row in range(40)], "odd": cells, "y": y}
    other = columns | {"odd": [*cells[1:], random.Random(kind).choice(["oak", "1", "-", "2024-01-31"])]}
    for one in (columns, {"odd": columns["x"], "y": cells}):
        files, frames = [], []
        for name, each in (("t.csv", one), ("new.csv", other)):
            frame = pandas.DataFrame(each, dtype=object)
            frame.to_csv(tmp_path / name, index=False)
            files.append(tmp_path / name)
            frames.append(replace(table_of(frame), file=name, rows=read_file(tmp_path / name).rows))
        for mine, theirs in zip(outcome(*files), outcome(*frames), strict=True):
            same = torch.equal(mine, theirs) if isinstance(mine, torch.Tensor) else repr(mine) == repr(theirs)
            assert same, (mine, theirs)


DECIMALS = st.from_regex(r"\A[-+]?[0-9]{0,21}\.?[0-9]{0,23}([eE][-+]?[0-9]{1,3})?\Z")


@given(st.lists(DECIMALS.filter(lambda text: as_number(text) is not None), min_size=1, max_size=6))
def test_plain_numbers_are_those_of_python_to_the_bit(cells: list[str]) -> None:
    found = Cells.of(cells).numbers
    assert np.asarray(found, np.float64).tobytes() == np.array([float(cell) for cell in cells]).tobytes()


def test_without_pyarrow_a_file_has_the_same_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, "a,b\n1.5, oak\n,NA\n-3e2,elm\n")
    wanted, numbers = dict(read_file(path).columns), read_file(path).column("a").numbers
    assert wanted == {"a": ["1.5", None, "-3e2"], "b": ["oak", None, "elm"]}
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setattr(cells_module, "pyarrow", None)
    with pandas.option_context("mode.string_storage", "python"):
        other = read_file(path)
        assert other.columns == wanted
        assert np.array_equal(other.column("a").numbers, numbers, equal_nan=True)
