"""One table in all formats: the same cells, the same encoding, the same inputs, bit for bit."""

import datetime
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pyro_dropout as pd
from pyro_dropout.tables.files import read_file
from pyro_dropout.tables.notation import NUMBER, is_number
from pyro_dropout.tables.reading import read_inputs
from pyro_dropout.tables.table import Table, cells_of, table_of
from tests.cli.command import cells_in, read_table, written

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


def as_excel(frame: pandas.DataFrame, folder: Path) -> Path:
    frame.assign(short=short(frame)).to_excel(folder / "houses.xlsx", index=False)
    return folder / "houses.xlsx"


def short(frame: pandas.DataFrame) -> Any:
    """The numbers of single precision as a CSV file has them; pandas writes more digits to Excel."""
    return frame["short"].astype(str).astype(float)


def as_frame(frame: pandas.DataFrame, folder: Path) -> Table:
    return table_of(frame)


FORMATS: dict[str, Callable[[pandas.DataFrame, Path], Any]] = {
    "parquet": as_parquet,
    "frame": as_frame,
    "excel": as_excel,
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
    x, y = (read_inputs(each, one.encoding)[1] for each in (source, tmp_path / "houses.csv"))
    assert torch.equal(x, y)


# --- data frames ------------------------------------------------------------------------------------------------------


def test_a_data_frame_has_the_cells_of_its_file() -> None:
    zone = datetime.timezone(datetime.timedelta(hours=2))
    frame = pandas.DataFrame(
        {
            "moment": pandas.to_datetime(["2024-01-31 12:00", "2024-02-01 00:00", None]).tz_localize(zone),
            "flag": pandas.array([True, None, False], "boolean"),
            3: pandas.array(["n/a", "x", "y"], "string"),
            "span": pandas.to_timedelta([1, 2, 3], "D"),
            "list": [[1], [2], [3]],
            "short": np.array([0.1, 2, np.nan], np.float32),
            "large": pandas.array([2**62 + 1, None, 3], "Int64"),
            "arrow": pandas.array([1, None, 3], "int64[pyarrow]"),
            "sparse": pandas.arrays.SparseArray([0.0, 0.0, 2.0]),
        },
        index=[7, 7, 7],
    )
    table = table_of(frame)
    assert cells_in(table) == {
        "moment": ["2024-01-31 10:00:00+00:00", "2024-01-31 22:00:00+00:00", None],
        "flag": ["true", None, "false"],
        "3": [None, "x", "y"],
        "short": [0.1, 2.0, None],
        "large": [str(2**62 + 1), None, "3"],
        "arrow": [1.0, None, 3.0],
        "sparse": [0.0, 0.0, 2.0],
    }
    assert table.unread == {"span": "Timedelta", "list": "list"}
    assert table.rows.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        ([[1, 2], [3, 4]], "a data frame with named columns is needed; got list"),
        (np.zeros((3, 2)), "a data frame with named columns is needed; got ndarray"),
        (pandas.DataFrame([[1, 2]], columns=["a", "a "]), "two columns called 'a'"),
        (pandas.DataFrame({"a": [], "b": []}), "the table has no rows"),
        (
            pandas.DataFrame({"a": ["\ud800"], "b": [1]}, dtype=object),
            "the table, column 'a': a text holds half of a character",
        ),
    ],
)
def test_what_is_no_data_frame_is_refused(frame: Any, message: str) -> None:
    with pytest.raises(pd.errors.PyroDropoutError, match=message):
        table_of(frame)


# --- other files ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.xls", b"{}", "is in a format that is not read"),
        ("t.xlsx", b"PK\x03\x04 and so on", "t.xlsx is not a valid Excel file"),
        ("t", b"PK\x03\x04 and so on", "t is not a valid Excel file"),
        ("t.json", b'[{"a": 1, "b": 2}]', "t.json is in a format that is not read; save it as CSV"),
    ],
)
def test_files_that_are_no_tables_are_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    with pytest.raises(pd.errors.PyroDropoutError, match=message):
        read_file(written(tmp_path, content, name))


def test_fractions_are_numbers() -> None:
    assert cells_of([Fraction(1, 4), None, Fraction(-3)]).dropna().tolist() == ["0.25", "-3"]


def test_excel_has_the_cells_of_a_csv_file(tmp_path: Path) -> None:
    frame = pandas.DataFrame({"code": ["007", "n/a", " 1,5"], "large": [2**53 + 1, None, 1]}, dtype=object)
    wanted = {"code": ["007", None, "1,5"], "large": [str(2**53 + 1), None, "1"]}
    assert cells_in(table_of(frame)) == wanted
    with pandas.ExcelWriter(tmp_path / "t.xlsx") as book:
        frame.assign(large=["x", None, 1]).to_excel(book, index=False, startrow=2)
    sheet = read_file(tmp_path / "t.xlsx")
    assert cells_in(sheet) == wanted | {"large": ["x", None, "1"]}
    assert sheet.rows.tolist() == [4, 5, 6]
    frame.to_excel(tmp_path / "t.xlsx", index=False, header=["1.5", "2.5"])
    with pytest.raises(pd.errors.ShapeError, match=r"t.xlsx has no header"):
        read_file(tmp_path / "t.xlsx")


def test_without_openpyxl_excel_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = as_excel(houses(), tmp_path)
    monkeypatch.setitem(sys.modules, "openpyxl", None)
    with pytest.raises(pd.errors.PyroDropoutError, match=r'houses.xlsx: .*pip install "pyro-dropout\[excel\]"'):
        read_file(path)


def test_without_pyarrow_a_csv_file_has_the_same_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, "a,b\n1.5, oak\n,NA\n-3e2,elm\n")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pandas.option_context("mode.string_storage", "python"):
        assert cells_in(read_file(path)) == {"a": ["1.5", None, "-3e2"], "b": ["oak", None, "elm"]}


DECIMALS = st.from_regex(r"\A[-+]?[0-9]{0,21}\.?[0-9]{0,23}([eE][-+]?[0-9]{1,3})?\Z")


@given(st.lists(DECIMALS.filter(is_number), min_size=1, max_size=6))
def test_plain_numbers_are_those_of_python_to_the_bit(cells: list[str]) -> None:
    found = NUMBER.values(cells_of(cells))
    assert found.tobytes() == np.array([float(cell) for cell in cells]).tobytes()
