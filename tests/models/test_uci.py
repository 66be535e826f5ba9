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


@pytest.mark.parametrize(
    ("gains", "verdict"),
    [([0.5] * 7 + [0.0] * 2, "holds"), ([0.5] * 8 + [-0.5], "holds in part"), ([0.0] * 9, "does not hold")],
)
def test_an_ensemble_must_be_better_almost_everywhere_and_worse_nowhere(
    script: ModuleType, tmp_path: Path, gains: list[float], verdict: str
) -> None:
    experiment = Experiment("uci", "x")
    experiment.start(["--out", str(tmp_path)])
    plain = [[1.0, 2.0], [1.0, 2.0]]
    records = [made(name, "dropout", 1, *plain) for name in script.PAPER]
    for name, extra in zip(script.PAPER, gains, strict=True):
        records.append(made(name, "ensemble", 1, *[[a + extra + 0.1, b + extra - 0.1] for a, b in plain]))
    script.report(experiment, records)
    found = json.loads(experiment.finish().read_text("utf-8"))["claims"]
    assert [claim["verdict"] for claim in found if claim["claim"].startswith("ensemble: ")] == [verdict]


def test_stored_records_are_reported_without_training(script: ModuleType, tmp_path: Path) -> None:
    records = [made("wine", "dropout", 1, [1.0, 2.0], [1.0, 2.0]), made("wine", "ensemble", 1, [1.5, 2.3], [1.0, 2.0])]
    (tmp_path / "kept.json").write_text(json.dumps(records), "utf-8")
    script.main(["--records", str(tmp_path / "kept.json"), "--out", str(tmp_path)])
    gains = json.loads((tmp_path / "results.json").read_text("utf-8"))["tables"][2]["rows"]
    assert [(row["method"], row["wine"]) for row in gains] == [("ensemble, 1", "0.400 ± 0.100")]


gaps = loaded(FOLDER / "holes.py")


@pytest.mark.parametrize("count", [9, 10, 11])
def test_a_hole_is_the_middle_third_of_an_input(count: int) -> None:
    values = torch.randperm(count, generator=torch.Generator().manual_seed(0)).float()
    rest, inside = gaps.hole(values, seed=0)
    assert sorted(torch.cat([rest, inside]).tolist()) == list(range(count))
    assert sorted(values[inside].tolist()) == list(range(3, count - 3))


def test_inputs_without_a_middle_are_left_out_by_name() -> None:
    generator = torch.Generator().manual_seed(0)
    three = torch.arange(30).float() % 3
    x = torch.stack([torch.rand(30, generator=generator), three.clamp(max=1), torch.ones(30), three], 1)
    (train, test), told = gaps.holes(x, seed=0, most=99)
    assert told["inputs_used"] == ["input 1", "input 4"]
    assert told["left_out"] == ["input 2", "input 3"]
    assert told["ties"] == [0.0, 0.0]
    assert (x[test[1], 3] == 1).all()
    assert (x[train[1], 3] != 1).all()
    assert gaps.holes(x, seed=0, most=1)[1]["inputs_used"] == ["input 1"]
    x[0, 3] = 1.0  # one more row of the middle value than the hole has room for
    assert gaps.holes(x, seed=0, most=99)[1]["ties"] == [0.0, 1.0]


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
