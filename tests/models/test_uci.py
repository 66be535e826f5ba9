"""The UCI script: a quick run is whole, its model and guides are what they say, and its verdicts follow its rules."""

import json
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from experiments.experiment import Experiment
from experiments.regression_grids import GRIDS

import pyro_dropout as pd
from tests.models.test_scripts import FOLDER, loaded

pytestmark = pytest.mark.deep  # the script runs whole, which takes a minute


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return loaded(FOLDER / "uci.py")


@pytest.fixture(scope="module")
def out(script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uci")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYRO_DROPOUT_DATA", raising=False)
        script.main(["--quick", "--quiet", "--device", "cpu", "--out", str(folder)])
    return folder


def test_the_record_is_whole(out: Path) -> None:
    record: dict[str, Any] = json.loads((out / "results.json").read_text("utf-8"))
    assert [row["method"] for row in record["tables"][1]["rows"]] == [
        "dropout, 1", "dropout, 1, stacked", "heteroscedastic, 1", "heteroscedastic, 1, stacked", "ensemble, 1",
        "ensemble, 1, stacked",
    ]  # fmt: skip
    assert record["tables"][0]["rows"][0]["source"] == "made"  # there is no data folder here, and the table says so
    assert len(record["claims"]) == 3
    assert (out / "gains.png").stat().st_size > 5000
    for each in json.loads((out / "records.json").read_text("utf-8")):
        numbers = [*each["log_likelihood"], *each["rmse"], *each["mixture_log_likelihood"], *each["tau"]]
        numbers += [*each["coverage"], *each["mixture_coverage"]]
        assert all(math.isfinite(number) for number in numbers)
        assert each["lost"] == 0


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
    ("level", "extra", "verdicts"),
    [(5.0, 0.5, ["holds", "holds"]), (-9.0, -0.5, ["does not hold", "does not hold"])],
)
def test_verdicts_follow_the_scores(
    script: ModuleType, tmp_path: Path, level: float, extra: float, verdicts: list[str]
) -> None:
    experiment = Experiment("uci", "x")
    experiment.start(["--out", str(tmp_path)])
    plain = [level, level + 1]
    records = [made(name, "dropout", 1, plain, [p + extra for p in plain]) for name in ("boston", "wine")]
    script.report(experiment, records)
    found = json.loads(experiment.finish().read_text("utf-8"))
    assert [claim["verdict"] for claim in found["claims"]] == verdicts
    assert found["tables"][0]["rows"][0]["drop"] == 0.2
    assert len(found["tables"]) == 2


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


def test_twins_are_told_where_there_are_any(script: ModuleType, tmp_path: Path) -> None:
    experiment = Experiment("uci", "x")
    experiment.start(["--out", str(tmp_path)])
    one, other = (made(name, "dropout", 1, [1.0, 2.0], [2.0, 3.0]) for name in ("boston", "wine"))
    for record, share in ((one, 0.0), (other, 0.25)):
        record |= {"twins": [share, share], "fresh_log_likelihood": [0.5, 0.7]}
        record |= {"mixture_fresh_log_likelihood": [0.6, 0.8]}
    script.report(experiment, [one, other])
    rows = json.loads(experiment.finish().read_text("utf-8"))["tables"][2]["rows"]
    assert [(row["set"], row["method"]) for row in rows] == [("wine", "dropout, 1")]
    assert rows[0] == rows[0] | {"twins": "25.0%", "all rows": "1.50 ± 0.50", "without twins": "0.60 ± 0.10"}


def test_stored_records_are_reported_without_training(script: ModuleType, tmp_path: Path) -> None:
    records = [made("wine", "dropout", 1, [1.0, 2.0], [1.0, 2.0]), made("wine", "ensemble", 1, [1.5, 2.3], [1.0, 2.0])]
    (tmp_path / "kept.json").write_text(json.dumps(records), "utf-8")
    script.main(["--records", str(tmp_path / "kept.json"), "--out", str(tmp_path)])
    gains = json.loads((tmp_path / "results.json").read_text("utf-8"))["tables"][2]["rows"]
    assert [(row["method"], row["wine"]) for row in gains] == [("ensemble, 1", "0.400 ± 0.100")]
