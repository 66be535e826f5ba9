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


@pytest.mark.deep
def test_rows_that_repeat_are_counted_apart() -> None:
    """Inputs make a twin, whatever the target: ten of the first thirty, of which three are 50 away."""
    x, y, train, _ = data()
    rest = torch.tensor(sorted({*range(150)} - {*train[0].tolist()}))
    x[rest[:10]], y[rest[:10]] = x[train[0][:10]], y[train[0][:10]]
    y[rest[:3]] += 50
    options: Any = {**QUICK, "steps": 30}
    splits = [rest, rest[:10], rest[10:]]
    found = choose(build, {"drop": [0.01]}, x, y, [train[0]] * 3, splits, **options)
    assert found.twins.tolist() == pytest.approx([1 / 3, 1, 0])
    assert found.fresh_log_likelihood[1].isnan()
    assert found.fresh_log_likelihood[2].item() == pytest.approx(found.log_likelihood[2].item())
    assert found.log_likelihood[0] < found.fresh_log_likelihood[0] - 10
    # the same rows, and another network of the same kind
    assert found.fresh_log_likelihood[0].item() == pytest.approx(found.log_likelihood[2].item(), abs=0.3)
    assert found.mixture_fresh_log_likelihood[0].item() == pytest.approx(found.fresh_log_likelihood[0].item(), abs=0.05)


@pytest.mark.deep
def test_members_are_pooled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of points, all by hand: p(y | x) is the mean density of the members, and the RMSE that of their mean."""
    kept: list[Any] = []

    class Kept(cross_validation.Fleet):
        def fit(self, *args: Any, **options: Any) -> Any:
            kept.append((self, options))
            return super().fit(*args, **options)

    monkeypatch.setattr(cross_validation, "Fleet", Kept)
    x, y, train, test = data()
    options: Any = {**QUICK, "steps": 15, "samples": 1, "validation_samples": 1, "anchored": True}
    found = choose(
        lambda x, y, tau: build(x, y, drop=0.0, tau=tau),
        {"tau": [1.0, 10.0]}, x, y, train, test, members=3, fold_members=2, **options,
    )  # fmt: skip
    fleet, told = kept[0]
    assert found.replicas == len(fleet) == 2 * 2 * (2 * 2 + 3)
    seeds, rows = told["anchors"].view(2, 2, 7), told["indices"].view(2, 2, 7, -1)
    assert torch.equal(seeds[:, 0], seeds[:, 1])  # settings are compared with the same random numbers
    assert len(seeds[:, 0].unique()) == 14
    assert (rows[:, :, 0:4:2] == rows[:, :, 1:4:2]).all()  # two members on each fold, and three on all rows
    assert (rows[:, :, 4:] == torch.stack(train)[:, None, None]).all()
    for split in range(2):
        setting = [1.0, 10.0].index(found.settings[split]["tau"])  # type: ignore[arg-type]
        own = [fleet[split * 14 + setting * 7 + 4 + member] for member in range(3)]
        f = torch.stack([model.evaluate(guide.mean(), x[test[split]])[:, 0].detach() for model, guide in own]).double()
        target, width = y[test[split], 0].double(), found.tau[split].double() ** -0.5
        each = torch.distributions.Normal(f, width)
        assert found.log_likelihood[split].item() == pytest.approx(each.log_prob(target).exp().mean(0).log().mean())
        assert found.rmse[split].item() == pytest.approx((f.mean(0) - target).square().mean().sqrt().item())
        inside = (each.cdf(target).mean(0) - 0.5).abs() <= 0.475
        assert found.coverage[split].item() == pytest.approx(inside.double().mean().item())
        assert f.std(0).min() > 0
