"""Bad input on the command line: exit code 2, one line on stderr that says it, no traceback, and nothing is written.

The mistakes that stand in ``tests/cli/test_cli_mistakes.py`` are not repeated here.
"""

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.cli.command import contents, houses, run, trees, written

Make = Callable[[Path, Path], Sequence[object]]


class Mistake(NamedTuple):
    """Arguments, made from a folder of one's own and one with fitted runs; and what must be said of them."""

    make: Make
    option: str
    given: str
    remedy: str


def fit(*options: object, text: str | bytes = houses()) -> Make:
    return lambda folder, fitted: ["fit", written(folder, text), "--out", folder / "run", *options]


def compare(*options: object) -> Make:
    return lambda folder, fitted: ["compare", written(folder, houses()), "--out", folder / "out", *options]


def predict(*options: object, text: str = houses(), which: str = "houses") -> Make:
    return lambda folder, fitted: [
        "predict", fitted / which, written(folder, text, "new.csv"), "--out", folder / "p.csv", *options,
    ]  # fmt: skip


def resume(*options: object) -> Make:
    return lambda folder, fitted: ["resume", fitted / "houses", *options]


def plain(*arguments: object) -> Make:
    return lambda folder, fitted: arguments


def recorded(change: Callable[[dict[str, Any]], object]) -> Make:
    """Resume a run whose record was changed."""

    def make(folder: Path, fitted: Path) -> Sequence[object]:
        shutil.copytree(fitted / "houses", folder / "run")
        record = json.loads((folder / "run" / "run.json").read_text("utf-8"))
        change(record)
        (folder / "run" / "run.json").write_text(json.dumps(record), "utf-8")
        return ["resume", folder / "run"]

    return make


COUNT, NUMBER, WHOLE = "a whole number of at least 1", "should be a valid number", "should be a valid integer"
MISTAKES = {
    # fit
    "no units": Mistake(fit("--width", 0), "'--width'", "0", COUNT),
    "no batch": Mistake(fit("--batch-size", 0), "'--batch-size'", "0", COUNT),
    "no steps between checkpoints": Mistake(fit("--checkpoint-every", -2), "'--checkpoint-every'", "-2", COUNT),
    "an infinite rate": Mistake(fit("--lr", "inf"), "'--lr'", "inf", "a positive number"),
    "a rate of nothing": Mistake(fit("--lr", 0), "'--lr'", "0", "a positive number"),
    "a rate in words": Mistake(fit("--lr", "fast"), "'--lr'", "Invalid value", NUMBER),
    "half a step": Mistake(fit("--steps", 1.5), "'--steps'", "Invalid value", WHOLE),
    "half a seed": Mistake(fit("--seed", 0.5), "'--seed'", "Invalid value", WHOLE),
    "a huge seed": Mistake(fit("--seed", 2**70), "'--seed'", str(2**70), "a whole number below 2**32"),
    "no share": Mistake(fit("--held-back", "nan"), "'--held-back'", "nan", "lie in [0, 1)"),
    "a negative share": Mistake(fit("--held-back", -0.1), "'--held-back'", "-0.1", "lie in [0, 1)"),
    "nearly all held back": Mistake(fit("--held-back", 0.99), "held_back=0.99", "0 to train on", "hold back fewer"),
    "no such category": Mistake(fit("--categorical", "z"), "table.csv", "no column 'z'", "its columns are area, town"),
    "two tables": Mistake(fit("other.csv"), "argument", "other.csv", "unexpected extra"),
    "no table": Mistake(plain("fit", "--out", "run"), "'DATA'", "argument", "Missing"),
    "an empty device": Mistake(fit("--device", ""), "--device", "got ''", "such as 'cpu' or 'cuda'"),
    "an empty guide": Mistake(fit("--guide", ""), "'--guide'", "''", "choose from dropout, concrete"),
    "two guides": Mistake(fit("--guide", "dropout,concrete"), "'--guide'", "'dropout,concrete'", "choose from dropout"),
    "a number as a class": Mistake(fit("--task", "classification"), "column 'price'", "30 different", "at most 15"),
    "text as a number": Mistake(fit("--task", "regression", text=trees()), "column 'kind'", "'oak'", "not a number"),
    "all rows have gaps": Mistake(
        fit("--missing", "drop", text="a,b\n" + "1,\n" * 20), "table.csv, column 'b'", "no value", "nothing to predict",
    ),
    "no name for the table": Mistake(plain("fit", "", "--out", "run"), "'.'", "is a folder", "give a CSV or Parquet"),
    "a name that no disk has": Mistake(plain("fit", "x" * 5000, "--out", "run"), "x" * 40, "File name", "too long"),
    "a name with a null": Mistake(plain("fit", "a\0b.csv", "--out", "run"), "a\\x00b.csv", "not a path", "rename"),
    "out with a null": Mistake(
        lambda folder, fitted: ["fit", fitted / "houses.csv", "--out", "a\0b"], "'--out'", "null byte", "embedded",
    ),
    "half of UTF-16": Mistake(fit(text=houses().encode("utf-16")[:-1]), "table.csv", "byte 603", "save it in UTF-8"),
    "a thousand, or 1": Mistake(fit(text=houses() + '"1,500",a,7\n'), "column 'area'", "'1,500'", "--decimal comma"),
    "a huge number": Mistake(fit(text=houses() + "9" * 400 + ",a,7\n"), "row 32", "(400 characters)", "is not finite"),
    "a huge cell": Mistake(fit(text=houses() + "x" * 200_000 + ",a,7\n"), "row 32", "field larger", "131072"),
    "bars": Mistake(fit(text="a/b\n1/2\n"), "table.csv", "'a/b'", "separated by commas"),
    # predict
    "no run to predict with": Mistake(plain("predict"), "'RUN'", "argument", "Missing"),
    "no rows to predict": Mistake(plain("predict", "run"), "'DATA'", "argument", "Missing"),
    "no level": Mistake(predict("--level", "nan"), "'--level'", "nan", "strictly between 0 and 1"),
    "a level in per cent": Mistake(predict("--level", 95), "'--level'", "95", "strictly between 0 and 1"),
    "a negative seed": Mistake(predict("--seed", -1), "'--seed'", "-1", "at least 0"),
    "no such device": Mistake(predict("--device", "abacus"), "--device", "'abacus'", "such as 'cpu' or 'cuda'"),
    "many draws": Mistake(predict("--samples", "many"), "'--samples'", "Invalid value", WHOLE),
    "an empty table": Mistake(predict(text=""), "new.csv", "is empty", "a header and rows are needed"),
    "a table without rows": Mistake(predict(text="area,town\n"), "new.csv", "no rows", "a header and"),
    "a class by a word": Mistake(predict(text="width,age\n1,x\n", which="trees"), "column 'age'", "'x'", "number"),
    "a file for a run": Mistake(
        lambda folder, fitted: ["predict", fitted / "houses.csv", fitted / "houses.csv"],
        "no folder", "houses.csv'", "create a run with pyro-dropout fit",
    ),
    "predict into no name": Mistake(
        lambda folder, fitted: ["predict", fitted / "houses", fitted / "houses.csv", "--out", ""],
        "'--out'", "'.' is a folder", "a file is needed",
    ),
    # compare
    "compare: no draws": Mistake(compare("--samples", 0), "'--samples'", "0", COUNT),
    "compare: fewer units than none": Mistake(compare("--width", -1), "'--width'", "-1", COUNT),
    "compare: no batch": Mistake(compare("--batch-size", 0), "'--batch-size'", "0", COUNT),
    "compare: no such guide": Mistake(compare("--guides", "vi"), "'--guides'", "'vi'", "choose from dropout, concrete"),
    "compare: seeds in words": Mistake(compare("--seeds", "two"), "'--seeds'", "Invalid value", WHOLE),
    "compare: no such target": Mistake(compare("--target", "z"), "table.csv", "'z'", "its columns are area, town"),
    "compare: nothing left": Mistake(compare("--drop", "area,town"), "table.csv", "'price'", "no column is left"),
    "compare: no such device": Mistake(compare("--device", "cuda:77"), "--device", "'cuda:77'", "such as 'cpu'"),
    "compare: two series": Mistake(plain("compare", "co2", "sunspots"), "argument", "sunspots", "unexpected extra"),
    "compare: too many held back": Mistake(compare("--held-back", 1.5), "'--held-back'", "1.5", "lie in [0, 1)"),
    "compare: into the table's folder": Mistake(compare("--out", "."), "--out '.'", "holds no", "give a new"),
    # resume
    "resume nothing": Mistake(plain("resume"), "'RUN'", "argument", "Missing"),
    "resume for no steps": Mistake(resume("--steps", 0), "'--steps'", "0", COUNT),
    "resume elsewhere": Mistake(resume("--out", "other"), "--out", "No such option", "option"),
    "resume on a device": Mistake(resume("--device", "abacus"), "--device", "'abacus'", "such as 'cpu' or 'cuda'"),
    "resume without the data": Mistake(resume("--data", "none.csv"), "'none.csv'", "does not exist", "with --data"),
    "resume with other data": Mistake(
        lambda folder, fitted: ["resume", fitted / "houses", "--data", fitted / "trees.csv"],
        "trees.csv", "has changed since", "Restore the file, or fit a new run",
    ),
    "resume a later format": Mistake(recorded(lambda record: record.update(format=99)), "run.json", "99", "reads 2"),
    "resume a negative width": Mistake(
        recorded(lambda record: record["model"].update(width=-5)), "run.json", "'width'", "Fit the run again",
    ),
    "resume with more in the record": Mistake(
        recorded(lambda record: record["training"].update(speed=1)), "run.json", "'speed'", "Fit the run again",
    ),
    "resume without a section": Mistake(recorded(lambda record: record.pop("data")), "run.json", "'data'", "Fit the"),
    # the others
    "reproduce a path": Mistake(plain("reproduce", "../co2"), "unknown experiment", "'../co2'", "choose from bnn, co2"),
    "reproduce an option": Mistake(plain("reproduce", "--quick"), "option", "--quick", "No such"),
    "download what is not there": Mistake(
        plain("datasets", "--download", "data", "--only", "iris"), "'--only'", "'iris'", "choose from boston",
    ),
    "datasets of a kind": Mistake(plain("datasets", "uci"), "argument", "uci", "unexpected extra"),
    "info on something": Mistake(plain("info", "torch"), "argument", "torch", "unexpected extra"),
    "no command": Mistake(plain(""), "command", "''", "No such"),
    "a command in capitals": Mistake(plain("FIT"), "command", "'FIT'", "No such"),
    "an option and no command": Mistake(plain("--fast"), "option", "--fast", "No such"),
}  # fmt: skip


def one_line(stderr: str) -> str:
    (said,) = stderr.strip().splitlines()
    assert said.startswith("pyro-dropout: ")
    assert "Traceback" not in said
    return said


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line(name: str, fitted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake = MISTAKES[name]
    monkeypatch.chdir(tmp_path)
    arguments = mistake.make(tmp_path, fitted)
    before = contents(tmp_path), contents(fitted)
    done = run(*arguments)
    assert done.exit_code == 2, done.output
    said = one_line(done.stderr)
    for word in (mistake.option, mistake.given, mistake.remedy):
        assert word in said, said
    assert done.stdout == ""
    assert (contents(tmp_path), contents(fitted)) == before


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENOSPC], ids=["no right", "read-only", "full"])
def test_a_disk_that_takes_nothing(code: int, fitted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may write anywhere, so the refusal of the disk is made here, where files come into being."""
    written(tmp_path, houses(), "new.csv")

    def refuse(*arguments: Any, **more: Any) -> Any:
        raise OSError(code, os.strerror(code), str(tmp_path))

    before = contents(tmp_path)
    monkeypatch.setattr("tempfile.mkstemp", refuse)
    done = run(
        "predict", fitted / "houses", tmp_path / "new.csv", "--out", tmp_path / "p.csv", "--samples", 3, "--quiet"
    )
    assert done.exit_code == 2
    assert os.strerror(code) in one_line(done.stderr)
    assert contents(tmp_path) == before


REAL = ["a rate in words", "two guides", "half a step", "no command"]


@pytest.mark.parametrize("name", REAL)
def test_the_same_in_a_process_of_its_own(name: str, tmp_path: Path) -> None:
    arguments = [str(part) for part in MISTAKES[name].make(tmp_path, tmp_path)]
    before = contents(tmp_path)
    command = [sys.executable, "-m", "pyro_dropout", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert (done.returncode, done.stdout) == (2, "")
    assert MISTAKES[name].given in one_line(done.stderr)
    assert contents(tmp_path) == before
