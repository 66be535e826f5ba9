"""Columns of a file and of a frame: the same cells, the same outcome, and numbers to the bit."""

import random
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pyro_dropout as pd
from pyro_dropout.tables import cell_columns as column_cells
from pyro_dropout.tables.cell_columns import Cells
from pyro_dropout.tables.cells import EXACT, MISSING, as_number
from pyro_dropout.tables.files import read_file, read_pieces
from pyro_dropout.tables.frame import table_of
from pyro_dropout.tables.reading import read_input_pieces, read_table

ROWS = 40
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
    "days or months": ["3/4/2024", "1/2/2024"],
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


def cell_of(text: str) -> str | None:
    return None if text.strip().lower() in MISSING else text.strip()


def outcome(table: Any, new: Any, **options: Any) -> list[Any]:
    """What becomes of a table, and of new rows: all that a person can see, or the error."""
    told: list[Any] = []
    try:
        data = read_table(table, target="y", **options)
        assert data.encoding is not None
        told += [data.note, data.x_name, data.encoding.as_json(), *data.train, *data.test]
        ((rows, x),) = read_input_pieces(new, data.encoding, None)
        told += [rows.notes, x, data.encoding.beyond(x, rows)]
    except pd.PyroDropoutError as refused:
        told += [type(refused), str(refused)]
    return told


def check(columns: dict[str, list[str]], odd: dict[str, list[str]], **options: Any) -> None:
    """A file and a frame of the same texts have the same outcome."""
    with tempfile.TemporaryDirectory() as folder:
        files, frames = [], []
        for name, cells in (("t.csv", columns), ("new.csv", odd)):
            frame = pandas.DataFrame(cells, dtype=object)
            frame.to_csv(Path(folder, name), index=False)
            files.append(Path(folder, name))
            read = read_file(files[-1])
            assert read.columns == {name: [cell_of(cell) for cell in each] for name, each in cells.items()}
            frames.append(replace(table_of(frame), file=name, rows=read.rows))
        found, wanted = outcome(*files, **options), outcome(*frames, **options)
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            same = torch.equal(one, other) if isinstance(one, torch.Tensor) else repr(one) == repr(other)
            assert same, (one, other)


def target(rows: int = ROWS) -> list[str]:
    return [f"{random.Random(row).gauss(0, 1):.4f}" for row in range(rows)]


@pytest.mark.parametrize("kind", ODD)
def test_odd_columns(kind: str) -> None:
    cells = (ODD[kind] * ROWS)[:ROWS]
    columns = {"x": [str(row % 7 + 0.5) for row in range(ROWS)], "odd": cells, "y": target()}
    other = columns | {"odd": [*cells[1:], random.Random(kind).choice(["oak", "1", "-", "2024-01-31"])]}
    for options in ({}, {"strict": True, "missing": "drop"}):
        check(columns, other, **options)
    check({"odd": columns["x"], "y": cells}, other)


CELLS = st.one_of(
    st.sampled_from(sorted({cell for cells in ODD.values() for cell in cells})),
    st.floats(allow_nan=False).map(repr),
    st.integers(-(10**20), 10**20).map(str),
    st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=10),
)


def bits(values: Any) -> bytes:
    return np.asarray(values, np.float64).tobytes()


DECIMALS = st.from_regex(r"\A[-+]?[0-9]{0,21}\.?[0-9]{0,23}([eE][-+]?[0-9]{1,3})?\Z")


@given(st.lists(st.one_of(DECIMALS, CELLS, st.floats(-1e9, 1e9).map(repr)).filter(cell_of), min_size=1, max_size=6))
def test_plain_numbers_are_those_of_python_to_the_bit(cells: list[str]) -> None:
    wanted = [as_number(cell_of(cell)) for cell in cells]
    found = Cells.of(cells).numbers
    if all(each is not None and abs(each) < EXACT for each in wanted):
        assert found is not None
        assert bits(found) == bits(wanted)
    else:
        assert found is None


def test_many_numbers_are_those_of_python_to_the_bit() -> None:
    drawn = random.Random(0)
    texts = [repr(drawn.gauss(0, 10.0 ** drawn.randint(-12, 12))) for _ in range(20_000)]
    halves = [(drawn.getrandbits(52) | 1 << 52) for _ in range(2_000)]
    texts += [f"{whole // 2**20}.{(whole % 2**20) * 5**20:020d}"[:24] for whole in halves]  # close to a half of a bit
    assert bits(Cells.of(texts).numbers) == bits([float(text) for text in texts])


@pytest.mark.parametrize("size", [1, 2, 5, 100])
@pytest.mark.parametrize("quoted", ["", '"7"', '"two\r\nlines"'])
def test_pieces_are_the_rows_of_a_file(tmp_path: Path, size: int, quoted: str) -> None:
    path = tmp_path / "t.csv"
    lines = ["# made", "a,b", *(f"{k},größe {k}" for k in range(12)), "", "", "5,x", f"{quoted},last"]
    path.write_bytes("\r\n".join(lines).encode())
    pieces = list(read_pieces(path, size))
    cells = [cell for piece in pieces for cell in piece.columns["b"]]
    assert cells == [*(f"größe {k}" for k in range(12)), "x", "last"]
    assert [row for piece in pieces for row in piece.rows] == [*range(3, 15), 17, 18 + quoted.count("\n")]
    assert max(map(len, pieces)) <= size


def test_without_pyarrow_a_file_has_the_same_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.csv"
    path.write_text("a,b\n1.5, oak\n,NA\n-3e2,elm\n")
    wanted, numbers = dict(read_file(path).columns), read_file(path).column("a").numbers
    assert wanted == {"a": ["1.5", None, "-3e2"], "b": ["oak", None, "elm"]}
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setattr(column_cells, "pyarrow", None)
    with pandas.option_context("mode.string_storage", "python"):
        other = read_file(path)
        assert other.columns == wanted
        assert bits(other.column("a").numbers) == bits(numbers)


QUOTED = {
    '"a","b"\n"1,5","x"\n2,"y"\n': [("1,5", "x"), ("2", "y")],
    'a,b\r\n"1","x"\r\n"","y"\r\n': [("1", "x"), (None, "y")],
    'a,b\n1," x "': [("1", "x")],
    'a,b\n1,x"y"\n2,"x""y"\n': [("1", 'x"y"'), ("2", 'x"y')],
    'a,b\n1,"x\ny"\n\n2,"z"\n': [("1", "x\ny"), ("2", "z")],
    'a,b\n\n1,"x"\n': [("1", "x")],
}


@pytest.mark.parametrize("text", QUOTED)
def test_quotes(tmp_path: Path, text: str) -> None:
    (tmp_path / "t.csv").write_text(text, newline="")
    table = read_file(tmp_path / "t.csv")
    assert list(zip(*table.columns.values(), strict=True)) == QUOTED[text]


@pytest.mark.parametrize("line", ['"x" y,2', '1,"x', '"1"2,3'])
def test_bad_quotes_are_refused_by_their_row(tmp_path: Path, line: str) -> None:
    (tmp_path / "t.csv").write_text(f"a,b\n1,2\n{line}\n")
    with pytest.raises(pd.ShapeError, match=r"t\.csv, row 3: "):
        read_file(tmp_path / "t.csv")
