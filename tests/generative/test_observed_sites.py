"""Data that would be broadcast against their distribution: refused by every function that runs a model with data."""

from collections.abc import Callable

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoNormal
from torch import Tensor

import pyro_dropout as pd

X = torch.linspace(-1, 1, 12).unsqueeze(-1)
QUIET = {"compile": False, "progress": False}


def in_a_plate(x: Tensor, y: Tensor | None = None) -> None:
    w = pyro.sample("w", dist.Normal(torch.zeros(1, 1), 1.0).to_event(2))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(x @ w, 0.1), obs=y)


def without_a_plate(x: Tensor, y: Tensor | None = None) -> None:
    pyro.sample("y", dist.Normal(x @ pyro.sample("w", dist.Normal(torch.zeros(1, 1), 1.0).to_event(2)), 0.1), obs=y)


def one_event(x: Tensor, y: Tensor | None = None) -> None:
    w = pyro.sample("w", dist.Normal(torch.zeros(1, 1), 1.0).to_event(2))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(x @ w, 0.1).to_event(1), obs=y)


def column_of_targets(x: Tensor, y: Tensor | None = None) -> None:
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(x[:, 0] * w, 0.1), obs=y)


def plate_of_one(x: Tensor, y: Tensor | None = None) -> None:
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    with pyro.plate("data", 1):
        pyro.sample("y", dist.Normal(w, 0.1), obs=y)


def fit(model: Callable[..., None], y: Tensor) -> object:
    return pd.fit(model, AutoNormal(model), X, y, steps=1, **QUIET)


def svi(model: Callable[..., None], y: Tensor) -> object:
    return pd.SVI(model, AutoNormal(model), pyro.optim.Adam({"lr": 0.1}), compile=False).step(X, y)


class Module(torch.nn.Module):
    """The model of a fleet, whose replicas own what they train."""

    def forward(self, x: Tensor, y: Tensor | None = None, num_data: int | None = None) -> None:
        in_a_plate(x, y)


def built(seed: int) -> tuple[torch.nn.Module, object]:
    model = Module()
    return model, pd.AutoMeanField(model)


DOORS = {
    "fit": fit,
    "fit with a loss of Pyro's": lambda model, y: pd.fit(
        model, AutoNormal(model), X, y, steps=1, loss=pyro.infer.Trace_ELBO(), **QUIET
    ),
    "svi": svi,
    "compiled svi": lambda model, y: pd.SVI(model, AutoNormal(model), pyro.optim.Adam({"lr": 0.1})).step(X, y),
    "fleet": lambda model, y: pd.Fleet(built, {"seed": [0, 1]}).fit(X, y, steps=1, **QUIET),
    "ensemble": lambda model, y: pd.fit(model, pd.Ensemble(model, pd.AutoMeanField, members=2), X, y, steps=1, **QUIET),
    "elbo": lambda model, y: pd.ELBO(per_example=False).parts(model, AutoNormal(model), X, y),
    "nuts": lambda model, y: pd.nuts(model, X, y, samples=4, warmup=0, **QUIET),
    "to_arviz": lambda model, y: pd.to_arviz(model, AutoNormal(model), X, y, samples=2),
    "loo": lambda model, y: pd.loo(model, AutoNormal(model), X, y, samples=25),
    "elbo_report": lambda model, y: pd.judging.elbo_report(model, AutoNormal(model), X, y, samples=2),
    "compare": lambda model, y: pd.compare(
        model, [pd.AutoMeanField], (X, y), (X, y), steps=1, samples=2, seeds=1, compile=False, progress=False
    ),
}


@pytest.mark.parametrize("door", DOORS)
def test_targets_that_would_be_broadcast_are_refused(door: str) -> None:
    with pytest.raises(pd.errors.ShapeError, match=r"site 'y'.*\(12,\).*\(12, 12\)"):
        DOORS[door](in_a_plate, X[:, 0])


@pytest.mark.parametrize(
    ("model", "y"),
    [
        (without_a_plate, X[:, 0]),
        (one_event, X[:, 0]),
        (one_event, X.expand(-1, 3)),
        (column_of_targets, X),
        (column_of_targets, X[:5, 0]),
        (plate_of_one, X[:, 0]),
    ],
    ids=["no plate", "an event", "too many targets", "a column", "too few", "a plate of one"],
)
def test_every_way_to_broadcast_data_is_refused(model: Callable[..., None], y: Tensor) -> None:
    for train in (fit, svi):
        with pytest.raises(pd.errors.ShapeError, match="site 'y'"):
            train(model, y)


def repeated_value(x: Tensor, y: Tensor | None = None) -> None:
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(w * x[:, 0], 1.0), obs=torch.zeros(()))


def many_of_one(x: Tensor, y: Tensor) -> None:
    pyro.sample("y", dist.Normal(pyro.sample("w", dist.Normal(0.0, 1.0)), 1.0), obs=y)


def several_models(x: Tensor, y: Tensor) -> None:
    with pyro.plate("models", 3, dim=-2):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x), dim=-1):
            pyro.sample("y", dist.Normal(w * x[:, 0], 1.0), obs=y)


def series_of_any_length(x: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    step = dist.Categorical(logits=torch.stack([w, torch.zeros(())]).expand(2, 2))
    steps = dist.DiscreteHMM(torch.zeros(2), step.logits, dist.Normal(torch.tensor([-1.0, 1.0]), 1.0))
    pyro.sample("y", steps, obs=y)


@pytest.mark.parametrize("model", [repeated_value, many_of_one, several_models, series_of_any_length])
def test_a_broadcast_that_the_model_declares_is_allowed(model: Callable[..., None]) -> None:
    assert torch.isfinite(fit(model, X[:, 0]).losses).all()  # type: ignore[attr-defined]
