"""Tables of all kinds: what is fitted on CSV predicts the same from CSV and from Parquet, and a refusal says where.

A table is made from values that are known, then written as people write it. What is read must be those values.
"""

import csv
import datetime
import io
import random
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import hypothesis
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pyro_dropout as pd
from pyro_dropout.tables.files import read_file
from pyro_dropout.tables.reading import read_table
from pyro_dropout.tabular.run_folder import Run
from tests.cli.command import contents, run, table_of

ROWS = 14
SEPARATORS = {",": "comma", ";": "semicolon", "\t": "tab", "|": "pipe"}
MISSING = ("", "NA", "n/a", "NaN", "null", "#N/A", "?", "None")
NAMES = (
    "age",
    "größe",
    "=cmd|' /C calc'!A0",
    "@x",
    "size\x1b[31m",
    "a b",
    "price, net",
    "pipe|d",
    "semi;colon",
    "-",
    "'q",
)
LABELS = ("oak", "elm", "=HYPERLINK(1)", "#1 oak", "weiß", "-dash", "@at", "a,b", 'say "hi"', "x;y", "\x1b]0;x\x07")
UNITS = ("", "", "", "%", "$", "£", "€")
EPOCH = datetime.datetime(1970, 1, 1)


@dataclass(frozen=True)
class Made:
    """A column: what it holds, how it is written, what Parquet stores, and a text that does not fit."""

    name: str
    values: list[Fraction | str | None]  # numbers, or the names of categories
    texts: list[str]
    typed: Any
    misfit: str


@dataclass(frozen=True)
class Whole:
    """A table, and how it is written."""

    columns: list[Made]
    encoding: str
    separator: str
    decimal: str
    comments: int

    def text(self, rows: list[list[str]]) -> bytes:
        buffer = io.StringIO(newline="")
        buffer.write("# a remark\n" * self.comments)
        csv.writer(buffer, delimiter=self.separator).writerows(rows)
        return buffer.getvalue().encode(self.encoding)

    def rows(self) -> list[list[str]]:
        return [
            [each.name for each in self.columns],
            *map(list, zip(*(each.texts for each in self.columns), strict=True)),
        ]


# --- making tables ----------------------------------------------------------------------------------------------------


def spelled(number: Decimal, decimal: str, thousands: str, unit: str) -> str:
    """A number as it is written in some country."""
    text = f"{number:,f}".replace(",", "\0").replace(".", decimal).replace("\0", thousands)
    if not unit:
        return text
    if unit in "$£":
        return f"-{unit}{text[1:]}" if text.startswith("-") else unit + text
    return text + unit


def numbers(draw: st.DrawFn, decimal: str) -> tuple[list[Any], list[str], Any, str]:
    places, start = draw(st.sampled_from([(0, 0), (1, 0), (2, 0), (3, 0), (0, 1_700_000_000), (0, 2**60)]))
    drawn = random.Random(draw(st.integers(0, 2**32)))  # hypothesis alone prefers small numbers
    least, most = draw(st.sampled_from([(-(10**6), 10**6), (1000, 10**6), (0, 9), (-(10**8), 10**8)]))
    exact = [Decimal(drawn.randint(least, most)).scaleb(-places) + start for _ in range(ROWS)]
    thousands = draw(st.sampled_from(["", "", {".": ",", ",": "."}[decimal], " ", "'"]))
    unit = draw(st.sampled_from(UNITS)) if start == 0 else ""
    texts = [spelled(each, decimal, thousands, unit) for each in exact]
    if unit:
        typed: Any = pyarrow.array(texts)
    else:
        typed = pyarrow.array([int(each) for each in exact] if not places else [float(each) for each in exact])
    misfit = "12" if unit else {".": "1,5", ",": "1.5"}[decimal] if places else "oops"
    return [Fraction(each) for each in exact], texts, typed, misfit


def dates(draw: st.DrawFn, _: str) -> tuple[list[Any], list[str], Any, str]:
    hours = draw(st.lists(st.integers(0, 500_000), min_size=ROWS, max_size=ROWS))
    kind = draw(st.sampled_from(["day", "naive", "zoned"]))
    moments = [EPOCH + datetime.timedelta(hours=each - each % 24 if kind == "day" else each) for each in hours]
    days = [Fraction((each - EPOCH) // datetime.timedelta(hours=1), 24) for each in moments]
    if kind == "day":
        return (
            days,
            [f"{each:%Y-%m-%d}" for each in moments],
            pyarrow.array([each.date() for each in moments]),
            "05/01/2024",
        )
    if kind == "naive":
        return days, [f"{each:%Y-%m-%d %H:%M}" for each in moments], pyarrow.array(moments), "2024-02-30 10:00"
    zone = datetime.timezone(datetime.timedelta(hours=draw(st.integers(-11, 11))))
    texts = [each.replace(tzinfo=datetime.UTC).astimezone(zone).isoformat() for each in moments]
    return days, texts, pyarrow.array(moments, pyarrow.timestamp("ms", "UTC")), "2024-01-31T10:00"


def truths(draw: st.DrawFn, _: str) -> tuple[list[Any], list[str], Any, str]:
    drawn = [True, False, *draw(st.lists(st.booleans(), min_size=ROWS - 2, max_size=ROWS - 2))]
    ways = {True: ["True", "true", "TRUE", "1", "1.0"], False: ["False", "false", "0", "0.0"]}
    texts = ["true", "FALSE", *(draw(st.sampled_from(ways[each])) for each in drawn[2:])]
    return [str(each).lower() for each in drawn], texts, pyarrow.array(drawn), "maybe"


def kinds(draw: st.DrawFn, encoding: str) -> tuple[list[Any], list[str], Any, str]:
    known = [label for label in LABELS if writable(label, encoding)]
    some = draw(st.lists(st.sampled_from(known), min_size=2, max_size=4, unique=True))
    drawn = [*some, *draw(st.lists(st.sampled_from(some), min_size=ROWS - len(some), max_size=ROWS - len(some)))]
    return list(drawn), drawn, pyarrow.array(drawn).dictionary_encode(), "never seen"


def writable(text: str, encoding: str) -> bool:
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return False
    return True


@st.composite
def tables(draw: st.DrawFn) -> Whole:
    encoding = draw(st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "latin-1"]))
    decimal = draw(st.sampled_from(".,"))
    names = draw(st.lists(st.sampled_from(NAMES), min_size=2, max_size=5, unique=True))
    gappy = draw(st.booleans())
    columns: list[Made] = []
    for place, name in enumerate(names):
        target = place == len(names) - 1
        make: Callable[..., Any] = draw(
            st.sampled_from([numbers, truths, kinds] if target else [numbers, dates, truths, kinds])
        )
        values, texts, typed, misfit = make(draw, encoding if make is kinds else decimal)
        if make is numbers and not all(writable(text, encoding) for text in texts):
            texts, misfit = [text.strip("€") for text in texts], "12 $"
            typed = pyarrow.array(texts)
        if gappy and not target:
            row, mark = draw(st.integers(2, ROWS - 1)), draw(st.sampled_from(MISSING))
            if make is not kinds or values.count(values[row]) > 1:
                values = [None if k == row else value for k, value in enumerate(values)]
                texts = [mark if k == row else text for k, text in enumerate(texts)]
                typed = pyarrow.array(
                    [None if k == row else each for k, each in enumerate(typed.to_pylist())], typed.type
                )
        columns.append(Made(name, values, texts, typed, misfit))
    separator = draw(st.sampled_from(list(SEPARATORS)))
    return Whole(columns, encoding, separator, decimal, draw(st.integers(0, 2)))


# --- checking them ----------------------------------------------------------------------------------------------------


def flags_for(whole: Whole, path: Path) -> list[str]:
    """What a person adds to the command, one flag after another, because a refusal names it."""
    flags: list[str] = []
    for _ in range(4):
        options = dict(zip((flag[2:] for flag in flags[::2]), flags[1::2], strict=True))
        try:
            read_table(path, target=whole.columns[-1].name, held_back=0.0, missing="mean", strict=True, **options)  # type: ignore[arg-type]
        except pd.PyroDropoutError as refused:
            said = str(refused)
            assert path.name in said
            (flag,) = set(re.findall(r"--(encoding|separator|decimal)", said))
            if flag == "decimal":
                assert re.search(r"row \d+, column ", said)
            answers = {"encoding": whole.encoding, "separator": SEPARATORS[whole.separator]}
            answers["decimal"] = "point" if whole.decimal == "." else "comma"
            assert f"--{flag}" not in flags, said
            flags += [f"--{flag}", answers[flag]]
        else:
            return flags
    raise AssertionError(flags)


def check(whole: Whole) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path, twin = folder / "table.csv", folder / "twin.parquet"
        path.write_bytes(whole.text(whole.rows()))
        pyarrow.parquet.write_table(pyarrow.table({each.name: each.typed for each in whole.columns}), twin)
        target = whole.columns[-1]
        if len(set(target.values)) < 2:
            return
        flags = flags_for(whole, path)
        few = ["--steps", 1, "--width", 3, "--no-compile", "--quiet", "--missing", "mean", "--strict"]
        done = run("fit", path, "--target", target.name, "--out", folder / "run", *few, *flags)
        assert done.exit_code == 0, done.stderr
        of_file = [
            flag for pair in zip(flags[::2], flags[1::2], strict=True) if pair[0] != "--decimal" for flag in pair
        ]
        holds_what_was_meant(whole, folder / "run", path, dict(zip(flags[::2], flags[1::2], strict=True)))
        outs = [folder / "csv.csv", folder / "parquet.csv"]
        for data, out, more in ((path, outs[0], of_file), (twin, outs[1], [])):
            done = run("predict", folder / "run", data, "--out", out, "--samples", 3, "--quiet", *more)
            assert done.exit_code == 0, done.stderr
            assert "\x1b" not in done.output
            assert len(table_of(out)) == ROWS
        one, other = ([{**row, "row": ""} for row in table_of(out)] for out in outs)
        assert one == other
        refuses_what_does_not_fit(whole, folder, of_file)


def holds_what_was_meant(whole: Whole, folder: Path, path: Path, flags: dict[str, str]) -> None:
    run_of = Run.read(folder)
    data = run_of.data()
    assert len(data.rows[0]) == ROWS
    assert ("comment" in data.note) == bool(whole.comments)
    order = run_of.encoding
    table = read_file(path, encoding=flags.get("--encoding"), separator=flags.get("--separator"))
    for column, made in zip((*order.inputs, order.outcome), whole.columns, strict=True):
        if isinstance(next(value for value in made.values if value is not None), str):
            labels = [None if cell is None else column.notation.label(cell) for cell in table.columns[column.name]]
            if column.categories is not None:
                assert labels == made.values
                assert set(column.categories) == set(made.values) - {None}
        else:
            assert column.categories is None
            found = [None if value != value else value for value in column.measured(table).tolist()]
            for value, wanted in zip(found, made.values, strict=True):
                assert (value is None) == (wanted is None)
                if value is not None and wanted is not None:
                    assert float(abs(Fraction(value) - wanted)) <= 1e-9 * max(1.0, abs(float(wanted)))


def refuses_what_does_not_fit(whole: Whole, folder: Path, of_file: list[str]) -> None:
    """One cell that does not fit its column is refused by file, row and column, and nothing is written."""
    for place, made in enumerate(whole.columns[:-1]):
        rows = whole.rows()
        rows[5][place] = made.misfit
        bad = folder / "bad.csv"
        bad.write_bytes(whole.text(rows))
        before = contents(folder)
        done = run("predict", folder / "run", bad, "--out", folder / "none.csv", "--samples", 3, *of_file)
        assert done.exit_code == 2
        said = done.stderr.strip()
        assert f"bad.csv, row {6 + whole.comments}, column " in said, said
        assert re.search(r"write it like that|Leave the row out", said), said
        assert contents(folder) == before


@hypothesis.settings(max_examples=3)
@given(tables())
def test_tables_of_all_kinds(whole: Whole) -> None:
    check(whole)


@pytest.mark.deep
@hypothesis.settings(max_examples=300)
@given(tables())
def test_three_hundred_tables_of_all_kinds(whole: Whole) -> None:
    check(whole)
