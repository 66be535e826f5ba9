"""What is a row of a CSV file and what is not: comments, headers, separators and encodings."""

import re
from pathlib import Path

import pytest

import pyro_dropout as pd
from pyro_dropout.tables.files import read_file
from tests.cli.command import cells_in, read_table, written

KINDS = ("#1 oak", "elm", "ash")
TREES = "kind,age,height\n" + "".join(f"{KINDS[k % 3]},{k},{k * 1.5}\n" for k in range(60))


# --- headers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["# a remark\n" + TREES, "#" + TREES, "#\n", "\n\n"])
def test_a_table_begins_with_its_header(tmp_path: Path, text: str) -> None:
    with pytest.raises(pd.errors.ShapeError, match=r"table.csv must begin with the header.*Remove .*comments"):
        read_file(written(tmp_path, text))
    with pytest.raises(pd.errors.ShapeError, match=r"table.csv, row 62: 1 values for 3 columns"):
        read_file(written(tmp_path, TREES + "# the end\n"))


@pytest.mark.parametrize(
    "text",
    [
        "5.1,3.5,setosa\n4.9,3.0,setosa\n",
        '"1,5";"2,5"\n"3,5";"4,5"\n',
        "12%;$3\n13%;$4\n",
        "2024-01-01,2\n2024-01-02,3\n",
    ],
)
def test_a_first_row_of_data_is_no_header(tmp_path: Path, text: str) -> None:
    with pytest.raises(
        pd.errors.ShapeError, match=r"table.csv has no header: its first line is .*Write the columns' names"
    ):
        read_file(written(tmp_path, text))


# --- separators -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mark", "name"), [(";", "semicolons"), ("\t", "tabs"), ("|", "pipes")])
def test_separators_are_recognised_and_told(tmp_path: Path, mark: str, name: str) -> None:
    path = written(tmp_path, TREES.replace(",", mark))
    plain = read_table(written(tmp_path, TREES, "plain.csv"))
    found = read_table(path)
    assert found.encoding == plain.encoding
    assert f"separated by {name}" in found.note
    assert "separated" not in plain.note


def test_a_separator_that_is_not_clear_is_asked_for(tmp_path: Path) -> None:
    path = written(tmp_path, "a,b;c\n1,2;3\n")
    with pytest.raises(pd.errors.ShapeError, match=r"table.csv.*header.*commas or semicolons.*--separator"):
        read_file(path)
    assert list(read_file(path, separator="comma").columns) == ["a", "b;c"]
    assert list(read_file(path, separator="semicolon").columns) == ["a,b", "c"]
    with pytest.raises(pd.errors.RangeError, match="separator must be one of comma, semicolon, tab, pipe; got 'dot'"):
        read_file(path, separator="dot")


# --- encodings --------------------------------------------------------------------------------------------------------

UMLAUTS = "größe,art\n" + "".join(f"{k},{('Föhre', 'Weiß')[k % 2]}\n" for k in range(12))


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
def test_an_encoding_with_a_mark_is_recognised(tmp_path: Path, encoding: str) -> None:
    table = read_file(written(tmp_path, UMLAUTS.encode(encoding)))
    assert list(table.columns) == ["größe", "art"]
    assert cells_in(table)["art"][:2] == ["Föhre", "Weiß"]
    assert table.rows[:2].tolist() == [2, 3]


def test_another_encoding_is_asked_for(tmp_path: Path) -> None:
    path = written(tmp_path, UMLAUTS.encode("latin-1"))
    with pytest.raises(pd.errors.PyroDropoutError, match=r"byte 3 cannot be decoded.*--encoding latin-1"):
        read_file(path)
    assert list(read_file(path, encoding="latin-1").columns) == ["größe", "art"]
    with pytest.raises(pd.errors.PyroDropoutError, match=r"table.csv is not ascii text: byte 3 cannot be decoded"):
        read_file(path, encoding="ascii")
    bare = written(tmp_path, UMLAUTS.encode("utf-16-le"), "bare.csv")
    with pytest.raises(pd.errors.PyroDropoutError, match=re.escape("bare.csv")):
        read_file(bare)
    assert list(read_file(bare, encoding="utf-16-le").columns) == ["größe", "art"]
    for wrong in ("klingon", "hex"):
        with pytest.raises(pd.errors.RangeError, match=f"encoding must be the name of a text encoding.*got '{wrong}'"):
            read_file(path, encoding=wrong)


# --- rows -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quoted", ["", '"7"', '"two\r\nlines"'])
def test_rows_have_the_numbers_of_their_lines(tmp_path: Path, quoted: str) -> None:
    lines = ["a,b", *(f"{k},größe {k}" for k in range(12)), "", "", "5,x", f"{quoted},last"]
    table = read_file(written(tmp_path, "\r\n".join(lines)))
    assert table.columns["b"].tolist() == [*(f"größe {k}" for k in range(12)), "x", "last"]
    assert table.rows.tolist() == [*range(2, 14), 16, 17 + quoted.count("\n")]


@pytest.mark.parametrize("line", ['"x" y,2', '1,"x', '"1"2,3'])
def test_bad_quotes_are_refused_by_their_row(tmp_path: Path, line: str) -> None:
    (tmp_path / "t.csv").write_text(f"a,b\n1,2\n{line}\n")
    with pytest.raises(pd.errors.ShapeError, match=r"t\.csv, row 3: "):
        read_file(tmp_path / "t.csv")
