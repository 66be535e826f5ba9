"""Choosing inside the training data: the folds choose, the test set is only scored."""

from typing import Any

import numpy as np
import pytest
import torch
from experiments import cross_validation
from experiments.cross_validation import choose, folds_of
from torch import nn

import pyro_dropout as pd

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


def test_the_folds_part_the_rows() -> None:
    rows = torch.arange(100, 117)
    parts = folds_of(rows, 3, seed=1)
    for train, held in parts:
        assert sorted([*train.tolist(), *held.tolist()]) == rows.tolist()
    assert sorted(row for _, held in parts for row in held.tolist()) == rows.tolist()


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
