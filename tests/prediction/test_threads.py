"""Predictions from threads are those of one thread, bit for bit; trainings and predictions wait for each other."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoNormal
from torch import Tensor, nn

import pyro_dropout as pd

X = torch.linspace(-1, 1, 6).unsqueeze(-1)
QUIET: Any = {"compile": False, "progress": False}


def network(dropout: bool = False) -> pd.BayesianNet:
    torch.manual_seed(0)
    layers = [nn.Linear(1, 5), nn.Dropout(0.5) if dropout else nn.Tanh(), nn.Linear(5, 1)]
    return pd.BayesianNet(nn.Sequential(*layers), likelihood=pd.Gaussian(4.0))


def line(x: Tensor, y: Tensor | None = None) -> None:
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(w * x[:, 0], 0.5), obs=y)


def dropout() -> tuple[Any, Any, dict[str, Any]]:
    model = network(dropout=True)  # in training mode, where its own dropout layer would act
    guide = pd.AutoDropout(model, keep=0.8)
    return model, guide, {"samples": 10}


def plain_model() -> tuple[Any, Any, dict[str, Any]]:
    guide = AutoNormal(line)
    guide(X, X[:, 0])
    return line, guide, {"samples": 5}


@pytest.mark.parametrize("make", [dropout, plain_model])
def test_predictions_from_threads_are_those_of_one(make: Callable[[], tuple[Any, Any, dict[str, Any]]]) -> None:
    model, posterior, options = make()

    def answer(seed: int) -> Tensor:
        found = pd.predict(model, posterior, X + seed / 100, seed=seed, **options)
        return torch.cat([found.mean.flatten(), found.std.flatten()])

    modules = [module for part in (model, posterior) if isinstance(part, nn.Module) for module in part.modules()]
    modes = [module.training for module in modules]
    serial = [answer(seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        for k, found in enumerate(pool.map(answer, [k % 4 for k in range(12)])):
            assert torch.equal(found, serial[k % 4])
    assert modes == [module.training for module in modules]


def trained(model: Any, guide: Any) -> Tensor:
    return pd.fit(model, guide, X, X, steps=15, lr=0.01, seed=3, **QUIET).losses


def fresh() -> tuple[Any, Any]:
    model = network()
    return model, pd.AutoMeanField(model)


def test_a_prediction_waits_for_a_training_in_another_thread_and_leaves_it_alone() -> None:
    model, posterior, options = dropout()
    alone, serial = pd.predict(model, posterior, X, seed=0, **options), trained(*fresh())
    pair = fresh()
    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(trained, *pair)
        answers = [pd.predict(model, posterior, X, seed=0, **options) for _ in range(3)]
        unseeded = pd.predict(model, posterior, X, **options)
        losses = training.result()
    assert torch.equal(losses, serial)
    assert all(torch.equal(answer.mean, alone.mean) for answer in answers)
    assert bool(unseeded.std.isfinite().all())
