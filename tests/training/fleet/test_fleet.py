"""Fleets: every replica is what it would have been alone."""

from pathlib import Path
from typing import Any

import pyro
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

import pyro_dropout as pd

QUIET: dict[str, Any] = {"compile": False, "progress": False}


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1))


def build(seed: int = 0, keep: float = 0.9, tau: float = 4.0, length_scale: float = 1.0) -> Any:
    model = pd.BayesianNet(net(seed), pd.Prior(length_scale=length_scale), pd.Gaussian(tau))
    return model, pd.AutoDropout(model, keep=keep)


def data(points: int = 40) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(9)
    x = torch.randn(points, 2, generator=generator)
    return x, x.prod(1, keepdim=True)


@pytest.mark.deep
def test_where_nothing_is_random_a_fleet_is_its_solo_runs() -> None:
    """keep=1, all data at every step: seeds, τ, length-scales, learning rates and splits are each replica's own."""
    x, y = data()
    settings = {"seed": [0, 1, 2], "keep": [1.0] * 3, "tau": [1.0, 4.0, 16.0], "length_scale": [0.5, 1.0, 2.0]}
    rates, splits = [0.01, 0.02, 0.005], torch.stack([torch.arange(30), torch.arange(10, 40), torch.arange(5, 35)])
    fleet = pd.Fleet(build, settings)
    history = fleet.fit(x, y, indices=splits, steps=60, lr=torch.tensor(rates), **QUIET)
    assert history.losses.shape == (60, 3)
    for k, (model, guide) in enumerate(fleet):
        alone, lonely = build(**{name: values[k] for name, values in settings.items()})
        solo = pd.fit(alone, lonely, x[splits[k]], y[splits[k]], steps=60, lr=rates[k], **QUIET)
        torch.testing.assert_close(history.losses[:, k], solo.losses, rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(guide.mean(), lonely.mean(), rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(guide(x), lonely(x), rtol=1e-3, atol=1e-4)
        assert model.likelihood.tau.item() == pytest.approx(settings["tau"][k])


@pytest.mark.deep
def test_replicas_are_distributed_as_solo_runs() -> None:
    """24 replicas against 24 solo runs, by a two-sample test at 1e-6 on two numbers, so it fails at 2e-6."""
    x, y = data()
    fleet = pd.Fleet(build, {"seed": [0] * 24, "keep": [0.7] * 24})
    fleet.fit(x, y, steps=20, batch_size=10, lr=0.02, seed=1, **QUIET)
    together = torch.stack([guide.mean()["0.weight"].flatten()[:2] for _, guide in fleet])
    alone = []
    pyro.set_rng_seed(2)
    for _ in range(24):
        state = torch.get_rng_state()
        model, guide = build(0, 0.7)
        torch.set_rng_state(state)
        pd.fit(model, guide, x, y, steps=20, batch_size=10, lr=0.02, **QUIET)
        alone.append(guide.mean()["0.weight"].flatten()[:2])
    for column in range(2):
        ours, theirs = together[:, column].numpy(), torch.stack(alone)[:, column].numpy()
        assert ours.std() > 1e-3  # masks and batches differ between replicas
        assert stats.ks_2samp(ours, theirs).pvalue > 1e-6


@pytest.mark.deep
def test_a_replica_that_diverges_leaves_the_others_alone() -> None:
    x, y = data()
    fleet = pd.Fleet(build, {"seed": [0, 1], "keep": [1.0, 1.0]})
    before = {name: value.clone() for name, value in fleet[1][1].mean().items()}
    with pytest.warns(UserWarning, match="1 of 2 replicas reached a loss that is not finite"):
        history = fleet.fit(x, y, steps=60, optim="sgd", lr=torch.tensor([1e-4, 1e6]), **QUIET)
    assert history.diverged.tolist() == [False, True]
    torch.testing.assert_close(fleet[1][1].mean(), before)
    alone, guide = build(0, 1.0)
    pd.fit(alone, guide, x, y, steps=60, optim="sgd", lr=1e-4, **QUIET)
    torch.testing.assert_close(fleet[0][1].mean(), guide.mean(), rtol=1e-3, atol=1e-5)


def test_targets_beyond_all_numbers_are_a_divergence() -> None:
    x, y = data()
    with pytest.raises(pd.errors.DivergedError, match="the loss is inf at step"):
        pd.Fleet(build, {"seed": [0, 1]}).fit(x, y + 1e30, steps=20, **QUIET)


def test_a_replica_whose_parameters_the_last_step_breaks_is_counted() -> None:
    x, y = data()
    fleet = pd.Fleet(build, {"seed": [0, 1]})
    with pytest.warns(UserWarning, match="1 of 2 replicas reached a loss that is not finite"):
        history = fleet.fit(x, y, steps=1, optim="sgd", lr=torch.tensor([1e-4, 3e38]), **QUIET)
    assert history.diverged.tolist() == [False, True]


def test_layers_that_change_their_buffers_are_refused() -> None:
    def make(seed: int) -> Any:
        model = pd.BayesianNet(nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))
        return model, pd.AutoDropout(model)

    x, y = data()
    with pytest.raises(pd.errors.PyroDropoutError, match="BatchNorm in train"):
        pd.Fleet(make, {"seed": [0, 1]}).fit(x, y, steps=1, **QUIET)


@pytest.mark.deep
@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.deep)])
def test_a_fleet_that_is_taken_up_again_ends_as_if_it_had_never_stopped(tmp_path: Path, compile: bool) -> None:
    x, y = data()

    def trained(folder: Path | None, steps: int, keep: float = 0.8) -> pd.Fleet:
        fleet = pd.Fleet(build, {"seed": [0, 1, 2], "keep": [0.9, keep, 0.95]})
        how = {"steps": steps, "batch_size": 16, "lr": 0.01, "schedule": pd.training.inverse_decay(), "seed": 5}
        fleet.fit(x, y, checkpoint=folder, compile=compile, progress=False, **how)
        return fleet

    whole, _, resumed = trained(None, 50), trained(tmp_path, 23), trained(tmp_path, 50)
    for (_, mine), (_, theirs) in zip(whole, resumed, strict=True):
        for name, value in mine.mean().items():
            assert torch.equal(value, theirs.mean()[name])
    with pytest.raises(pd.errors.PyroDropoutError, match="these differ: settings"):
        trained(tmp_path, 60, keep=0.7)


OTHER_STRUCTURE: dict[str, Any] = {
    "width": lambda k: nn.Linear(2, 2 + k),
    "activation": lambda k: nn.Sequential(nn.Linear(2, 4), (nn.ReLU(), nn.Tanh())[k], nn.Linear(4, 1)),
    "slope": lambda k: nn.Sequential(nn.Linear(2, 4), nn.LeakyReLU(0.1 + k), nn.Linear(4, 1)),
}


@pytest.mark.parametrize("name", OTHER_STRUCTURE)
def test_replicas_of_other_structure_are_refused(name: str) -> None:
    """One step is traced for all: the others would be trained as the first."""

    def made(k: int) -> Any:
        model = pd.BayesianNet(OTHER_STRUCTURE[name](k))
        return model, pd.AutoDropout(model)

    with pytest.raises(pd.errors.PyroDropoutError, match=r"differs in structure.*Put them in two fleets"):
        pd.Fleet(made, {"k": [0, 1]})


class Own(nn.Module):
    """A network with a function, a Python number and a frozen parameter of its own."""

    def __init__(self, act: Any, factor: float, frozen: float) -> None:
        super().__init__()
        self.first, self.last, self.act, self.factor = nn.Linear(1, 3), nn.Linear(3, 1), act, factor
        self.shift = nn.Parameter(torch.tensor(frozen), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        f: Tensor = self.last(self.act(self.first(x))) * self.factor + self.shift
        return f


@pytest.mark.parametrize("name", ["act", "factor", "frozen"])
def test_replicas_that_compute_something_else_are_refused(name: str) -> None:
    """One step is traced for all; what is no tensor that a step is given would silently be that of the first."""
    same = {"act": [torch.relu] * 3, "factor": [1.0] * 3, "frozen": [0.5] * 3}
    other: dict[str, Any] = {"act": torch.tanh, "factor": 2.0, "frozen": 0.0}
    x = torch.linspace(-1, 1, 8).unsqueeze(-1)

    def trained(settings: Any) -> pd.training.History:
        fleet = pd.Fleet(build, settings)
        return fleet.fit(x, x, steps=2, compile=False, progress=False)

    def build(**setting: Any) -> Any:
        model = pd.BayesianNet(Own(**setting))
        return model, pd.AutoDropout(model)

    assert trained(same).losses.shape == (2, 3)
    with pytest.raises(
        pd.errors.PyroDropoutError, match=rf"the replica with .*'{name}'.* computes something else than"
    ):
        trained({**same, name: [*same[name][:2], other[name]]})


@pytest.mark.parametrize("frozen", [[0, 0, 1], [1, 0, 0], [1, 1, 1]])
def test_replicas_with_other_frozen_parameters_are_refused(frozen: list[int]) -> None:
    """The third time the same ones are frozen, at other values: each replica starts at its own draw."""
    x = torch.linspace(-1, 1, 8).unsqueeze(-1)

    def build(seed: int, frozen: int) -> Any:
        torch.manual_seed(seed)
        model = pd.BayesianNet(nn.Linear(1, 1))
        guide = pd.AutoMeanField(model)
        next(guide.parameters()).requires_grad_(not frozen)
        return model, guide

    fleet = pd.Fleet(build, {"seed": [0, 1, 2], "frozen": frozen})
    with pytest.raises(pd.errors.PyroDropoutError, match=r"the replica with \{'seed': .* other frozen parameters"):
        fleet.fit(x, x, steps=2, compile=False, progress=False)
    same = pd.Fleet(build, {"seed": [0, 0], "frozen": [1, 1]})
    before = [guide.mean()["weight"].clone() for _, guide in same]
    same.fit(x, x, steps=2, compile=False, progress=False)
    assert all(torch.equal(guide.mean()["weight"], old) for (_, guide), old in zip(same, before, strict=True))
