"""A step is recorded once where no code of a user runs in it, and otherwise twice."""

import random
from typing import Any

import pyro.poutine as poutine
import pytest
import torch
from torch import Tensor, nn

import pyro_dropout as pd
from pyro_dropout.engines import program
from pyro_dropout.training.compile.captured_state import is_known

X = torch.linspace(-1, 1, 12).unsqueeze(-1)


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out


class OwnLikelihood(pd.Gaussian):
    pass


def network(**settings: Any) -> pd.BayesianNet:
    return pd.BayesianNet(nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)), **settings)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Where every recording of a step leaves a mark."""
    marks: list[int] = []
    trace = program._trace
    monkeypatch.setattr(program, "_trace", lambda *args: marks.append(1) or trace(*args))
    return marks


def hooked() -> nn.Module:
    layer = nn.Linear(1, 1)
    layer.register_forward_hook(lambda *args: None)
    return layer


def patched() -> nn.Module:
    layer = nn.Linear(1, 1)
    layer.forward = lambda x: x * random.random()  # type: ignore[method-assign]
    return layer


@pytest.mark.parametrize(
    "part",
    [
        Own(),
        nn.Sequential(nn.Linear(1, 1), Own()),
        hooked(),
        nn.Sequential(hooked()),
        patched(),
        network(likelihood=OwnLikelihood(1.0)),
        lambda t: t * random.random(),
        pd.ELBO(temperature=lambda done: random.random()),
        {"schedule": lambda t: random.random()},
    ],
)
def test_what_a_user_wrote_is_not(part: object) -> None:
    assert not is_known(part)


def test_nor_is_anything_within_a_handler() -> None:
    with poutine.trace():
        assert not is_known(nn.Linear(1, 1))
    assert is_known(nn.Linear(1, 1))


def fitted(model: Any, **options: Any) -> pd.History:
    guide = pd.AutoDropout(model)
    return pd.fit(model, guide, X, X, steps=3, compile="traced", progress=False, seed=0, **options)


def test_known_steps_are_recorded_once_and_others_twice(recorded: list[int]) -> None:
    fitted(network())
    assert len(recorded) == 1
    fitted(pd.BayesianNet(Own()))
    assert len(recorded) == 3
    fitted(network(), schedule=lambda t: 1 / (1 + t))
    assert len(recorded) == 5


def test_a_schedule_that_draws_is_still_found_out() -> None:
    model = network()
    how = {"steps": 3, "progress": False, "schedule": lambda t: t * 0 + random.random()}
    with pytest.raises(pd.PyroDropoutError, match="traced twice and gave two different programs"):
        pd.fit(model, pd.AutoDropout(model), X, X, compile=True, **how)


def test_a_schedule_runs_at_every_step_that_is_recorded() -> None:
    seen: list[float] = []
    history = fitted(network(), schedule=lambda t: seen.append(float(t)) or 1 / (1 + t))
    assert history.traced
    assert seen[-3:] == [0.0, 1.0, 2.0]
