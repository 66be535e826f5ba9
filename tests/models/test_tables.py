"""Nine regression tables: settings that folds choose, scores and stored records."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from experiments import cross_validation
from experiments.cross_validation import choose, stacked
from experiments.experiment import Experiment
from experiments.selection import add_options, collect, guide, model
from experiments.summaries import gain, wins
from torch import nn

import pyro_dropout as pd


@pytest.mark.deep
def test_the_weight_decay_is_that_of_the_objective() -> None:
    """-ELBO is N(½ mean square + λ‖M‖²) at τ = 1, so its slope in M by the prior alone is 2Nλ·M."""
    torch.manual_seed(0)
    x, y, decay = torch.randn(40, 3), torch.randn(40, 1), 1e-2
    net = model(x, y, "dropout", 2, 8, drop=0.1, decay=decay)
    posterior = guide(net, "dropout", 0.1)
    parts = pd.ELBO().parts(net, posterior, x, y, 40)
    parts["kl"].backward()
    for state in (state for state in posterior.states.values() if hasattr(state, "keep")):
        torch.testing.assert_close(state.loc.grad, 2 * 40 * decay * state.loc.detach())


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

    return ran, collect(experiment, run, TASKS, ("steps", "seed"))


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


def test_quick_changes_defaults_and_not_what_was_given(tmp_path: Path) -> None:
    for words, throws in (([], 1000), (["--quick"], 10), (["--quick", "--throws", "7"], 7)):
        experiment = Experiment("coin", "How often?")
        experiment.option("--throws", type=int, default=1000, quick=10, help="of the coin")
        experiment.start(["--out", str(tmp_path), *words])
        assert experiment.args.throws == throws


QUICK: Any = {"steps": 150, "lr": 0.02, "compile": False, "progress": False, "samples": 60, "folds": 2}


def data() -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    torch.manual_seed(0)
    x = torch.randn(150, 2)
    y = 3 * x[:, :1] - x[:, 1:] + 0.2 * torch.randn(150, 1) + 7
    order = [torch.randperm(150) for _ in range(2)]
    return x, y, [rows[:120] for rows in order], [rows[120 : 150 - k] for k, rows in enumerate(order)]


def build(x: torch.Tensor, y: torch.Tensor, drop: float, noisy: bool = False, tau: float = 1.0) -> Any:
    net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2 if noisy else 1))
    likelihood = pd.HeteroscedasticGaussian() if noisy else pd.Gaussian(tau)
    model = pd.Standardised(pd.BayesianNet(net, likelihood=likelihood), x, y)
    return model, pd.AutoDropout(model, keep=1 - drop)


@pytest.mark.deep
def test_the_test_targets_choose_nothing() -> None:
    x, y, train, test = data()
    options = {**QUICK, "steps": 40}
    first = choose(build, {"drop": [0.3, 0.01]}, x, y, train[:1], test[:1], **options)
    moved = y.clone()
    moved[test[0]] += 100
    second = choose(build, {"drop": [0.3, 0.01]}, x, moved, train[:1], test[:1], **options)
    assert first.settings == second.settings
    assert torch.equal(first.tau, second.tau)
    assert torch.equal(first.validation, second.validation)
    assert second.rmse.item() > 50


@pytest.mark.deep
@pytest.mark.parametrize("noisy", [False, True])
def test_scores_are_those_of_plain_dropout_in_numpy(monkeypatch: pytest.MonkeyPatch, noisy: bool) -> None:
    """All that follows the training, by hand: masks, network, units, the mixture of normals, its mean over points."""
    kept: list[Any] = []

    class Kept(cross_validation.Fleet):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            kept.append(self)

    monkeypatch.setattr(cross_validation, "Fleet", Kept)
    x, y, train, test = data()
    grid = {"drop": [0.2], "noisy": [noisy]}
    found = choose(build, grid, x, y, train[:1], test[:1], **{**QUICK, "steps": 30, "samples": 20_000})
    guide = kept[0][2][1]  # two folds, and then the whole
    learned = {name.split(".", 1)[1]: value.numpy().astype(float) for name, value in guide.state_dict().items()}
    first, last = (learned[f"{layer}/weight.loc"] for layer in (0, 2))
    own = y[train[0]].numpy().astype(float)
    inputs = x.numpy().astype(float)
    scaled = (inputs[test[0]] - inputs[train[0]].mean(0)) / inputs[train[0]].std(0, ddof=1)
    random = np.random.default_rng(0)
    masks = [random.random((40_000, 1, width)) < 0.8 for width in (2, 8)]  # of a row of weights in, by unit and by draw
    hidden = np.maximum((scaled * masks[0]) @ first.T + learned["0/bias.loc"], 0)
    out = (hidden * masks[1]) @ last.T + learned["2/bias.loc"]  # (T, n, 1 or 2)
    mean = own.mean() + own.std(ddof=1) * out[..., 0]
    tau = found.tau.item() * (np.exp(out[..., 1]) / own.var(ddof=1) if noisy else np.ones_like(mean))
    target = y[test[0], 0].numpy()
    density = np.sqrt(tau / (2 * np.pi)) * np.exp(-0.5 * tau * (target - mean) ** 2)
    by_point = np.log(density.mean(0))
    assert found.log_likelihood.item() == pytest.approx(by_point.mean(), abs=0.01)
    assert found.rmse.item() == pytest.approx(np.sqrt(((mean.mean(0) - target) ** 2).mean()), rel=0.01)


def test_the_weights_are_where_the_slope_is_equal() -> None:
    """At the maximum Σ_n p_c(y_n)/p(y_n) is N for every member with weight, and less for those without."""
    torch.manual_seed(3)
    log_p = torch.randn(1, 3, 400).double()
    weights = stacked(log_p, most=3).double()
    mixture = torch.logsumexp(log_p + weights.log().unsqueeze(-1), 1, keepdim=True)
    slopes = (log_p - mixture).exp().mean(-1)[0]
    assert slopes[weights[0] > 0].tolist() == pytest.approx([1.0] * int((weights > 0).sum()), abs=1e-2)


SCORES = {
    ("a", "base"): [1.0, 10.0, 100.0],
    ("a", "better"): [2.0, 11.0, 101.5],
    ("b", "base"): [0.0, 0.0, 0.0],
    ("b", "better"): [1.0, -1.0, 0.1],
    ("b", "worse"): [-1.0, -1.1, -0.9],
    ("c", "better"): [1.0, 2.0],
}


def test_splits_are_paired() -> None:
    more, error = gain(SCORES, "a", "better", "base")
    assert more == pytest.approx(3.5 / 3)
    assert error == pytest.approx(1 / 6)  # the splits themselves differ by a hundred times as much
    assert wins(SCORES, "better", "base") == ["a"]
    assert wins(SCORES, "worse", "base") == []


def test_one_split_proves_nothing() -> None:
    assert wins({("a", "base"): [0.0], ("a", "better"): [9.0]}, "better", "base") == []
