"""Nine tables and their holes: splits, guides, priors, verdicts and stored records."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from experiments.experiment import Experiment
from experiments.selection import GRIDS, add_options, collect

import pyro_dropout as pd
from tests.models.test_scripts import FOLDER, loaded

pytestmark = pytest.mark.deep  # the script runs whole, which takes a minute


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return loaded(FOLDER / "uci.py")


def test_the_weight_decay_is_that_of_the_objective(script: ModuleType) -> None:
    """-ELBO is N(½ mean square + λ‖M‖²) at τ = 1, so its slope in M by the prior alone is 2Nλ·M."""
    torch.manual_seed(0)
    x, y, decay = torch.randn(40, 3), torch.randn(40, 1), 1e-2
    model = script.model(x, y, "dropout", 2, 8, drop=0.1, decay=decay)
    guide = script.guide(model, "dropout", 0.1)
    parts = pd.ELBO().parts(model, guide, x, y, 40)
    parts["kl"].backward()
    for state in (state for state in guide.states.values() if hasattr(state, "keep")):
        torch.testing.assert_close(state.loc.grad, 2 * 40 * decay * state.loc.detach())


@pytest.mark.parametrize("kind", [kind for kind in GRIDS if kind != "heteroscedastic"])
def test_every_kind_has_its_guide(script: ModuleType, kind: str) -> None:
    grid = {key: values[0] for key, values in script.GRIDS[kind].items()}
    x, y = torch.randn(20, 3), torch.randn(20, 1)
    assert grid.pop("lr") > 0  # goes to the training, and not to the model
    model = script.model(x, y, kind, 1, 6, **grid)
    guide = script.guide(model, kind, grid["drop"])
    wanted = {"dropout": "AutoDropout", "concrete": "AutoConcreteDropout"}.get(kind)
    assert type(guide).__name__ == wanted or wanted is None
    assert pd.predict(model, guide, x, samples=3).mean.shape == (20, 1)


def made(name: str, kind: str, layers: int, scores: list[float], mixed: list[float]) -> dict[str, Any]:
    return {
        "set": name, "source": "made", "kind": kind, "layers": layers, "log_likelihood": scores, "rmse": [1.0, 2.0],
        "mixture_log_likelihood": mixed, "mixture_rmse": [1.0, 2.0], "settings": [{"drop": 0.1}, {"drop": 0.3}],
        "tau": [1.0, 3.0], "all_seconds": 5.0,
    }  # fmt: skip


TASKS = [{"set": "yacht", "kind": kind} for kind in ("dropout", "ensemble")]


def collected(out: Path, *options: str) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the kinds that were run, and all records."""
    experiment = Experiment("uci", "x")
    experiment.option("--sets", nargs="+", default=["yacht"])
    add_options(experiment, steps=100)
    experiment.start(["--out", str(out), "--device", "cpu", *options])
    ran: list[str] = []

    def run(task: dict[str, Any]) -> dict[str, Any]:
        ran.append(task["kind"])
        return {"score": len(ran)}

    return ran, collect(experiment, "x.py", run, TASKS, ("steps", "seed"))


def test_a_run_continues_from_records_with_the_same_options(tmp_path: Path) -> None:
    assert collected(tmp_path)[0] == ["dropout", "ensemble"]
    ran, records = collected(tmp_path)
    assert ran == []
    assert records == json.loads((tmp_path / "records.json").read_text("utf-8"))
    assert records[1] == TASKS[1] | {"score": 2, "steps": 100, "seed": 0, "members": 16, "fold_members": 4}
    ran, records = collected(tmp_path, "--members", "5")  # which a single network does not have
    assert ran == ["ensemble"]
    assert [record.get("members") for record in records] == [None, 5]
    ran, records = collected(tmp_path, "--steps", "7")
    assert ran == ["dropout", "ensemble"]
    assert [record["steps"] for record in records] == [7, 7]
