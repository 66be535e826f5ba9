"""Code of a user is told from that of torch, Pyro and this package; its random numbers are found out."""

import random
from typing import Any

import pyro.poutine as poutine
import pytest
import torch
from torch import Tensor, nn

import pyro_dropout as pd
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


def test_a_schedule_that_draws_is_still_found_out() -> None:
    model = network()
    how = {"steps": 3, "progress": False, "schedule": lambda t: t * 0 + random.random()}
    with pytest.raises(pd.errors.PyroDropoutError, match="traced twice and gave two different programs"):
        pd.fit(model, pd.AutoDropout(model), X, X, compile=True, **how)
