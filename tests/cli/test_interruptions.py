"""What interrupts a command: kills, limits on files, permissions, clocks that jump, and a notebook's button."""

import os
import random
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pyro
import pytest
import torch

import pyro_dropout as pd
from pyro_dropout.tabular.recipe import Recipe
from tests.cli.command import contents, run, trees, written
from tests.cli.kills import comparisons, fits, predicted

FIT = ["--guide", "dropout", "--width", 5, "--steps", 40, "--checkpoint-every", 10, "--no-compile", "--quiet"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table and a run on it that nothing disturbed; not to be written to."""
    folder = tmp_path_factory.mktemp("whole")
    assert run("fit", written(folder, trees()), "--out", folder / "run", *FIT).exit_code == 0
    predicted(folder / "run", folder / "table.csv")
    return folder


def answers(whole: Path) -> bytes:
    return (whole / "predictions.csv").read_bytes()


@pytest.mark.deep
def test_fifty_kills_of_fit(tmp_path: Path) -> None:
    assert fits(tmp_path, 50, random.Random(1)) >= 5


@pytest.mark.deep
def test_fifty_kills_of_compare(tmp_path: Path) -> None:
    assert comparisons(tmp_path, 50, random.Random(2)) >= 1


# --- files that cannot be written -------------------------------------------------------------------------------------


def limited(size: int, *words: object) -> tuple[int, str]:
    """Run a command in a child whose files have at most this size; return its exit code and what it says."""
    back, forth = os.pipe()
    child = os.fork()
    if not child:
        code = 99
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
            done = run(*words)
            code = done.exit_code
            os.write(forth, done.stderr.encode())
        finally:
            os._exit(code)
    os.close(forth)
    with open(back, encoding="utf-8") as file:
        said = file.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), " ".join(said.split())


@pytest.mark.deep
def test_files_that_grow_too_large(whole: Path, tmp_path: Path) -> None:
    data, out = whole / "table.csv", tmp_path / "run"
    code, said = limited(500, "fit", data, "--out", out, *FIT)  # not even the record
    assert (code, contents(tmp_path)) == (2, {})
    assert "run.json: File too large. Free some space, or save to another disk." in said
    code, said = limited(500, "predict", whole / "run", data, "--out", tmp_path / "answers.csv")
    assert (code, contents(tmp_path)) == (2, {})
    assert "answers.csv: File too large. Free some space, or save to another disk." in said
    code, said = limited(3000, "fit", data, "--out", out, *FIT)  # the record alone
    assert code == 2
    assert "the checkpoint of step 20 cannot be written: File too large. Training continues" in said
    assert "Training continues; there is no checkpoint yet" in said
    assert "posterior.safetensors' cannot be written: File too large" in said
    assert "to train again (there is no checkpoint): pyro-dropout resume" in said
    assert [name for name, what in contents(out).items() if what is not None] == ["run.json"]
    assert run("resume", out, "-q").exit_code == 0
    assert predicted(out, data) == answers(whole)


# --- time, and a person -----------------------------------------------------------------------------------------------


def interrupts(count: int) -> Iterator[float]:
    """Seconds of the processor, not of the clock: on a busy machine most would come before the first step."""
    dice = random.Random(count)
    yield from (dice.uniform(0.0005, 0.3) for _ in range(count))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a press that Python dropped
@pytest.mark.parametrize("count", [8, pytest.param(200, marks=pytest.mark.deep)])
def test_the_interrupt_button_of_a_notebook(count: int) -> None:
    """A notebook sends SIGINT anywhere in ``fit``: model and guide stay usable, with what was learned."""

    def pressed(number: int, frame: FrameType | None) -> None:
        signal.raise_signal(signal.SIGINT)

    x = torch.linspace(-1, 1, 30).unsqueeze(-1)
    model = pd.BayesianNet(torch.nn.Sequential(torch.nn.Linear(1, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1)))
    guide = pd.AutoMeanField(model)
    quiet: Any = {"compile": False, "progress": False, "batch_size": 10}
    before, seen = signal.signal(signal.SIGPROF, pressed), 0
    handler = signal.default_int_handler
    given = signal.signal(signal.SIGINT, handler)  # a shell starts commands in the background with SIGINT ignored
    try:
        for after in interrupts(count):
            start = {name: value.clone() for name, value in guide.state_dict().items()}
            # Python drops an interrupt that comes while a destructor runs, such as torch's of a tensor: press again.
            signal.setitimer(signal.ITIMER_PROF, after, 10.0)
            with pytest.raises(KeyboardInterrupt):
                pd.fit(model, guide, x, x, steps=10**6, **quiet)
            signal.setitimer(signal.ITIMER_PROF, 0)
            assert not pyro.poutine.runtime._PYRO_STACK
            assert torch.is_grad_enabled()
            assert signal.getsignal(signal.SIGINT) is handler
            assert all(value.isfinite().all() for value in guide.state_dict().values())
            seen += any(not torch.equal(value, start[name]) for name, value in guide.state_dict().items())
            assert pd.predict(model, guide, x, samples=3).mean.isfinite().all()
            assert pd.fit(model, guide, x, x, steps=2, **quiet).steps == 2
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
        signal.signal(signal.SIGINT, given)
    assert seen >= count // 4  # most interrupts came after some steps, and these are kept


@pytest.mark.deep
def test_trainings_that_choose_are_not_repeated(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted after each training that chooses: the same command ends as if nothing had been."""
    data, out, real = whole / "table.csv", tmp_path / "run", Recipe.predict
    words = ["fit", data, "--out", out, *FIT]
    first: list[int] = []
    for after in (1, 2):
        asked = iter(range(1, after))

        def predict(*args: Any, asked: Iterator[int] = asked, **options: Any) -> Any:
            if next(asked, None) is None:
                raise KeyboardInterrupt
            return real(*args, **options)

        monkeypatch.setattr(Recipe, "predict", predict)
        done = run(*words)
        assert done.exit_code == 130
        assert "choosing. To continue, give the same command again." in " ".join(done.stderr.split())
        assert len(list((out / "choosing").rglob("step-*"))) == after
        first += [path.stat().st_mtime_ns for path in (out / "choosing").rglob("training-1/step-*")]
    assert len(set(first)) == 1
    assert "give the same fit command again" in run("resume", out).stderr
    monkeypatch.setattr(Recipe, "predict", real)
    assert run(*words).exit_code == 0
    assert not (out / "choosing").exists()
    assert predicted(out, data) == answers(whole)


@pytest.mark.deep
def test_sigterm_before_the_first_checkpoint_of_a_run(tmp_path: Path) -> None:
    """Which guide to take is chosen first; these trainings have checkpoints of their own."""
    table, out = written(tmp_path, trees()), tmp_path / "run"
    words = ["fit", table, "--target", "kind", "--steps", "10000000", "--out", out]
    command = [sys.executable, "-m", "pyro_dropout", *map(str, words)]
    said = b""
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, bufsize=0) as process:
        assert process.stderr is not None
        while b"loss" not in said and process.poll() is None:  # the bar of the choice, after the first steps
            said += process.stderr.read(100) or b""
        process.terminate()
        said += process.stderr.read()
    assert process.returncode == 143
    assert b"training can resume from step" in said
    assert b"stopped; the trainings that choose what to train are kept in" in said
    assert b"Traceback" not in said
    assert run(*words[:5], "3", *words[6:], "--quiet").exit_code == 0
