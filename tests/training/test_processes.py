"""Two processes that torchrun starts train one model: ``torchrun ... -m tests.training.test_processes FOLDER CASE``.

Every rank writes what it found, as JSON, to FOLDER/CASE.RANK.json, and the tests read it.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn
from torch.distributed.run import get_args_parser

import pyro_dropout as pd
from tests.own_process import ROOT, python

HELD = torch.linspace(-1, 1, 9, dtype=torch.float64).unsqueeze(-1)
EXACT: Any = {"keep": 1.0, "validation": (HELD, HELD), "patience": 2, "check_every": 7, "steps": 60}
Found = dict[str, Any]


def here() -> int:
    return int(os.environ.get("RANK", "0"))


class Fragile(pd.Gaussian):
    """Fails on one rank, whose share of a batch this is."""

    def distribution(self, f: Tensor) -> Any:
        if here() == 1 and f.shape[-2] == 8:
            raise KeyError("only here")
        return super().distribution(f)


def train(keep: float = 0.8, norm: bool = False, start: int = 0, distributed: bool = True, **how: Any) -> Found:
    generator = torch.Generator().manual_seed(1)
    x = torch.linspace(-1, 1, 48, dtype=torch.float64).unsqueeze(-1)
    y = torch.sin(3 * x) + 0.1 * torch.randn(48, 1, generator=generator).double() + how.pop("shift", 0)
    torch.manual_seed(start)
    net = nn.Sequential(nn.Linear(1, 8), *([nn.BatchNorm1d(8)] if norm else []), nn.Tanh(), nn.Linear(8, 1))
    model = pd.BayesianNet(net.double(), likelihood=how.pop("kind", pd.Gaussian)(10.0, learn=True)).double()
    guide = how.pop("made", lambda model: pd.AutoDropout(model, keep=keep))(model)
    how = {"steps": 30, "batch_size": 16, "lr": 1e-2, "seed": 5, "progress": False} | how
    history = pd.fit(model, guide, x, y, distributed=distributed, **how)
    state = {name: value.tolist() for name, value in (*model.state_dict().items(), *guide.state_dict().items())}
    found = {"losses": history.losses.tolist(), "watched": history.validation, "state": state}
    return {**found, "hash": hashlib.sha256(json.dumps(found).encode()).hexdigest()}


def said(**how: Any) -> str:
    try:
        train(**how)
    except (pd.errors.PyroDropoutError, KeyError, SystemExit) as end:
        return f"{type(end).__name__}: {end}"
    return ""


def asked_to_end(number: int, at: int, folder: Path, marker: Path) -> Any:
    """A schedule that sends a signal to one rank, once a training has begun."""

    def schedule(t: Tensor) -> Tensor:
        if int(t) == at and here() == 1 and folder.exists() and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), number)
        return torch.ones_like(t)

    return {"schedule": schedule, "checkpoint": pd.training.Checkpoint(folder, every=10), "norm": True}


def cases(folder: Path) -> Found:
    ended = asked_to_end(signal.SIGTERM, 5, folder / "terminated", folder / "terminated.once")
    return {
        "exact": train(**EXACT),
        "whole": train(batch_size=None, keep=1.0),
        "norm": train(norm=True),
        "data": said(shift=here()),
        "start": said(start=here()),
        "steps": said(steps=20 + here()),
        "fragile": said(kind=Fragile),
        "diverged": said(lr=1e300, optim="sgd"),
        "terminated": said(**ended),
        "resumed": train(**ended),
        "uneven": said(batch_size=15),
        "compile": said(compile=True),
        "ensemble": said(made=pd.Ensemble),
        "seed": said(seed=None),
    }


def killed(folder: Path) -> Found:
    return {"hash": train(**asked_to_end(signal.SIGKILL, 25, folder / "kept", folder / "once"))["hash"]}


def ranks(folder: Path, case: str, restarts: int = 0) -> list[Found]:
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--max-restarts={restarts}"]
    words = ["-m", "tests.training.test_processes", folder, case]
    python(*torchrun, *words, seconds=500, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    return [json.loads((folder / f"{case}.{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    return ranks(tmp_path_factory.mktemp("ranks"), "cases")


@pytest.mark.deep
@pytest.mark.parametrize(("case", "how"), [("exact", EXACT), ("whole", {"batch_size": None, "keep": 1.0})])
def test_without_noise_ranks_are_equal_and_do_what_one_process_does(found: list[Found], case: str, how: Any) -> None:
    first, second = (each[case] for each in found)
    assert first == second
    alone = train(distributed=False, compile=False, **how)
    for part in ("losses", "watched", "state"):
        torch.testing.assert_close(first[part], json.loads(json.dumps(alone[part])), rtol=1e-6, atol=1e-6)


@pytest.mark.deep
def test_a_signal_to_one_rank_ends_both_and_training_continues(found: list[Found], tmp_path: Path) -> None:
    first, second = found
    assert first["norm"] == second["norm"] == first["resumed"] == second["resumed"]
    again = ranks(tmp_path, "killed", restarts=1)
    assert (tmp_path / "once").exists()
    assert [each["hash"] for each in again] == [first["norm"]["hash"]] * 2


@pytest.mark.deep
def test_a_mistake_is_told_by_all_ranks(found: list[Found]) -> None:
    same, never = (
        "PyroDropoutError: the 2 processes were not given the same",
        "PyroDropoutError: distributed=True does not",
    )
    words = {"data": same, "start": same, "steps": same, "diverged": "DivergedError", "terminated": "SystemExit: 143"}
    words |= {"uneven": "PyroDropoutError: batch_size", "compile": never, "ensemble": never, "seed": never}
    for rank, each in enumerate(found):
        for case, start in words.items():
            assert each[case].startswith(start), (rank, case, each[case])
    assert found[0]["fragile"].startswith("PyroDropoutError: another of the 2 processes failed")
    assert found[1]["fragile"].startswith("KeyError")


@pytest.mark.deep
def test_the_script_for_slurm_runs_the_example_of_the_page(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "scaling.md").read_text("utf-8")
    (tmp_path / "train.py").write_text(page.split("```python\n")[1].split("```")[0], "utf-8")
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    own = {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""}  # both ranks write to one pipe: whole lines, not words
    how = {**os.environ, "PROCESSES_PER_NODE": "2", "PATH": programs, **own}
    command = ["bash", str(ROOT / "docs" / "scripts" / "slurm.sh"), "train.py"]
    done = subprocess.run(command, cwd=tmp_path, env=how, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == ["50 (256, 1)"] * 2


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_script_for_slurm_starts_a_step_that_is_signalled_and_has_all_cores(tmp_path: Path, nodes: int) -> None:
    for name, text in (("srun", 'echo "$SRUN_CPUS_PER_TASK" "$@"'), ("scontrol", "printf 'first\\nsecond\\n'")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "17", "SLURM_JOB_NUM_NODES": str(nodes), "SLURM_CPUS_PER_TASK": "16"}
    how = {**os.environ, **slurm, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["bash", str(ROOT / "docs" / "scripts" / "slurm.sh"), "train.py"]
    cores, program, *words = subprocess.run(command, env=how, capture_output=True, text=True, check=True).stdout.split()
    assert (cores, program) == ("16", "torchrun")
    asked = get_args_parser().parse_args(words)
    assert (asked.nnodes, asked.nproc_per_node, asked.rdzv_id) == (str(nodes), "4", "17")
    assert (asked.rdzv_endpoint, asked.training_script) == ("first:29400", "train.py")


def test_the_words_for_kubernetes_are_those_of_torchrun() -> None:
    documents = list(yaml.safe_load_all((ROOT / "docs" / "scripts" / "kubernetes.yaml").read_text("utf-8")))
    service, job = documents
    pods = job["spec"]["template"]["spec"]
    (container,) = pods["containers"]
    asked = get_args_parser().parse_args(container["command"][1:])
    assert container["command"][0] == "torchrun"
    assert int(asked.nnodes) == job["spec"]["completions"] == job["spec"]["parallelism"]
    assert int(asked.nproc_per_node) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert asked.rdzv_endpoint == f"{job['metadata']['name']}-0.{service['metadata']['name']}:29400"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert pods["subdomain"] == service["metadata"]["name"]
    assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in pods["volumes"]}


def test_without_torchrun_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert "start the script with torchrun" in said()


if __name__ == "__main__":
    where, name = Path(sys.argv[1]), sys.argv[2]
    (where / f"{name}.{here()}.json").write_text(json.dumps({"cases": cases, "killed": killed}[name](where)))
