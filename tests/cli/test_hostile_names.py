"""Names in a table that are meant for someone else: formulas for a spreadsheet, escapes for a terminal."""

import csv
import io
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyro_dropout.cli.terminal import for_spreadsheet, for_terminal
from tests.cli.command import FEW, run, succeeded, table_of, written

ESCAPE = "\x1b[2J\x1b]0;mine\x07"
CLASSES = ("=cmd|' /C calc'!A0", "@SUM(A1)", "-3", f"oak{ESCAPE}", "-2+3", 'elm;=HYPERLINK("x")')
COLUMNS = ("=size", f"ki{ESCAPE[:4]}nd", "+class\x9b")
TEXTS = ("-cmd", "+1+1", "=A1", "\u202eoak")
FORMULA = re.compile(r"[=+\-@＝＋－＠\t\r]")
OBEYED = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")  # all but the end of a line


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder with a table and a run on it, and what fit said; not to be written to."""
    folder = tmp_path_factory.mktemp("hostile")
    buffer = io.StringIO()
    rows = [(k - 12, TEXTS[k % 4], CLASSES[k % 6]) for k in range(24)]
    csv.writer(buffer).writerows([COLUMNS, *rows])
    data = written(folder, buffer.getvalue())
    done = succeeded("fit", data, "--task", "classification", "--held-back", 0.2, "--out", folder / "run", *FEW)
    return folder, done.output


def test_nothing_is_obeyed_by_the_terminal(hostile: tuple[Path, str], tmp_path: Path) -> None:
    folder, said = hostile
    assert "ki\\x1b[2J" in said
    asked = ["predict", folder / "run", folder / "table.csv", "--out", tmp_path / "p.csv", "--samples", 5]
    shown = [said, run(*asked, "--plot", tmp_path / "p.png").output]
    assert "picture: " in shown[-1]
    shown.append(run(*asked, "--json").output)
    assert json.loads(shown[-1])["classes"] == sorted(CLASSES, key=lambda label: (label != "-3", label))
    bad = written(tmp_path, "a,b\x1b[31m\n1,\x1b[0mx\n2,y\n", f"t{ESCAPE[:4]}.csv")
    for arguments in (
        ["fit", bad, "--target", ESCAPE, "--out", tmp_path / "run"],
        ["fit", folder / "table.csv", "--target", "price", "--out", tmp_path / "run"],
        ["fit", folder / "table.csv", "--speed", ESCAPE, "--out", tmp_path / "run"],
        ["predict", folder / "run", bad, "--out", tmp_path / "p.csv"],
        ["predict", folder / ESCAPE, bad, "--out", tmp_path / "p.csv"],
    ):
        done = run(*arguments)
        assert done.exit_code == 2
        shown.append(done.output)
    for each in shown:
        assert OBEYED.findall(each) == []


@pytest.mark.parametrize("options", [[], ["--with-inputs"]])
def test_nothing_is_run_by_a_spreadsheet(hostile: tuple[Path, str], tmp_path: Path, options: list[str]) -> None:
    folder, _ = hostile
    new = written(tmp_path, (folder / "table.csv").read_text("utf-8").replace("11,\u202e", "99,\u202e"))  # beyond
    out = tmp_path / "p.csv"
    assert run("predict", folder / "run", new, "--out", out, "--samples", 5, *options).exit_code == 0
    text = out.read_text("utf-8")
    assert "\x1b" not in text
    assert "\x9b" not in text
    for separator in ",;\t":  # as programs of all countries may open it
        for row in csv.reader(text.splitlines(), delimiter=separator):
            for cell in row:
                assert not FORMULA.match(cell) or re.fullmatch(r"-[\d.,e-]+", cell), cell
    rows = table_of(out)
    assert rows[-1]["beyond"] == "'=size"
    assert {row["class"] for row in rows} <= {for_spreadsheet(name) for name in CLASSES}
    if options:
        assert [row["'=size"] for row in rows][:3] == ["-12", "-11", "-10"]  # numbers stay numbers
        assert rows[0]["ki\\x1b[2Jnd"] == "'-cmd"


@pytest.mark.deep
def test_two_names_do_not_become_one(tmp_path: Path) -> None:
    rows = [f"{k},{('a' + chr(27), 'a' + chr(92) + 'x1b')[k % 2]}" for k in range(24)]
    data = written(tmp_path, "\n".join(["x,y", *rows]), "alike.csv")
    assert run("fit", data, "--out", tmp_path / "alike", *FEW).exit_code == 0
    done = run("predict", tmp_path / "alike", data, "--out", tmp_path / "q.csv", "--samples", 5)
    assert done.exit_code == 2
    assert "two columns of the predictions would be called 'p=a" in done.stderr
    assert not (tmp_path / "q.csv").exists()


@pytest.mark.deep
@given(st.text(max_size=20))
def test_any_text_is_made_harmless(text: str) -> None:
    assert OBEYED.findall(for_terminal(text)) == []
    safe = for_spreadsheet(text)
    assert not FORMULA.match(safe) or re.fullmatch(r"[-+][\d.,'’%‰ \u00a0\u2009\u202feE$€£¥A-Z+-]*\W?", safe)
    if text.isprintable() and not re.search(r"[=+\-@＝＋－＠]", text):
        assert safe == for_terminal(text) == text


@pytest.mark.parametrize("number", ["-3", "+5", "-1.5e-7", "-1,5", "-12%", "-$30", "-1 200,50 €"])
def test_numbers_stay_numbers(number: str) -> None:
    assert for_spreadsheet(number) == number
