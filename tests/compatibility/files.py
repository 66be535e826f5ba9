"""Small files of a released version: ``python -m tests.compatibility.files 1.0.0``, once, when it is released.

Each version has a folder with what it writes and what it answered: a posterior for each guide, the checkpoints of a
training that stopped half-way, a run folder of the command line, and a benchmark. Later versions read them, or refuse
them by name.
"""

import contextlib
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pandas
import torch
from torch import nn

import pyro_dropout as pd
from pyro_dropout.registry import guides
from pyro_dropout.training.checkpoints.training_checkpoint import Keeper

HERE = Path(__file__).parent / "files"
GUIDES = list(guides())
X = torch.linspace(-1, 1, 12).unsqueeze(-1)
STEPS, STOP = 60, 20
TABLE: dict[str, Any] = {"guide": "mean-field", "noise": "constant", "steps": 8, "width": 3, "progress": False}


class StoppedError(BaseException):
    """Ends a training without asking it."""


def pair(name: str, seed: int = 0) -> tuple[pd.BayesianNet, Any]:
    """A small network and its guide."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1))
    model = pd.BayesianNet(net, likelihood=pd.Gaussian(4.0, learn=True))
    entry = guides()[name]
    few = {"members": 2} if "members" in entry.options else {}
    return model, entry.make(model, lambda site: 0.9, **few)


def trained(name: str, folder: Path | None = None) -> tuple[pd.BayesianNet, Any]:
    """Train a pair for sixty steps, from the checkpoints in a folder if it has some."""
    model, guide = pair(name)
    checkpoint = None if folder is None else pd.training.Checkpoint(folder, every=STOP, seconds=1e9, keep_last=1)
    how: dict[str, Any] = {"batch_size": 4, "lr": 0.01, "compile": False, "progress": False, "seed": 0}
    pd.fit(model, guide, X, X.sin(), steps=STEPS, checkpoint=checkpoint, **how)
    return model, guide


def answers(model: pd.BayesianNet, guide: Any) -> list[list[float]]:
    """Moments of predictions, by the mean and the draws of a posterior."""
    found = pd.predict(model, guide, X, samples=50, seed=0)
    return [found.mean[:, 0].tolist(), found.variance[:, 0].tolist()]


def table() -> pandas.DataFrame:
    """Houses with a gap, two kinds and a date."""
    rows = range(60)
    frame = pandas.DataFrame({"area": [50.0 + 3 * (k * 7 % 30) for k in rows], "kind": ["ab"[k % 3 > 0] for k in rows]})
    frame["built"] = [f"19{60 + k % 40}-05-{1 + k % 28:02d}" for k in rows]
    frame["price"] = 1000 * frame["area"] + 5000 * (frame["kind"] == "a")
    frame.loc[::10, "area"] = None
    return frame


def benchmark(folder: Path) -> Any:
    """Measure one guide on one problem, in a folder of its own."""
    how: dict[str, Any] = {"problems": ["line"], "seeds": 1, "steps": 5, "samples": 50, "progress": False}
    return pd.benchmark.benchmark(["mean-field"], out=folder / "benchmark", **how)


def scores(found: Any) -> dict[str, float]:
    """The scores of the guide on the problem, but for seconds."""
    (row,) = [row for row in found.on("line").rows if row.name == "mean-field"]
    return {name: score.mean for name, score in row.scores.items() if name not in ("seconds", "memory")}


def write(folder: Path) -> None:
    """Write everything that this version can read again."""
    folder.mkdir(parents=True)
    told: dict[str, Any] = {}
    for name in GUIDES:
        model, guide = trained(name)
        pd.save(folder / f"{name}.safetensors", model, guide, extra={"name": name})
        told[name] = answers(model, guide)
    real = Keeper.write

    def write_and_stop(self: Keeper, at: int, losses: torch.Tensor) -> None:
        real(self, at, losses)
        raise StoppedError

    with mock.patch.object(Keeper, "write", write_and_stop), contextlib.suppress(StoppedError):
        trained("dropout", folder / "checkpoints")
    found = pd.fit_table(table(), target="price", folder=folder / "run", **TABLE)
    told["run"] = found.predict(table(), samples=50)[["mean", "std", "lower"]].to_numpy().tolist()
    told["benchmark"] = scores(benchmark(folder))
    (folder / "answers.json").write_text(json.dumps(told), "utf-8")


if __name__ == "__main__":
    write(HERE / sys.argv[1])
