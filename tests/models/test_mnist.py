"""LeNet on digits: the script's attacks, turns, costs and scores against oracles of their own, and its record."""

import json
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import jaxtyping
import pytest
import torch
from experiments.experiment import VERDICTS
from torch import nn

import pyro_dropout as pd
from tests.models.test_scripts import FOLDER, loaded, picture_size

pytestmark = pytest.mark.deep  # the script runs whole, which takes a minute

WIDTHS = (3, 4, 12)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return loaded(FOLDER / "mnist.py")


@pytest.fixture(scope="module")
def run(script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("mnist")
    jaxtyping.config.update("jaxtyping_disable", True)  # checking shapes takes longer than the run
    script.main(["--quick", "--quiet", "--out", str(folder)])
    jaxtyping.config.update("jaxtyping_disable", False)
    return folder, json.loads((folder / "results.json").read_text("utf-8"))


def pair_of(script: ModuleType, arm: str, seed: int = 0) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    net = script.model(WIDTHS, 100)
    posterior = script.guide(net, arm)
    posterior(torch.zeros(2, 1, 28, 28), torch.zeros(2, dtype=torch.long))
    return net, posterior


def test_tables_are_whole_and_finite(script: ModuleType, run: tuple[Path, Any]) -> None:
    tables = run[1]["tables"]
    assert [len(table["rows"]) for table in tables] == [3, len(script.ANGLES), 6, len(script.BUDGETS), 18, 5, 9]
    numbers = [v for table in tables for row in table["rows"] for v in row.values() if not isinstance(v, str)]
    assert len(numbers) > 300
    assert all(math.isfinite(number) for number in numbers)
    errors = {row["dropout"]: row for row in tables[0]["rows"]}
    assert errors["none"]["gain"] == 0  # without dropout the two ways are one
    assert errors["none"]["MC %"] < 70  # it has learned something: chance is 90 %


def test_claims_and_figures_are_there(run: tuple[Path, Any]) -> None:
    folder, record = run
    words = ["MC", "uncertainty", "deferring", "a", "adversarial", "a", "an"]
    assert [claim["claim"].split()[0] for claim in record["claims"]] == words
    assert {claim["verdict"] for claim in record["claims"]} <= set(VERDICTS)
    files = [figure["file"] for figure in record["figures"]]
    assert files == ["rotated.png", "rejection.png", "cascade.png", "fgsm.png", "odd.png"]
    assert all(picture_size(folder / file)[2] > 10_000 for file in files)


def test_the_attack_at_zero_is_the_clean_image(run: tuple[Path, Any]) -> None:
    rows = run[1]["tables"][4]["rows"]
    still = [row for row in rows if row["ε"] == 0]
    assert len(still) == 3
    assert all(row["misled"] == 0 and row["AUROC, MC entropy"] == 0.5 for row in still)


def test_ensembles_stand_beside_a_network_and_dropout(script: ModuleType, run: tuple[Path, Any]) -> None:
    scores, areas = run[1]["tables"][5]["rows"], run[1]["tables"][6]["rows"]
    names = ["single network", "MC dropout, ip", "MC dropout, all", *script.ANCHORED]
    assert [row["posterior"] for row in scores] == names
    assert [row["runs"] for row in scores] == [2, 1, 1, 1, 1]
    assert [row["posterior"] for row in areas] == [names[0], *(name for name in names[1:] for _ in range(2))]
    kinds = [kind for kind in areas[0] if kind not in ("posterior", "by") and not kind.startswith("±")]
    assert kinds == ["pixels shuffled", "patches shuffled", "turned by 90°"]
    assert all(0 <= row[kind] <= 1 for row in areas for kind in kinds)
    assert scores[3]["error %"] < 70  # it has learned something: chance is 90 %


def test_costs_are_weights_times_places(script: ModuleType, run: tuple[Path, Any]) -> None:
    def multiplications(widths: tuple[int, ...]) -> int:
        net, count = script.model(widths).net, []

        def hook(module: Any, _: Any, out: torch.Tensor) -> None:
            places = out[0, 0].numel() if isinstance(module, nn.Conv2d) else 1
            count.append(module.weight.numel() * places)

        for layer in net:
            if isinstance(layer, nn.Conv2d | nn.Linear):
                layer.register_forward_hook(hook)
        net(torch.zeros(1, 1, 28, 28))
        return sum(count)

    weak = (
        script.WEAK_DRAWS * multiplications(script.SMALL) / (5 * multiplications((4, 10, 100)))
    )  # T, a fifth of LeNet
    costs = [row["cost"] for row in run[1]["tables"][3]["rows"]]
    sent = [round(budget * 150) / 150 for budget in script.BUDGETS]
    assert costs == pytest.approx([weak + share for share in sent])


def test_arms_drop_where_they_say(script: ModuleType) -> None:
    dropped = {}
    for arm in script.KEEP:
        draws = pair_of(script, arm)[1].sample_weights(200)
        dropped[arm] = [name for name in script.WEIGHTS if bool((draws[name] == 0).flatten(1).any(1).any())]
    assert dropped == {"ip": ["7.weight"], "all": ["2.weight", "5.weight", "7.weight"], "none": []}


def test_the_prior_is_the_weight_decay(script: ModuleType) -> None:
    net, posterior = pair_of(script, "none")
    terms = pd.ELBO().by_site(net, posterior, torch.zeros(2, 1, 28, 28), torch.zeros(2, dtype=torch.long), 100)
    for name in script.WEIGHTS:
        expected = 100 * script.WEIGHT_DECAY * posterior.mean()[name].square().sum().item()
        assert terms[name].item() == pytest.approx(expected, rel=1e-5)
