"""Any bytes as a CSV file: the table that Python's csv module reads, or an error that says where; nothing else."""

import codecs
import csv
import io
import re
import tempfile
from pathlib import Path

import hypothesis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pyro_dropout as pd
from pyro_dropout.tables import reading
from pyro_dropout.tables.files import read_file
from pyro_dropout.tables.table import MISSING
from tests.cli.command import cells_in, read_table

NAME = "t.csv"
# Where a message says that something is wrong: a row, a column, a byte, the header or its names, or the whole file.
PLACE = re.compile(
    r"row \d+|column|byte \d+|header|is empty|binary data|not a table|has \d+ rows|not a valid Parquet|Excel file"
    r"|held_back=",
    re.DOTALL,
)
VALID = 'age,kind,"the price"\n' + "".join(f'{k},"{"ab"[k % 2]}, {k}",{k * 1.5}\n' for k in range(14))

PIECES = st.sampled_from([*',\n\r";|\t \0\ufeffé𝔘-', "\r\n", '""', "#", "\n#", "nan", "1e999", "9" * 40, "\u2028"])
ODD = [
    "",
    "NA",
    " 1 ",
    "1e3",
    "nan",
    "-inf",
    '"',
    'a "b"',
    "two\nlines",
    "a\rb",
    "x,y",
    "# no comment",
    "1,5",
    "12%",
    "true",
]
CELLS = st.one_of(
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12),
    st.sampled_from(ODD),
    st.integers(0, 10**40).map(str),
)


@st.composite
def tables(draw: st.DrawFn) -> bytes:
    """A table that csv itself wrote, with whatever in its cells."""
    width = draw(st.integers(1, 4))
    rows = draw(st.lists(st.lists(CELLS, min_size=width, max_size=width), min_size=1, max_size=14))
    buffer = io.StringIO(newline="")
    end = draw(st.sampled_from(["\n", "\r\n"]))
    quoting = draw(st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]))
    csv.writer(buffer, lineterminator=end, quoting=quoting).writerows(rows)
    return buffer.getvalue().encode()


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A good table to which something happened: bytes changed, cut out, doubled, or pieces put in."""
    content = bytearray(VALID.encode())
    for _ in range(draw(st.integers(1, 5))):
        place = draw(st.integers(0, len(content)))
        kind = draw(st.sampled_from(["flip", "cut", "double", "put", "truncate"]))
        if kind == "flip" and place < len(content):
            content[place] = draw(st.integers(0, 255))
        elif kind == "cut":
            del content[place : place + draw(st.integers(1, 20))]
        elif kind == "double":
            content[place:place] = content[place : place + draw(st.integers(1, 60))]
        elif kind == "put":
            content[place:place] = draw(PIECES).encode()
        elif kind == "truncate":
            del content[place:]
    return bytes(content)


SOUP = st.lists(PIECES, max_size=40).map("".join).map(str.encode)
CONTENTS = st.one_of(st.binary(max_size=300), SOUP, mutated(), tables())


def is_number(text: str) -> bool:
    try:
        return "_" not in text and float(text) is not None
    except ValueError:
        return False


class UnclearError(Exception):
    """A file that may be read or refused: its header has several separators or holds digits."""


def expected(content: bytes) -> list[list[str | None]] | None:
    """Return the header and the rows that must be read, missing cells as None; None where there is no table."""
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)):
        raise UnclearError
    try:
        lines = io.StringIO(content.decode("utf-8-sig"), newline="").readlines()
    except UnicodeDecodeError:
        return None
    while lines and not lines[0].strip("\r\n"):
        lines.pop(0)
    if lines and lines[0].startswith("#"):
        return None
    if lines and set(lines[0]) & set(";|\t"):
        raise UnclearError
    try:
        whole = [row for row in csv.reader(lines, strict=True) if row]
        if whole[:1] == [[""]] or (whole and whole[0][0].startswith("#")):
            return None
        header, *rows = [[cell.strip() for cell in row] for row in whole]
    except (csv.Error, ValueError):
        return None
    if b"\0" in content or content.startswith(b"PAR1") or not rows or any(len(row) != len(header) for row in rows):
        return None
    named = [name or f"unnamed {place}" for place, name in enumerate(header, 1)]
    if len(set(named)) < len(header) or all(map(is_number, header)):
        return None
    if any(map(str.isdigit, "".join(header))) or any(map(is_number, header)):
        raise UnclearError
    header = named
    return [list(header), *([None if cell.lower() in MISSING else cell for cell in row] for row in rows)]


def check(content: bytes) -> None:
    try:
        wanted, clear = expected(content), True
    except UnclearError:
        wanted, clear = None, False
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, NAME)
        path.write_bytes(content)
        try:
            found = read_file(path)
        except pd.errors.PyroDropoutError as refused:
            says_where(refused)
            found = None
        if found is None:
            assert wanted is None
        else:
            assert wanted is not None or not clear
            rows = [list(found.columns), *map(list, zip(*cells_in(found).values(), strict=True))]
            assert rows == (wanted or rows)
            assert found.rows.tolist() == sorted(set(found.rows.tolist()))
            wanted = rows
        forgives(path)


def forgives(path: Path) -> None:
    """What is read is finite, and predictions from the same file get the same inputs."""
    try:
        data = read_table(path, held_back=0.0)
    except pd.errors.PyroDropoutError as mistake:
        says_where(mistake)
        return
    assert data.encoding is not None
    table, x = reading.read_inputs(path, data.encoding)
    known = [row for row, cell in enumerate(cells_in(table)[data.encoding.target]) if cell is not None]
    order = torch.randperm(len(known), generator=torch.Generator().manual_seed(0))
    assert bool(x.isfinite().all())
    assert torch.equal(x[known][order], data.train[0])


def says_where(refused: pd.errors.PyroDropoutError) -> None:
    said = str(refused)
    assert NAME in said, said
    assert PLACE.search(said), said
    assert len(said) < 2_000 + 140_000 * (
        "header" in said or "columns" in said
    )  # it may list long names, not long cells


@given(CONTENTS)
def test_any_file_is_a_table_or_refused_with_its_place(content: bytes) -> None:
    check(content)


@pytest.mark.deep
@hypothesis.settings(max_examples=20_000)
@given(CONTENTS)
def test_any_of_twenty_thousand_files(content: bytes) -> None:
    check(content)
