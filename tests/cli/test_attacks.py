"""A run folder under hostile use: its files belong together, are its own, and are used by one process at a time.

Runs whose files were changed answer as untouched ones, bit for bit, or are refused with exit code 2 and one line.
"""

import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pyro_dropout.cli.main import app
from pyro_dropout.tabular.run_folder import identity_of
from pyro_dropout.training.checkpoints.safe_files import LOCK, claimed
from tests.cli.command import contents, houses, trees, without_fsync, written

_FIT = ["--guide", "dropout", "--width", "4", "--steps", "3", "--no-compile", "--quiet", "--device", "cpu"]
_VALUES: list[Any] = [None, True, [], {}, "", "text", "a\0b", "../../run.json", "/dev/zero", "x" * 10_000, "0" * 64]
_VALUES += [-1, 0, 3.5, 2**63, 10**30, 1e308, float("nan"), float("inf"), [[]], {"a": []}]
Change = Callable[[Path, Path, Path, random.Random], None]  # of a run, with an empty folder and one of other runs


def own_files(run: Path) -> list[Path]:
    return [run / "run.json", run / "posterior.safetensors", *sorted((run / "checkpoints").glob("step-*"))]


def leaves(record: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of everything in a record, sections and lists included."""
    inner = record.items() if isinstance(record, dict) else enumerate(record) if isinstance(record, list) else ()
    return [each for key, value in inner for each in ((*path, key), *leaves(value, (*path, key)))]


def record(run: Path, far: Path, others: Path, dice: random.Random) -> None:
    """A value, the order of a list, a key, or the text of the record; half of them with a valid identity."""
    path = run / "run.json"
    text = path.read_text("utf-8")
    found = json.loads(text)
    place = dice.choice([each for each in leaves(found) if each[:2] != ("training", "steps")])
    below = found
    for key in place[:-1]:
        below = below[key]
    kind = dice.choice(["value", "value", "list", "key", "cut", "text"])
    if kind == "value":
        below[place[-1]] = dice.choice(_VALUES)
    elif kind == "list" and isinstance(below[place[-1]], list):
        below[place[-1]] = dice.choice([below[place[-1]][::-1], below[place[-1]] * 2, below[place[-1]][:-1]])
    elif kind == "key":
        del below[place[-1]]
    at = dice.randrange(len(text))
    if kind in ("cut", "text"):
        path.write_text(text[:at] + (dice.choice("{}[],:\"'0\\\0é") + text[at + 1 :]) * (kind == "text"), "utf-8")
        return
    if dice.random() < 0.5:
        with contextlib.suppress(KeyError, AttributeError, TypeError, ValueError):
            found["identity"] = identity_of(found)
    path.write_text(json.dumps(found), "utf-8")


def links(run: Path, far: Path, others: Path, dice: random.Random) -> None:
    path = dice.choice([*own_files(run), run / "checkpoints", run / ".lock"])
    if path.exists():
        path.rename(far / path.name)
    other = others / dice.choice(sorted(os.listdir(others))) / path.relative_to(run)
    path.symlink_to(dice.choice([far / path.name, path, far / "none", Path("/dev/zero"), other]))


def other_kinds(run: Path, far: Path, others: Path, dice: random.Random) -> None:
    """Pipes, folders and files of noise in place of its files, and nothing."""
    path = dice.choice([*own_files(run), run / "checkpoints"])
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    kind = dice.choice(["pipe", "folder", "noise", "nothing"])
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        (path / "mine").mkdir(parents=True)
    elif kind == "noise":
        path.write_bytes(dice.randbytes(dice.choice([0, 1, 8, 1000])))


def files_of_other_runs(run: Path, far: Path, others: Path, dice: random.Random) -> None:
    other = others / dice.choice(sorted(os.listdir(others)))
    what = dice.choice(["run.json", "posterior.safetensors", "checkpoints", "one checkpoint", "cross"])
    if what == "checkpoints":
        shutil.rmtree(run / what)
        shutil.copytree(other / what, run / what)
    elif what == "one checkpoint":
        theirs = dice.choice(own_files(other)[2:])
        shutil.copy(theirs, run / "checkpoints" / dice.choice([theirs.name, "step-000000000004.safetensors"]))
    elif what == "cross":  # the posterior as a checkpoint, or a checkpoint as the posterior
        shutil.copy(*dice.sample([run / "posterior.safetensors", own_files(run)[-1]], 2))
    else:
        shutil.copy(other / what, run / what)


def damage(run: Path, far: Path, others: Path, dice: random.Random) -> None:
    path = dice.choice(own_files(run))
    found = bytearray(path.read_bytes())
    kind = dice.choice(["cut", "flipped", "longer", "sparse", "header"])
    if kind == "cut":
        del found[dice.randrange(len(found)) :]
    elif kind == "flipped":
        found[dice.randrange(len(found))] ^= 1 << dice.randrange(8)
    elif kind == "longer":
        found += dice.randbytes(dice.choice([1, 8, 4096]))
    elif kind == "header":
        found[:8] = dice.choice([0, 1, 7, 2**26, 2**40, 2**63]).to_bytes(8, "little")
    path.write_bytes(found)
    if kind == "sparse":
        os.truncate(path, 2**36)


CHANGES: list[Change] = [record, links, other_kinds, files_of_other_runs, damage]


class Arena:
    """Runs on two tables, runs to exchange files with, and the answers of the untouched runs."""

    def __init__(self, root: Path) -> None:
        # gaps, categories, classes; and twins of equal shapes on other tables, and with another guide
        gaps, swapped = ["--missing", "auto"], str.maketrans("ab", "ba")
        tables: dict[str, tuple[str, list[str]]] = {
            "houses": (houses() + "70,,200\n", gaps),
            "trees": (trees(), []),
            "others/houses": (houses().translate(swapped).replace("breb,town", "area,town") + "71,,200\n", gaps),
            "others/trees": (trees().replace("width,age", "age,width"), []),
            "others/mean-field": (trees(), ["--guide", "mean-field"]),
        }
        self.root = root
        (root / "others").mkdir(parents=True)
        for name, (text, options) in tables.items():
            data = written(root, text, f"{name.replace('/', '-')}.csv")
            assert called("fit", data, "--out", root / name, *_FIT, *options)[0] == 0
        self.answers = {name: self.asked(root / name, name, ["predict"], root)[2] for name in ("houses", "trees")}
        assert all(self.answers.values())

    def asked(
        self, run: Path, name: str, commands: list[str], place: Path, *resume: object
    ) -> tuple[Any, list[str], bytes]:
        """The exit code of commands on a run, what they say, and the predictions."""
        out, code, said = place / "predictions.csv", 0, list[str]()
        ways = {"resume": resume, "predict": [self.root / f"{name}.csv", "--out", out, "--samples", 5]}
        out.unlink(missing_ok=True)
        for command in commands:
            code, said = called(command, run, *ways[command], "--quiet", "--device", "cpu")
            if code != 0:
                break
        return code, said, out.read_bytes() if out.exists() else b""

    def attacked(self, change: Change | None, seed: int) -> str:
        """What comes of an attack on a copy of a run."""
        dice = random.Random(seed)
        name, commands = (
            dice.choice(["houses", "trees"]),
            dice.choice([["predict"], ["predict"], ["resume", "predict"]]),
        )
        with tempfile.TemporaryDirectory(dir=self.root, ignore_cleanup_errors=True) as place:
            far = Path(place) / "far"
            far.mkdir()
            run = Path(shutil.copytree(self.root / name, Path(place) / "run"))
            if change is not None:
                change(run, far, self.root / "others", dice)
            elsewhere = contents(far), contents(self.root / "others")
            code, said, answer = self.asked(run, name, commands, Path(place))
            if elsewhere != (contents(far), contents(self.root / "others")):
                return "wrote elsewhere"
        if code == 0:
            return "same answers" if answer == self.answers[name] else "different answers"
        errors = [line for line in said if not line.startswith("pyro-dropout: note: ")]
        fair = code == 2 and len(errors) == 1 and errors[0].startswith("pyro-dropout: ") and not answer
        return "refused" if fair else f"{code}: {said}"


def called(*arguments: object) -> tuple[int | str, list[str]]:
    """The exit code of a command, or its traceback's last line, and the lines that it says on stderr."""
    done = CliRunner().invoke(app, [str(part) for part in arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        return f"{type(done.exception).__name__}: {done.exception}"[:300], []
    return done.exit_code, done.stderr.strip().splitlines()


@pytest.fixture(scope="module")
def arena(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    with without_fsync():
        yield Arena(tmp_path_factory.mktemp("attacks") / "arena")


@pytest.mark.parametrize("count", [35, pytest.param(400, marks=pytest.mark.deep)])
def test_attacks_are_refused_or_change_nothing(arena: Arena, count: int) -> None:
    found = [(seed, arena.attacked(CHANGES[seed % len(CHANGES)], seed)) for seed in range(count)]
    assert [each for each in found if each[1] not in ("refused", "same answers")] == []
    assert sum(verdict == "refused" for _, verdict in found) > count / 3


def test_the_path_of_the_data_may_be_edited(arena: Arena, tmp_path: Path) -> None:
    run, moved, again = (
        Path(shutil.copytree(arena.root / "trees", tmp_path / "run")),
        tmp_path / "a.csv",
        tmp_path / "b.csv",
    )
    shutil.copy(arena.root / "trees.csv", moved)
    found = json.loads((run / "run.json").read_text("utf-8"))
    found["data"]["file"] = str(moved)
    (run / "run.json").write_text(json.dumps(found), "utf-8")
    ways: list[tuple[list[str], list[object]]] = [
        (["predict", "resume"], []),
        (["resume", "predict"], ["--data", again]),
    ]
    for commands, data in ways:
        code, said, answer = arena.asked(run, "trees", commands, tmp_path, *data)
        assert (code, answer) == (0, arena.answers["trees"]), said
        if not data:
            moved.rename(again)


def test_two_processes_do_not_write_into_one_folder(arena: Arena, tmp_path: Path) -> None:
    shutil.copytree(arena.root / "trees", tmp_path / "run")
    before = contents(tmp_path / "run")
    for command in (["resume", tmp_path / "run"], ["fit", arena.root / "trees.csv", "--out", tmp_path / "new", *_FIT]):
        folder = tmp_path / ("run" if command[0] == "resume" else "new")
        with claimed(folder, make=True):
            code, said = called(*command)
        assert (code, "is in use: another process is writing to it" in " ".join(said)) == (2, True)
    assert contents(tmp_path) == {"run": None} | {f"run/{name}": what for name, what in before.items()}


def test_a_killed_process_holds_nothing(arena: Arena, tmp_path: Path) -> None:
    script = (
        "import sys, pathlib; from pyro_dropout.training.checkpoints.safe_files import claimed\n"
        "with claimed(pathlib.Path(sys.argv[1]), make=True): print('held', flush=True); sys.stdin.read()"
    )
    out = tmp_path / "run"
    fit = ["fit", arena.root / "trees.csv", "--out", out, *_FIT]
    command = [sys.executable, "-c", script, str(out)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        assert "is in use" in " ".join(called(*fit)[1])
        other.kill()
    assert (out / LOCK).exists()
    (out / ".abcd_123-run.json").write_text("{")  # as if it had been writing
    assert called(*fit)[0] == 0
    assert sorted(path.name for path in out.iterdir()) == ["checkpoints", "posterior.safetensors", "run.json"]
