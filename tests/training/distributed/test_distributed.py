"""Several processes train one model: nothing is left out, nothing is counted twice, and none waits for ever.

One launch of torchrun does most of it, for most of its time is imports; the tests read what each rank has written.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import pyro_dropout as pd
from pyro_dropout.cli.main import main
from pyro_dropout.training.distributed.process_group import Group, join, local_device
from tests.training.ranks import (
    dropout_line,
    wave,
    without_noise,
)

ROOT = Path(__file__).parents[3]
CASES = ("exactness", "masks", "mistakes", "checkpoints")
Found = dict[str, list[Any]]


def torchrun(*words: str, processes: int = 2) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error::FutureWarning:pyro_dropout"}
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=environment, **pipes) as running:
        try:
            said, complained = running.communicate(timeout=900)
        except subprocess.TimeoutExpired:
            running.terminate()  # by which torchrun ends its workers, who would outlive a kill
            raise
    return subprocess.CompletedProcess(command, running.returncode, said, complained)


def ranks(folder: Path, *cases: str, options: tuple[str, ...] = (), processes: int = 2) -> Found:
    """What every rank found in each case."""
    done = torchrun(*options, "-m", "tests.training.ranks", str(folder), *cases, processes=processes)
    assert done.returncode == 0, done.stderr[-5000:]
    return {
        case: [json.loads((folder / f"{case}.{rank}.json").read_text()) for rank in range(processes)] for case in cases
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def found(folder: Path) -> Found:
    return ranks(folder, *CASES)


# --- one training on two ranks ----------------------------------------------------------------------------------------


@pytest.mark.deep
def test_without_noise_early_stopping_is_that_of_one_process(found: Found) -> None:
    """Random trainings without noise are compared with one process in ``tests/oracles/differential``."""
    first, second = (each["validation"] for each in found["exactness"])
    alone = without_noise("validation", distributed=False)
    assert first["hash"] == second["hash"]
    torch.testing.assert_close(first["losses"], alone["losses"], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(first["validation"], alone["validation"], rtol=1e-12, atol=1e-12)


@pytest.mark.deep
def test_running_means_are_those_of_all_shares(found: Found) -> None:
    first, second = (each["batch norm"] for each in found["exactness"])
    assert first["hash"] == second["hash"]
    alone = without_noise("batch norm", distributed=False)
    # Each rank normalises by its own half of a batch, so the trainings part; what they saw of the data does not.
    torch.testing.assert_close(
        first["seen"]["net.1.running_mean"], alone["seen"]["net.1.running_mean"], rtol=0, atol=0.1
    )
    assert first["seen"]["net.1.num_batches_tracked"] == 20


@pytest.mark.deep
def test_each_rank_has_masks_of_its_own(found: Found) -> None:
    first, second = (each["parts"] for each in found["masks"])
    assert all(a != b for a, b in zip(first, second, strict=True))


# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.deep
@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("small batch", "RangeError: a batch has 1 points, fewer than the 2 processes"),
        ("few points", "RangeError: a batch has 1 points, fewer than the 2 processes"),
        ("compile", "PyroDropoutError: compile=True and distributed=True cannot be combined"),
        ("other data", "PyroDropoutError: the 2 processes were not given the same: y differ"),
        ("other steps", "PyroDropoutError: the 2 processes were not given the same: steps differ"),
        ("diverged", "DivergedError: the loss is nan at step 1"),
        ("no folder", "PyroDropoutError: checkpoint must be a folder"),
        ("ensemble", "PyroDropoutError: distributed=True shares a batch among processes"),
        ("all well", ""),
    ],
)
def test_a_mistake_is_told_by_all_ranks(found: Found, case: str, words: str) -> None:
    first, second = (each[case] for each in found["mistakes"])
    assert first.startswith(words)
    assert second.startswith(words)
    assert bool(words) == bool(first)


def environment(monkeypatch: pytest.MonkeyPatch, **given: str) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)


TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "lacks RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT: start the script with torchrun"),
        ({**TORCHRUN, "MASTER_ADDR": ""}, "lacks MASTER_ADDR"),
        ({**TORCHRUN, "WORLD_SIZE": "two"}, "WORLD_SIZE in the environment must be a whole number; got 'two'"),
        ({**TORCHRUN, "RANK": "2"}, "RANK must lie between 0 and WORLD_SIZE - 1 = 1; got 2"),
    ],
)
def test_a_process_that_torchrun_did_not_start(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], words: str
) -> None:
    environment(monkeypatch, **given)
    model, guide = dropout_line()
    x, y = torch.ones(4, 1), torch.ones(4, 2)
    for call in (lambda: pd.fit(model, guide, x, y, steps=2, progress=False, distributed=True),):
        with pytest.raises(pd.errors.PyroDropoutError, match=words):
            call()


def test_only_the_cpu_and_cuda_take_part(monkeypatch: pytest.MonkeyPatch) -> None:
    environment(monkeypatch, **TORCHRUN)
    with pytest.raises(pd.errors.PyroDropoutError, match="the device is 'mps'"):
        join("mps")


def test_a_process_takes_the_gpu_of_its_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    environment(monkeypatch, **{**TORCHRUN, "LOCAL_RANK": "1"})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert local_device("cuda", "cpu") == local_device(None, "cuda:0") == torch.device("cuda:1")
    assert local_device("cuda:0", "cpu") == torch.device("cuda:0")  # named by number
    assert local_device(None, "cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(pd.errors.PyroDropoutError, match="at most 1 processes"):
        local_device("cuda", "cpu")


@pytest.mark.parametrize("count", [2, 3, 7, 16])
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_shares_leave_nothing_out(count: int, world: int) -> None:
    everything = list(range(count))
    groups = [Group(rank, world) for rank in range(world)]
    assert [each for group in groups for each in everything[group.share(count)]] == everything


# --- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.deep
def test_stopped_trainings_end_as_whole_ones_do(found: Found, folder: Path) -> None:
    first, second = found["checkpoints"]
    assert first == second
    assert first["cut"] == first["terminated"] == first["interrupted"] == first["whole"]
    assert first["cut at"] == ["step-000000000010.safetensors", "step-000000000020.safetensors"]
    assert first["terminated by"] == "SystemExit 143"
    assert first["interrupted by"] == "KeyboardInterrupt"


@pytest.mark.deep
def test_a_rank_that_is_killed_is_started_again(found: Found, tmp_path: Path) -> None:
    options = ("--max-restarts", "3")
    first, second = ranks(tmp_path, "elastic", options=options)["elastic"]
    assert first == second == {"hash": found["checkpoints"][0]["whole"], "restarts": "1"}


@pytest.mark.deep
def test_another_number_of_processes_cannot_go_on(found: Found, folder: Path) -> None:
    x, y = wave(50)
    torch.manual_seed(100)
    net = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.BatchNorm1d(8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    model = pd.BayesianNet(net, likelihood=pd.Gaussian(10.0, learn=True))
    guide = pd.AutoDropout(model, keep=0.9)
    words = "a distributed training run on 2 processes, but this is a training run in one process"
    with pytest.raises(pd.errors.PyroDropoutError, match=words):
        pd.fit(model, guide, x, y, steps=40, compile=False, progress=False, checkpoint=folder / "cut")


# --- commands --------------------------------------------------------------------------------------------------------


@pytest.mark.deep
def test_torchrun_starts_the_command(tmp_path: Path) -> None:
    x, y = wave(40)
    rows = [f"{a:.6f},{b:.6f}" for a, b in zip(x.flatten().tolist(), y.flatten().tolist(), strict=True)]
    (tmp_path / "wave.csv").write_text("\n".join(["x,y", *rows]) + "\n")
    words = [
        "-m",
        "pyro_dropout",
        "fit",
        str(tmp_path / "wave.csv"),
        "--target",
        "y",
        "--steps",
        "200",
        "--guide",
        "dropout",
    ]
    done = torchrun(*words, "--out", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("200 steps, loss") == 1
    assert (tmp_path / "run" / "posterior.safetensors").exists()
    done = torchrun(*words, "--out", str(tmp_path / "run"))
    assert done.returncode != 0
    assert "already holds a run" in done.stderr


def test_the_command_refuses_an_ensemble_at_the_door(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environment(monkeypatch, **TORCHRUN)
    (tmp_path / "wave.csv").write_text("x,y\n1,2\n")
    for guide, said in ((), "may choose an ensemble"), (("--guide", "ensemble"), "is an ensemble"):
        words = ["fit", str(tmp_path / "wave.csv"), "--target", "y", "--out", str(tmp_path / "run"), *guide]
        assert main(words) != 0
        assert said in " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert not (tmp_path / "run").exists()
