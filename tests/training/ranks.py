"""What one of several processes does: ``torchrun --nproc-per-node 2 -m tests.training.ranks FOLDER CASE ...``.

Every case is a function below. What it found is written by every rank, as JSON, to FOLDER/CASE.RANK.json.
"""

import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import pyro_dropout as pd
from pyro_dropout.training.checkpoints import training_checkpoint as resumption
from pyro_dropout.training.distributed.process_group import Group, join

QUIET: Any = {"progress": False, "lr": 1e-2}
SEED = 5


def here() -> int:
    """The rank of this process; 0 where there is only one."""
    return int(os.environ.get("RANK", "0"))


def hash_of(*parts: nn.Module) -> str:
    """A hash of every tensor of some modules."""
    found = hashlib.sha256()
    for part in parts:
        for name, value in sorted(part.state_dict().items()):
            found.update(name.encode() + value.numpy().tobytes())
    return found.hexdigest()


def wave(points: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """A curve with noise, the same on every rank."""
    generator = torch.Generator().manual_seed(1)
    x = torch.linspace(-1, 1, points, dtype=dtype).unsqueeze(-1)
    return x, torch.sin(3 * x) + 0.1 * torch.randn(points, 1, generator=generator).to(dtype)


def network(norm: bool = False, dtype: torch.dtype = torch.float32) -> pd.BayesianNet:
    """A network whose weights every rank draws for itself: the first rank's are to win."""
    torch.manual_seed(100 + here())
    middle = [nn.BatchNorm1d(8)] if norm else []
    net = nn.Sequential(nn.Linear(1, 8), *middle, nn.Tanh(), nn.Linear(8, 1)).to(dtype)
    return pd.BayesianNet(net, likelihood=pd.Gaussian(10.0, learn=True)).to(dtype)


# --- trainings that are compared with one process ---------------------------------------------------------------------


def without_noise(case: str, distributed: bool) -> dict[str, Any]:
    """A training in which nothing is random but the order of the data: sharing it must change nothing."""
    x, y = wave(51, torch.float64)
    model = network(norm=case == "batch norm", dtype=torch.float64)
    guide = pd.AutoDropout(model, keep=1.0)
    options: dict[str, Any] = {
        "batch norm": {"batch_size": 50},
        "validation": {"batch_size": 20, "validation": wave(9, torch.float64), "patience": 2, "check_every": 7},
    }[case]
    history = pd.fit(
        model, guide, x, y, **{**QUIET, "steps": 20, "seed": SEED, "compile": False} | options, distributed=distributed
    )
    seen = {name: value.tolist() for name, value in (*guide.mean().items(), *model.named_buffers())}
    seen["tau"] = [p.tolist() for p in model.likelihood.parameters()]
    shown = [list(pair) for pair in history.validation]
    return {"losses": history.losses.tolist(), "seen": seen, "hash": hash_of(model, guide), "validation": shown}


def exactness() -> dict[str, Any]:
    """All of them."""
    return {case: without_noise(case, True) for case in ("batch norm", "validation")}


def masks() -> dict[str, Any]:
    """Ranks with the same data, whose losses differ by their masks alone."""
    parts: list[Tensor] = []
    real = Group.mean

    def noted(self: Group, tensor: Tensor) -> Tensor:
        parts.append(tensor)
        return real(self, tensor)

    model = network()
    with mock.patch.object(Group, "mean", noted):
        x = torch.ones(8, 1)
        pd.fit(model, pd.AutoDropout(model, keep=0.5), x, x, steps=3, seed=SEED, distributed=True, **QUIET)
    return {"parts": parts[0].tolist()}


# --- what goes wrong, and what is asked wrongly -----------------------------------------------------------------------


def mistakes() -> dict[str, Any]:
    """What is said on every rank."""

    def said(**options: Any) -> str:
        model = network()
        x, y = options.pop("data", None) or wave(20)
        try:
            pd.fit(
                model,
                options.pop("made", pd.AutoDropout)(model),
                x,
                y,
                **{"steps": 3, "seed": SEED, "distributed": True, **QUIET, **options},
            )
        except pd.errors.PyroDropoutError as mistake:
            return f"{type(mistake).__name__}: {mistake}"
        return ""

    x, y = wave(20)
    broken = y.clone()
    broken[-1] = float("nan")  # in the last rank's share
    here_only = y + here()
    return {
        "small batch": said(batch_size=1),
        "few points": said(data=(x[:1], y[:1])),
        "compile": said(compile=True),
        "other data": said(data=(x, here_only)),
        "other steps": said(steps=3 + here()),
        "diverged": said(data=(x, broken), steps=30),
        "no folder": said(checkpoint="/dev/null/checkpoints"),
        "ensemble": said(made=pd.Ensemble),
        "all well": said(),
    }


# --- checkpoints ------------------------------------------------------------------------------------------------------


def resumable(folder: Path | None, schedule: Callable[[Tensor], Tensor] | None = None, steps: int = 40) -> str:
    """A training on two ranks with checkpoints; a hash of what it learned and how."""
    x, y = wave(50)
    model = network(norm=True)
    guide = pd.AutoDropout(model, keep=0.9)
    how = None if folder is None else pd.training.Checkpoint(folder, every=10, seconds=1e9, keep_last=2)
    flat = schedule or (lambda t: torch.ones_like(t))
    history = pd.fit(
        model, guide, x, y, steps=steps, batch_size=16, seed=SEED, schedule=flat, checkpoint=how, distributed=True,
        validation=wave(9), patience=99, check_every=10, **QUIET
    )  # fmt: skip
    return hash_of(model, guide) + hashlib.sha256(history.losses.numpy().tobytes()).hexdigest()


class PulledPlugError(BaseException):
    """Ends a training without asking it."""


def checkpoints(folder: Path) -> dict[str, Any]:
    """A training that nobody stops, one that is cut off, and one in which a single rank is asked to end."""
    found: dict[str, Any] = {"whole": resumable(None)}
    real = resumption.Keeper.write

    def cut(self: resumption.Keeper, step: int, losses: Tensor) -> None:
        real(self, step, losses)
        if step == 20:
            raise PulledPlugError

    with mock.patch.object(resumption.Keeper, "write", cut):
        try:
            resumable(folder / "cut")
        except PulledPlugError:
            found["cut at"] = sorted(path.name for path in (folder / "cut").iterdir())
    found["cut"] = resumable(folder / "cut")

    def ask(place: Path, number: int) -> Callable[[Tensor], Tensor]:
        def schedule(t: Tensor) -> Tensor:
            if int(t) == 25 and here() == 1 and place.exists():  # and is not only asked what it would do
                os.kill(os.getpid(), number)
            return torch.ones_like(t)

        return schedule

    for name, number in (("terminated", signal.SIGTERM), ("interrupted", signal.SIGINT)):
        try:
            resumable(folder / name, ask(folder / name, number))
        except (SystemExit, KeyboardInterrupt) as end:
            found[f"{name} by"] = f"{type(end).__name__} {end}".strip()
        found[name] = resumable(folder / name)
    return found


def elastic(folder: Path) -> dict[str, Any]:
    """A training of which one rank is killed once, for torchrun to start again."""
    marker = folder / "killed"

    def schedule(t: Tensor) -> Tensor:
        begun = (folder / "elastic").exists()  # and it is not only asked what it would do
        if int(t) == 25 and here() == 1 and begun and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.ones_like(t)

    return {"hash": resumable(folder / "elastic", schedule), "restarts": os.environ["TORCHELASTIC_RESTART_COUNT"]}


def dropout_line() -> tuple[Any, Any]:
    """A linear function without bias, dropped as a whole or not."""
    torch.manual_seed(0)
    model = pd.BayesianNet(nn.Linear(1, 2, bias=False), likelihood=pd.Gaussian(4.0))
    guide = pd.AutoDropout(model, keep=0.7)
    x = torch.ones(2, 1)
    guide(x, torch.zeros(2, 2))
    with torch.no_grad():
        for k, parameter in enumerate(guide.parameters()):
            parameter.copy_(torch.arange(1.0, 1 + parameter.numel()).reshape(parameter.shape) + k)
    return model, guide


# --- all together -----------------------------------------------------------------------------------------------------

WITHOUT_FOLDER = {each.__name__: each for each in (exactness, masks, mistakes)}
WITH_FOLDER = {each.__name__: each for each in (checkpoints, elastic)}


def main() -> None:
    """Run the cases that are named."""
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    group = join("cpu")
    for name in sys.argv[2:]:
        start = time.perf_counter()
        found = WITHOUT_FOLDER[name]() if name in WITHOUT_FOLDER else WITH_FOLDER[name](folder)
        (folder / f"{name}.{group.rank}.json").write_text(json.dumps(found))
        print(f"{name}: {time.perf_counter() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
