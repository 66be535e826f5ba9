"""Mistakes on the command line: each is one line that names the thing, and nothing is written."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from pyro_dropout.tabular.run_folder import identity_of
from tests.cli.command import contents, houses, run, written

NO_DEVICE = "--device must be a torch device that can be used here, such as 'cpu' or 'cuda'; got "

Make = Callable[[Path, Path], Sequence[object]]


def of_table(text: str | bytes, *options: object, name: str = "table.csv") -> Make:
    """Fit a table of one's own, into a folder that must not appear."""
    return lambda folder, fitted: ["fit", written(folder, text, name), "--out", folder / "run", *options]


def of_compare(*options: object, text: str = houses()) -> Make:
    return lambda folder, fitted: ["compare", written(folder, text), "--out", folder / "out", *options]


def of_predict(text: str | bytes, *options: object, which: str = "houses") -> Make:
    return lambda folder, fitted: [
        "predict", fitted / which, written(folder, text, "new.csv"), "--out", folder / "predictions.csv", *options,
    ]  # fmt: skip


def of_run(change: Callable[[Path], object], command: str = "predict", which: str = "houses") -> Make:
    """Predict with, or resume, a copy of a run that was tampered with."""

    def make(folder: Path, fitted: Path) -> Sequence[object]:
        copy = folder / "run"
        shutil.copytree(fitted / which, copy)
        change(copy)
        if command == "resume":
            return ["resume", copy]
        return ["predict", copy, written(folder, houses(), "new.csv"), "--out", folder / "predictions.csv"]

    return make


def spoiled(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


def swapped(old: str, new: str) -> Callable[[Path], object]:
    """Edit the record, and give it the identity that it would have if it had been written so."""

    def change(folder: Path) -> None:
        record = json.loads((folder / "run.json").read_text("utf-8").replace(old, new))
        (folder / "run.json").write_text(json.dumps(record | {"identity": identity_of(record)}), "utf-8")

    return change


def piped(path: Path) -> Path:
    if not path.exists():
        os.mkfifo(path)
    return path


MISTAKES: dict[str, tuple[Make, str]] = {
    # the file
    "no file": (lambda folder, fitted: ["fit", folder / "no.csv", "--out", folder / "run"], "no.csv'."),
    # the options
    "no such command": (lambda folder, fitted: ["comparison"], "No such command 'comparison'"),
    "no such guide": (of_table(houses(), "--guide", "swag"), "guide must be one of auto, dropout, "),
    "guides without commas": (
        lambda folder, fitted: ["compare", "--guides", "dropout", "mean-field"], "'mean-field' is neither a file nor",
    ),
    "no such data": (lambda folder, fitted: ["compare", "CO3"], "'CO3' is neither a file nor a bundled data set (co2"),
    "a series to fit": (lambda folder, fitted: ["fit", "co2", "--out", folder / "run"], "'co2' is for compare only"),
    "a target of a series": (
        lambda folder, fitted: ["compare", "co2", "--target", "y", "--out", folder / "o"], "'co2' has its own target",
    ),
    "no such device": (of_table(houses(), "--device", "abacus"), NO_DEVICE + "'abacus'"),
    "nothing held back": (of_compare("--held-back", 0), "'--held-back': compare needs some held-back rows"),
    # where things go
    "out is a run": (
        lambda folder, fitted: ["fit", fitted / "houses.csv", "--out", fitted / "houses"], "already holds a run",
    ),
    "out is not empty": (lambda folder, fitted: ["fit", written(folder, houses()), "--out", folder], "is not empty"),
    "out below a file": (
        lambda folder, fitted: ["fit", written(folder, houses()), "--out", folder / "table.csv" / "run"],
        "cannot be created: Not a directory",
    ),
    "a page for a folder": (
        lambda folder, fitted: ["compare", "--out", folder / "page.html"], "--out is a folder, and its page",
    ),
    "compare into other things": (
        lambda folder, fitted: ["compare", written(folder, houses()), "--out", folder], "holds no comparison",
    ),
    "predict into a folder": (
        lambda folder, fitted: ["predict", fitted / "houses", fitted / "houses.csv", "--out", folder], "is a folder",
    ),
    "predict over the table": (
        lambda folder, fitted: ["predict", fitted / "houses", fitted / "houses.csv", "--out", fitted / "houses.csv"],
        "is the input table",
    ),
    # new data, and runs
    "a missing column": (of_predict("area\n1\n"), "new.csv has no column 'town', which the run"),
    "text for an input": (of_predict("area,town\nbig,a\n"), "new.csv, row 2, column 'area': 'big' is not a number"),
    "no such run": (lambda folder, fitted: ["resume", folder / "none"], "there is no folder"),
    "a record with a hole": (of_run(swapped('"width"', '"depth"')), "run.json is damaged: 'depth' is missing or wrong"),
    "a table that is a pipe": (
        lambda folder, fitted: ["fit", piped(folder / "p.csv"), "--out", folder / "run"], "p.csv' is a pipe; give",
    ),
    "a table that is a device": (
        lambda folder, fitted: ["compare", "/dev/zero", "--out", folder / "out"], "'/dev/zero' is a device; give a CSV",
    ),
    "a name that is not UTF-8": (
        lambda folder, fitted: ["fit", folder / "a\udcff.csv", "--out", folder / "run"], "is not a path in UTF-8",
    ),
    "predict over the record": (
        lambda folder, fitted: [
            "predict", fitted / "houses", fitted / "houses.csv", "--out", fitted / "houses" / "run.json",
        ],
        "is a file of the run and would be overwritten",
    ),
    "a garbled posterior": (of_run(spoiled("posterior.safetensors", b"x" * 100)), "posterior.safetensors cannot be"),
    "data that moved": (of_run(swapped("houses.csv", "gone.csv"), "resume"), "gone.csv' does not exist; give its"),
    # what no disk, no record and no machine has
    "no name for the table": (lambda folder, fitted: ["fit", "", "--out", "run"], "'.' is a folder; give a CSV"),
    "a name with a null": (lambda folder, fitted: ["fit", "a\0b.csv", "--out", "run"], "a\\x00b.csv"),
    "reproduce a path": (lambda folder, fitted: ["reproduce", "../co2"], "unknown experiment '../co2'; choose from"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line(name: str, fitted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, message = MISTAKES[name]
    monkeypatch.chdir(tmp_path)
    arguments = make(tmp_path, fitted)
    before = contents(tmp_path), contents(fitted)
    done = run(*arguments)
    assert done.exit_code == 2, done.output
    (said,) = done.stderr.strip().splitlines()
    assert said.startswith("pyro-dropout: ")
    assert message in said
    assert done.stdout == ""
    assert (contents(tmp_path), contents(fitted)) == before


def test_a_mistake_in_a_process_of_its_own(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pyro_dropout", "fit", "x.csv", "--out", "run", "--lr", "fast"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert done.stderr.startswith("pyro-dropout: Invalid value for '--lr'")
