"""The runs that are attacked, one attack in a process of its own, and what is said of it.

An attacked run either answers as the untouched one, bit for bit, or is refused: exit code 2 and one line on stderr.
"""

import contextlib
import json
import os
import random
import resource
import shutil
import signal
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from typer.testing import CliRunner

from pyro_dropout.cli.main import app
from tests.attacks import folders, records
from tests.cli.command import contents, houses, trees, written

COMMANDS = ("predict", "predict --plot", "resume")
HANG = 10  # seconds
VERDICTS = ("refused", "same answers", "traceback", "hang", "memory", "different answers", "wrote elsewhere", "other")
GOOD = VERDICTS[:2]
_FIT = ["--guide", "dropout", "--width", "4", "--steps", "3", "--no-compile", "--quiet", "--device", "cpu"]
_ROOM = 3 * 2**30  # bytes that an attacked process may have more than at its start


@dataclass(frozen=True)
class Attack:
    """One attack: what is attacked, with which command, by which kind of mutation ("" for none), and its seed."""

    run: str
    command: str
    kind: str
    seed: int


@dataclass
class Outcome:
    """What came of an attack."""

    verdict: str
    what: str  # was changed
    said: str
    memory: int = 0  # KiB


@dataclass
class Arena:
    """Runs on two tables, runs to exchange files with, and the answers of the untouched runs."""

    root: Path
    answers: dict[str, bytes] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)

    @classmethod
    def built(cls, root: Path) -> "Arena":
        """Train the runs in a folder."""
        # the fill of gaps, categories, classes; and twins of equal shapes on other tables, and with other guides
        gaps, swapped = ["--missing", "auto"], str.maketrans("ab", "ba")
        tables: dict[str, tuple[str, list[str]]] = {
            "houses": (houses() + "70,,200\n", gaps),
            "trees": (trees(), []),
            "others/houses": (houses().translate(swapped).replace("breb,town", "area,town") + "71,,200\n", gaps),
            "others/trees": (trees().replace("width,age", "age,width"), []),
            "others/mean-field": (trees(), ["--guide", "mean-field"]),
        }
        (root / "others").mkdir(parents=True)
        for name, (text, options) in tables.items():
            data = written(root, text, f"{name.replace('/', '-')}.csv")
            code, said, _ = called("fit", data, "--out", root / name, *_FIT, *options)
            assert code == 0, said
        arena = cls(root)
        for name in ("houses", "trees"):
            with arena.copied(name) as run:
                code, said, arena.answers[name] = arena.asked(run, name, "predict")
                assert code == 0, said
        return arena

    @contextlib.contextmanager
    def copied(self, name: str) -> Any:
        """Yield a copy of a run, in a folder of its own with an empty folder "far" beside it."""
        with tempfile.TemporaryDirectory(dir=self.root, ignore_cleanup_errors=True) as place:
            (Path(place) / "far").mkdir()
            yield Path(shutil.copytree(self.root / name, Path(place) / "run"))

    def asked(self, run: Path, name: str, command: str) -> tuple[int | str, list[str], bytes]:
        """Return the exit code of a command on a run, what it says, and the predictions."""
        out = run.parent / "predictions.csv"
        if command == "resume":
            code, said, _ = called("resume", run, "--quiet", "--device", "cpu")
            if code != 0:
                return code, said, b""
        plot = ["--plot", run.parent / "p.png"] if command == "predict --plot" else []
        how = ["--samples", 5, "--quiet", "--device", "cpu", *plot]
        code, said, _ = called("predict", run, self.root / f"{name}.csv", "--out", out, *how)
        return code, said, out.read_bytes() if out.exists() else b""

    def attacked(self, attack: Attack) -> Outcome:
        """Attack a copy of a run in this process."""
        with self.copied(attack.run) as run:
            dice, far, command, what = random.Random(attack.seed), run.parent / "far", attack.command, ""
            if attack.kind in records.KINDS:
                before = json.loads((run / "run.json").read_text("utf-8"))
                what = records.mutate(run, attack.kind, dice)
                if command == "resume" and not _same_steps(before, run / "run.json"):
                    command = "predict"  # more steps are allowed, and change the answers
            elif attack.kind:
                what = folders.KINDS[attack.kind](run, far, self.root / "others", dice)
            elsewhere = contents(far), contents(self.root / "others")
            code, said, answer = self.asked(run, attack.run, command)
            intact = elsewhere == (contents(far), contents(self.root / "others"))
        errors = [line for line in said if not line.startswith("pyro-dropout: note: ")]
        if isinstance(code, str):
            return Outcome("traceback", what, code)
        if not intact:
            return Outcome("wrote elsewhere", what, "")
        if code == 0:
            return Outcome("same answers" if answer == self.answers[attack.run] else "different answers", what, "")
        fair = code == 2 and len(errors) == 1 and errors[0].startswith("pyro-dropout: ") and not answer
        return Outcome("refused" if fair else "other", what, f"{code}: {' '.join(said)[:300]}")

    def in_a_process(self, attack: Attack) -> Outcome:
        """Attack in a forked process, which is ended if it hangs and whose memory is measured."""
        back, forth = os.pipe()
        child = os.fork()
        if not child:
            try:
                signal.alarm(HANG)
                resource.setrlimit(resource.RLIMIT_AS, (_size() + _ROOM,) * 2)
                outcome = self.attacked(attack)
                os.write(forth, json.dumps([outcome.verdict, outcome.what[:500], outcome.said]).encode())
            finally:
                os._exit(0)
        os.close(forth)
        _, status, usage = os.wait4(child, 0)
        with open(back, "rb") as file:
            found = file.read()
        if not found:
            hung = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM
            return Outcome("hang" if hung else "other", "", f"status {status}", usage.ru_maxrss)
        outcome = Outcome(*json.loads(found), memory=usage.ru_maxrss)
        most = self.memory.get(attack.command)
        if most and outcome.memory > most:
            outcome.verdict = "memory"
        return outcome

    def measure(self) -> None:
        """Allow twice the memory of an untouched run for each command."""
        for command in COMMANDS:
            untouched = Attack("trees", command, "", 0)
            assert self.attacked(untouched).verdict == "same answers"  # it imports for all processes, too
            self.memory[command] = 2 * self.in_a_process(untouched).memory


def called(*arguments: object) -> tuple[int | str, list[str], str]:
    """Return the exit code of a command, or its traceback's last line, and the lines that it says on stderr."""
    done = CliRunner().invoke(app, [str(part) for part in arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        return f"{type(done.exception).__name__}: {done.exception}"[:300], [], ""
    return done.exit_code, done.stderr.strip().splitlines(), done.stdout


def plan(kinds: list[str], count: int, seed: int) -> list[Attack]:
    """Return attacks of these kinds: predict most often, and each of two runs."""
    dice = random.Random(seed)
    return [
        Attack(dice.choice(["houses", "trees"]), dice.choices(COMMANDS, [6, 1, 3])[0], kinds[k % len(kinds)], seed + k)
        for k in range(count)
    ]


def _same_steps(before: Any, path: Path) -> bool:
    try:
        return bool(before["training"]["steps"] == json.loads(path.read_bytes())["training"]["steps"])
    except (ValueError, LookupError, TypeError, RecursionError):
        return True


def _size() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


torch.set_num_threads(1)  # a forked process has no threads of its parent
