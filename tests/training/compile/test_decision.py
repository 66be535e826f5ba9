"""How steps are taken: eagerly, recorded or compiled; and recorded ones are the eager ones."""

from typing import Any

import pytest
import torch
from torch import nn

import pyro_dropout as pd
from pyro_dropout.training.compile import program
from pyro_dropout.training.compile.decision import decided, step_size

CPU = torch.device("cpu")
X = torch.linspace(-1, 1, 24).unsqueeze(-1)
GUIDES = {
    "dropout": pd.AutoDropout,
    "mean field": pd.AutoMeanField,
    "low rank": lambda model: pd.AutoLowRank(model, rank=2),
    "row mixture": pd.AutoRowMixture,
    "ensemble": lambda model: pd.Ensemble(model, members=3, seed=0),
}


def network(prior: pd.Prior | None = None) -> pd.BayesianNet:
    net = nn.Sequential(nn.Linear(1, 6), nn.Tanh(), nn.Linear(6, 1))
    return pd.BayesianNet(net, prior or pd.Prior(), pd.Gaussian(tau=10.0, learn=True))


def trained(make: Any, compile: Any, steps: int = 12, prior: pd.Prior | None = None, **options: Any) -> pd.History:
    torch.manual_seed(0)
    model = network(prior)
    return pd.fit(model, make(model), X, X**2, steps=steps, lr=0.02, seed=1, compile=compile, progress=False, **options)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("batch_size", [None, 7])
@pytest.mark.parametrize("name", GUIDES)
def test_recorded_steps_are_the_eager_ones(name: str, batch_size: int | None) -> None:
    decay = {"schedule": lambda t: 1 - t / 20, "batch_size": batch_size}
    eager, traced = (trained(GUIDES[name], how, **decay) for how in (False, "traced"))
    assert traced.traced
    assert not traced.compiled
    assert "traced" in repr(traced)
    torch.testing.assert_close(traced.losses, eager.losses, rtol=1e-4, atol=1e-4)


def test_learned_priors_and_a_rising_temperature_are_recorded_too() -> None:
    how = {"prior": pd.Prior(learn=True), "loss": pd.ELBO(temperature=lambda done: done / 12)}
    eager, traced = (trained(pd.AutoMeanField, compile, **how) for compile in (False, "traced"))
    assert traced.traced
    torch.testing.assert_close(traced.losses, eager.losses, rtol=1e-4, atol=1e-4)


def test_a_fleet_records_its_steps() -> None:
    def fleet(compile: Any) -> Any:
        torch.manual_seed(0)
        made = pd.Fleet(lambda seed: (model := network(), pd.AutoDropout(model)), {"seed": [0, 1]})
        return made.fit(X, X**2, steps=10, lr=0.02, seed=1, compile=compile, progress=False)

    eager, traced = fleet(False), fleet("traced")
    assert traced.traced
    torch.testing.assert_close(traced.losses, eager.losses, rtol=1e-4, atol=1e-4)


def test_the_decision_depends_on_steps_and_sizes_alone() -> None:
    small, large = (step_size(nn.Linear(50, outputs).parameters(), 64) for outputs in (1, 100_000))
    assert [decided("auto", steps, small, CPU) for steps in (10, 10_000, 100_000)] == [False, "traced", "auto"]
    assert [decided("auto", steps, large, CPU) for steps in (10, 1_000)] == [False, "auto"]
    assert decided("auto", 1, small, torch.device("cuda")) == "auto"
    assert [decided(asked, 1_000, small, CPU) for asked in (False, "traced", True)] == [False, "traced", True]
    assert step_size(nn.Linear(50, 100).parameters(), 64) == 5_000 + 100 * 65


def test_a_short_training_is_eager_a_longer_one_is_recorded_and_neither_is_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("compiled")

    monkeypatch.setattr(program, "_compile", never)
    assert not trained(pd.AutoDropout, "auto", 3).traced
    assert trained(pd.AutoDropout, "auto", 200).traced
    assert trained(lambda model: pd.Ensemble(model, members=2), "auto", 200).traced


def test_another_word_is_refused() -> None:
    with pytest.raises(pd.PyroDropoutError, match="compile must be 'auto', 'traced', True or False"):
        trained(pd.AutoDropout, "inductor")
