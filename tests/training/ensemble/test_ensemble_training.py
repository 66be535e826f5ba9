"""Checkpoints, interruptions and members that diverge: all others are what they would have been."""

from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor, nn

import pyro_dropout as pd
from tests.training.ensemble.test_training import QUIET, data

X, Y = data()


def line(learn: bool = False) -> pd.BayesianNet:
    return pd.BayesianNet(nn.Linear(2, 1).double(), pd.Prior(), pd.Gaussian(4.0, learn=learn)).double()


def trained(model: pd.BayesianNet, ensemble: pd.Ensemble, **options: Any) -> pd.training.History:
    return pd.fit(model, ensemble, X, Y, **{**QUIET, "steps": 12, "lr": 0.05, **options})


def values(ensemble: pd.Ensemble) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in ensemble.stacked().items()}


def stop_at(step: int) -> Any:
    """A schedule that is interrupted by the user."""

    def schedule(t: Tensor) -> Tensor:
        if int(t) == step:
            raise KeyboardInterrupt
        return torch.ones_like(t)

    return schedule


# --- seeds, and what is refused ---------------------------------------------------------------------------------------


def test_a_resumed_ensemble_ends_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    """Without a seed, in a process that has built another ensemble: its seeds are those of the checkpoint."""

    def train(folder: str, steps: int, seed: int) -> dict[str, Tensor]:
        torch.manual_seed(seed)
        model = line()
        ensemble = pd.Ensemble(model, members=3)
        where = pd.training.Checkpoint(tmp_path / folder, every=5, seconds=1e9)
        trained(model, ensemble, steps=steps, batch_size=8, checkpoint=where)
        return values(ensemble)

    whole = train("whole", 20, seed=0)
    train("parts", 10, seed=0)
    parts = train("parts", 20, seed=1)
    assert all(torch.equal(parts[name], value) for name, value in whole.items())


def test_an_optimiser_that_mixes_members_is_refused() -> None:
    model = line()
    ensemble = pd.Ensemble(model, members=4)
    optim, before = torch.optim.Adafactor(ensemble.parameters()), values(ensemble)
    with pytest.raises(pd.errors.PyroDropoutError, match="members do not depend on each other; got Adafactor"):
        trained(model, ensemble, optim=optim)
    assert all(torch.equal(value, before[name]) for name, value in values(ensemble).items())


# --- interruptions ----------------------------------------------------------------------------------------------------


def test_an_interruption_leaves_what_members_have_learned() -> None:
    model = line()
    ensemble, twin = (pd.Ensemble(model, members=2, seed=1) for _ in range(2))
    with pytest.raises(KeyboardInterrupt):
        trained(model, ensemble, schedule=stop_at(7))
    trained(model, twin, steps=7)
    torch.testing.assert_close(values(ensemble), values(twin))


# --- members that diverge ---------------------------------------------------------------------------------------------


def test_a_member_that_diverges_harms_no_other(tmp_path: Path) -> None:
    """With one learned τ for all: the others, τ and the answers are those of an ensemble without that member."""
    models = [line(learn=True) for _ in range(2)]
    whole, others = (pd.Ensemble(model, members=count, seed=5) for model, count in zip(models, (4, 3), strict=True))
    with torch.no_grad():
        for value in whole.parameters():
            value[3] = 1e200  # whose square is not finite
    with pytest.warns(UserWarning, match=r"1 of 4 members reached a loss that is not finite.* \(3\)"):
        history = trained(models[0], whole, clip_norm=50.0, batch_size=8, seed=0, validation=(X, Y))
    again = trained(models[1], others, clip_norm=50.0, batch_size=8, seed=0, validation=(X, Y))
    assert history.diverged.tolist() == [False, False, False, True]
    torch.testing.assert_close(history.losses, again.losses)
    torch.testing.assert_close(torch.tensor(history.validation), torch.tensor(again.validation))
    torch.testing.assert_close(models[0].likelihood.tau, models[1].likelihood.tau)
    assert models[0].likelihood.tau != 4
    torch.testing.assert_close({name: value[:3] for name, value in values(whole).items()}, values(others))
    assert whole.members == 3
    answers = [pd.predict(model, e, X) for model, e in zip(models, (whole, others), strict=True)]
    torch.testing.assert_close(answers[0].mean, answers[1].mean)
    torch.testing.assert_close(answers[0].error_over_members, answers[1].error_over_members)
    torch.testing.assert_close(whole.mean(), others.mean())
    pd.save(tmp_path / "posterior", models[0], whole)
    loaded = pd.Ensemble(models[0], members=4)
    pd.load(tmp_path / "posterior", models[0], loaded)
    assert loaded.members == 3
    assert whole.sample_weights(4)["weight"].isfinite().all()


def test_if_all_diverge_nothing_is_left_to_ask() -> None:
    model = line()
    ensemble = pd.Ensemble(model, members=2)
    with torch.no_grad():
        next(ensemble.parameters()).fill_(torch.nan)
    with pytest.raises(pd.errors.DivergedError, match="the loss is nan at step 1"):
        trained(model, ensemble)
    for ask in (ensemble.mean, lambda: ensemble.order(3), lambda: pd.predict(model, ensemble, X)):
        with pytest.raises(pd.errors.PyroDropoutError, match="all 2 members have diverged"):
            ask()


# --- one training after another ---------------------------------------------------------------------------------------


def test_members_share_a_parameter_of_a_pyro_model() -> None:
    """One that is in Pyro's store alone: it was not trained."""

    def model(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(2, dtype=x.dtype), 1.0).to_event(1))
        width = pyro.param("width", torch.tensor(3.0, dtype=x.dtype), constraint=dist.constraints.positive)
        with pyro.plate("points", len(x)):
            pyro.sample("y", dist.Normal(x @ w, width), obs=y)

    x = torch.randn(300, 2, dtype=torch.float64)
    y = x.sum(1) + 0.5 * torch.randn(300, dtype=torch.float64)
    pd.fit(model, pd.Ensemble(model, members=3), x, y, steps=300, lr=0.03, **QUIET)
    assert pyro.param("width").item() == pytest.approx(0.5, rel=0.15)
