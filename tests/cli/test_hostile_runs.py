"""A run folder under hostile use: its files belong together, are its own, and are used by one process at a time."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pyro_dropout.training.checkpoints.safe_files import LOCK, claimed
from tests.cli.command import FEW, contents, run, trees, written

PLAIN = ["--guide", "dropout", *FEW]


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of equal shapes on different tables, and their tables; not to be written to."""
    folder = tmp_path_factory.mktemp("twins")
    tables = {"one": trees(), "two": trees().replace("width,age,kind", "age,width,kind")}
    for name, text in tables.items():
        done = run("fit", written(folder, text, f"{name}.csv"), "--out", folder / name, *PLAIN)
        assert done.exit_code == 0, done.stderr
    return folder


def predicted(folder: Path, data: Path, *options: object) -> tuple[int, str]:
    out = folder.parent / "predictions.csv"
    done = run("predict", folder, data, "--out", out, "--samples", 5, "--quiet", *options)
    assert (done.exit_code == 0) == out.exists()
    return done.exit_code, " ".join(done.stderr.split())


def edited(folder: Path, change: Callable[[dict], object]) -> None:  # type: ignore[type-arg]
    path = folder / "run.json"
    record = json.loads(path.read_text("utf-8"))
    change(record)
    path.write_text(json.dumps(record), "utf-8")


# --- one run, one identity --------------------------------------------------------------------------------------------


def test_the_path_of_the_data_may_be_edited(twins: Path, tmp_path: Path) -> None:
    shutil.copytree(twins / "one", tmp_path / "run")
    shutil.copy(twins / "one.csv", tmp_path / "moved.csv")
    edited(tmp_path / "run", lambda record: record["data"].update(file=str(tmp_path / "moved.csv")))
    assert predicted(tmp_path / "run", twins / "one.csv")[0] == 0
    assert run("resume", tmp_path / "run", "--quiet").exit_code == 0
    (tmp_path / "moved.csv").rename(tmp_path / "again.csv")
    done = run("resume", tmp_path / "run", "--data", tmp_path / "again.csv", "--quiet")
    assert done.exit_code == 0, done.stderr
    (tmp_path / "predictions.csv").unlink()
    assert predicted(tmp_path / "run", twins / "one.csv")[0] == 0


# --- one process at a time --------------------------------------------------------------------------------------------


def test_two_processes_do_not_write_into_one_folder(twins: Path, tmp_path: Path) -> None:
    shutil.copytree(twins / "one", tmp_path / "run")
    before = contents(tmp_path / "run")
    for command in (["resume", tmp_path / "run"], ["fit", twins / "two.csv", "--out", tmp_path / "new", *PLAIN]):
        folder = tmp_path / ("run" if command[0] == "resume" else "new")
        with claimed(folder, make=True):
            done = run(*command)
        assert (done.exit_code, "is in use: another process is writing to it" in done.stderr) == (2, True)
    assert contents(tmp_path) == {"run": None} | {f"run/{name}": what for name, what in before.items()}


def test_a_killed_process_holds_nothing(twins: Path, tmp_path: Path) -> None:
    script = (
        "import sys, pathlib; from pyro_dropout.training.checkpoints.safe_files import claimed\n"
        "with claimed(pathlib.Path(sys.argv[1]), make=True): print('held', flush=True); sys.stdin.read()"
    )
    out = tmp_path / "run"
    command = [sys.executable, "-c", script, str(out)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        assert "is in use" in run("fit", twins / "one.csv", "--out", out, *PLAIN).stderr
        other.kill()
    assert (out / LOCK).exists()
    (out / ".abcd_123-run.json").write_text("{")  # as if it had been writing
    done = run("fit", twins / "one.csv", "--out", out, *PLAIN)
    assert done.exit_code == 0, done.stderr
    assert sorted(path.name for path in out.iterdir()) == ["checkpoints", "posterior.safetensors", "run.json"]
