"""The LSTM's three ways to drop: what a mask per sequence and per step are, and what the script makes of them."""

import json
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import jaxtyping
import pytest
import torch
from torch import nn

import pyro_dropout as pd
from tests.models.test_scripts import FOLDER, loaded, picture_size

pytestmark = pytest.mark.deep  # the script runs whole, which takes a minute


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return loaded(FOLDER / "sequence.py")


@pytest.fixture(scope="module")
def run(script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("sequence")
    jaxtyping.config.update("jaxtyping_disable", True)  # checking shapes takes longer than the run
    script.main(["--quick", "--quiet", "--out", str(folder)])
    jaxtyping.config.update("jaxtyping_disable", False)
    return folder, json.loads((folder / "results.json").read_text("utf-8"))


def test_the_table_has_every_arm_with_finite_numbers(script: ModuleType, run: tuple[Path, Any]) -> None:
    (table,) = run[1]["tables"]
    assert [row["arm"] for row in table["rows"]] == list(script.ARMS.values())
    for row in table["rows"]:
        assert all(math.isfinite(value) for name, value in row.items() if name != "arm")
        assert row["± one step"] > 0
        assert row["± free-running"] > 0
    keeps = [row["keep"] for row in table["rows"]]
    assert keeps[2] == 1
    assert set(keeps[:2]) <= set(script.KEEPS)


def test_claims_and_figures_are_there(run: tuple[Path, Any]) -> None:
    folder, record = run
    assert len(record["claims"]) == 3
    assert all("one step" in claim["number"] and "free-running" in claim["number"] for claim in record["claims"])
    assert [figure["file"] for figure in record["figures"]] == ["co2.png"]
    assert picture_size(folder / "co2.png")[2] > 20_000


def test_without_masks_it_is_the_lstm_of_torch(script: ModuleType) -> None:
    torch.manual_seed(0)
    net, theirs = script.Forecaster(5), nn.LSTM(1, 5, batch_first=True)
    # Torch orders the gates i, f, g, o, and has no + 1 before the forgetting.
    order = torch.cat([torch.arange(0, 10), torch.arange(15, 20), torch.arange(10, 15)])
    with torch.no_grad():
        theirs.weight_ih_l0.copy_(net.input.weight[order])
        theirs.weight_hh_l0.copy_(net.recurrent.weight[order])
        theirs.bias_ih_l0.copy_(net.input.bias[order])
        theirs.bias_hh_l0.zero_()[5:10] = 1.0
        x = torch.randn(3, 7)
        last = theirs((x - x[:, -1:]).unsqueeze(-1))[0][:, -1]
        torch.testing.assert_close(net(x), x[:, -1:] + net.output(last))


def test_one_draw_of_a_free_run_is_one_function(script: ModuleType) -> None:
    """With one hidden unit there are four draws, of which two drop W_y and agree: three noiseless forecasts."""
    torch.manual_seed(2)
    net = script.model("sequence", 0.5, 1, 1.0)
    posterior = script.guide(net, "sequence", 0.5)
    x = torch.randn(1, 5)
    posterior(x, torch.zeros(1, 1))
    f = script.free_run(net, posterior, x, 6, tau=1e14, samples=300).f[:, 0]
    mean = {name: value.detach() for name, value in posterior.mean().items()}
    expected = []
    for kept in ((0, 0), (0, 1), (1, 0), (1, 1)):
        weights = dict(mean)
        for site, z in zip(script.DROPPED, kept, strict=True):
            weights[site] = 2 * z * mean[site]
        window, steps = x, []
        for _ in range(6):
            steps.append(net.evaluate(weights, window))
            window = torch.cat([window[:, 1:], steps[-1]], 1)
        expected.append(torch.cat(steps, 1)[0])
    distance = (f[:, None] - torch.stack(expected).detach()).abs().amax(-1)
    assert bool((distance.amin(1) < 1e-4).all())
    assert set(distance.argmin(1).tolist()) == {0, 1, 3}  # one of them is missed with probability < 1e-30


def test_masks_of_every_step_differ(script: ModuleType) -> None:
    """With one hidden unit and masks of every step there are more forecasts than functions."""
    torch.manual_seed(2)
    net = script.model("step", 0.5, 1, 1.0)
    posterior = script.guide(net, "step", 0.5)
    x = torch.randn(1, 5)
    posterior(x, torch.zeros(1, 1))
    f = script.free_run(net, posterior, x, 3, tau=1e14, samples=300).f[:, 0]
    assert len({tuple(round(value, 3) for value in row) for row in f.tolist()}) > 8


def test_arms_start_with_the_same_weight_decay(script: ModuleType) -> None:
    """The penalty on keep·M in one arm is the KL of M in the other, up to the entropy of six labels."""
    penalties = []
    labels = -6 * (0.7 * math.log(0.7) + 0.3 * math.log(0.3))
    for arm in ("sequence", "step"):
        torch.manual_seed(0)
        net = script.model(arm, 0.7, 6, 1.0)
        terms = pd.ELBO().by_site(net, script.guide(net, arm, 0.7), torch.zeros(2, 4), torch.zeros(2, 1), 2)
        penalties.append([terms[site].item() for site in script.DROPPED])
    assert [value + labels for value in penalties[0]] == pytest.approx(penalties[1], rel=1e-4)


def test_windows_end_where_their_targets_begin(script: ModuleType) -> None:
    x, y = script.windows(torch.arange(20.0), 4, 10, 15)
    assert y.flatten().tolist() == [10, 11, 12, 13, 14]
    assert x[0].tolist() == [6, 7, 8, 9]
    assert x[-1].tolist() == [10, 11, 12, 13]


@pytest.mark.parametrize("name", ["co2", "solar"])
def test_a_series_has_no_hole(script: ModuleType, name: str) -> None:
    data, values = script.series(name)
    x = torch.cat([data.x, data.test_x]).flatten().sort().values.diff()
    assert len(values) == len(x) + 1
    assert x.max() < 1.01 * x.min()
    start = data.x.flatten().argmin()
    assert values[0] == data.y[start, 0]
