"""Choosing inside the training data: the folds choose, the test set is only scored."""

from typing import Any

import pytest
import torch
from torch import nn

import pyro_dropout as pd
from pyro_dropout.faces.selection import _folds, choose

QUICK: Any = {"steps": 150, "lr": 0.02, "compile": False, "progress": False, "samples": 60, "folds": 2}


def data() -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    torch.manual_seed(0)
    x = torch.randn(150, 2)
    y = 3 * x[:, :1] - x[:, 1:] + 0.2 * torch.randn(150, 1) + 7
    order = [torch.randperm(150) for _ in range(2)]
    return x, y, [rows[:120] for rows in order], [rows[120 : 150 - k] for k, rows in enumerate(order)]


def build(x: torch.Tensor, y: torch.Tensor, drop: float, noisy: bool = False) -> Any:
    net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2 if noisy else 1))
    likelihood = pd.HeteroscedasticGaussian() if noisy else pd.Gaussian(1.0)
    model = pd.Standardised(pd.BayesianNet(net, likelihood=likelihood), x, y)
    return model, pd.AutoDropout(model, keep=1 - drop)


def test_the_folds_part_the_rows() -> None:
    rows = torch.arange(100, 117)
    parts = _folds(rows, 3, seed=1)
    for train, held in parts:
        assert sorted([*train.tolist(), *held.tolist()]) == rows.tolist()
    assert sorted(row for _, held in parts for row in held.tolist()) == rows.tolist()


def test_the_better_setting_is_chosen_and_scored() -> None:
    x, y, train, test = data()
    found = choose(build, {"drop": [0.5, 0.005]}, x, y, train, test, **QUICK)
    assert [setting["drop"] for setting in found.settings] == [0.005, 0.005]
    assert found.replicas == 2 * 2 * 3
    assert found.lost == 0
    assert bool((found.validation[:, 1] > found.validation[:, 0]).all())
    assert found.weights.sum(1).tolist() == pytest.approx([1.0, 1.0], abs=1e-4)
    # The noise was 0.2: neither score can do better than that, and training is long enough to come near it.
    assert 0.19 < found.rmse.mean() < 0.8
    assert found.log_likelihood.mean() < 0.2
    assert found.tau.mean().item() == pytest.approx(1 / found.rmse.mean().item() ** 2, rel=0.8)


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


def test_noise_that_depends_on_the_input() -> None:
    x, y, train, test = data()
    found = choose(build, {"drop": [0.01], "noisy": [True]}, x, y, train[:1], test[:1], **{**QUICK, "steps": 60})
    assert found.log_likelihood.isfinite().all()
    assert 0.01 < found.tau.item() < 60  # a factor here


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"folds": 1}, "folds must be at least 2"),
        ({"best": 0}, "best must be"),
        ({"y": torch.zeros(150)}, r"y \(N, 1\)"),
        ({"train_rows": []}, "a tensor for each split; got 0 and 2"),
    ],
)
def test_bad_input(change: dict[str, Any], words: str) -> None:
    x, y, train, test = data()
    options = {"x": x, "y": y, "train_rows": train, "test_rows": test, **QUICK, **change}
    with pytest.raises(pd.PyroDropoutError, match=words):
        choose(build, {"drop": [0.1]}, **options)
