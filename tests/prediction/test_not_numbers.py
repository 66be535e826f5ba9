"""Predictions that are not numbers are refused by name, and those without a finite mean by nature are not."""

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoNormal
from torch import Tensor, nn
from torch.utils.data import DataLoader

import pyro_dropout as pd
from tests.contracts.likelihoods import LIKELIHOODS

X = torch.linspace(-1, 1, 12).reshape(6, 2)


def pair(likelihood: Any, outputs: int, *layers: nn.Module) -> tuple[pd.BayesianNet, Any]:
    model = pd.BayesianNet(nn.Sequential(*layers, nn.Linear(2, outputs)), likelihood=likelihood)
    return model, pd.AutoMeanField(model)


HOW: dict[str, dict[str, Any]] = {
    "draws": {"samples": 5},
    "no samples": {"samples": 5, "keep_samples": False},
    "whole functions": {"samples": 5, "shared": True},
    "mean weights": {"method": "standard"},
    "linearised": {"method": "linearised"},
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", LIKELIHOODS)
@pytest.mark.thinned(2)
def test_a_parameter_that_is_not_a_number_is_named(name: str, how: str) -> None:
    model, guide = pair(LIKELIHOODS[name].make(), LIKELIHOODS[name].outputs)
    with torch.no_grad():
        guide.states["0/bias"].loc[-1] = torch.nan
    words = r"is not a number( at 6 of 6 points \(0, 1, 2, 3, 4, ...\))?: NaN is in 'states.0/bias.*smaller lr"
    with pytest.raises(pd.errors.DivergedError, match=words):
        pd.predict(model, guide, X, **HOW[how])


def test_statistics_and_batches_are_covered() -> None:
    model, guide = pair(pd.Categorical(), 3, nn.BatchNorm1d(2))
    model.net[0].running_var[0] = torch.nan
    with pytest.raises(pd.errors.DivergedError, match=r"NaN is in 'net.0.running_var'"):
        pd.predict(model, guide, DataLoader(X, batch_size=4), samples=5)


class Root(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sqrt()


@pytest.mark.parametrize("keep", [True, False])
def test_points_where_the_network_has_no_value_are_named(keep: bool) -> None:
    model, guide = pair(pd.Categorical(), 3, Root())
    with pytest.raises(pd.errors.DivergedError, match=r"at 3 of 6 points \(0, 1, 2\), and no parameter"):
        pd.predict(model, guide, X, samples=5, keep_samples=keep)
    assert pd.predict(model, guide, X[3:], samples=5, keep_samples=keep).probs.isfinite().all()


def test_a_site_of_a_pyro_model_is_covered() -> None:
    def model(x: Tensor, y: Tensor | None = None) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        f = pyro.deterministic("f", (x @ w).sqrt())
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(f, 1.0, validate_args=False), obs=y)

    guide = AutoNormal(model)
    guide(X.abs(), torch.ones(6))
    with torch.no_grad():
        for value in guide.parameters():
            value.fill_(-1.0)
    with pytest.raises(pd.errors.DivergedError, match="at 6 of 6 points"):
        pd.predict(model, guide, X.abs(), samples=3)


class Wild(pd.generative.Likelihood):
    """Numbers that have no mean."""

    def distribution(self, f: Tensor) -> Any:
        return dist.Cauchy(f, 1.0, validate_args=False).to_event(1)


@pytest.mark.parametrize("keep", [True, False])
def test_what_has_no_mean_by_nature_is_predicted(keep: bool) -> None:
    model, guide = pair(Wild(), 1)
    answer = pd.predict(model, guide, X, samples=5, keep_samples=keep)
    assert bool(answer.mean.isnan().all())


def test_classes_that_are_ruled_out_are_predicted() -> None:
    class Masked(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + torch.tensor([0.0, 0.0, -torch.inf])

    model = pd.BayesianNet(Masked(2, 3), likelihood=pd.Categorical())
    assert bool((pd.predict(model, pd.AutoMeanField(model), X, samples=5).probs[:, 2] == 0).all())


def test_a_replica_that_diverged_has_no_accuracy() -> None:
    def build(seed: int) -> tuple[Any, Any]:
        torch.manual_seed(seed)
        model, guide = pair(pd.Categorical(), 3)
        with torch.no_grad():
            guide.states["0/bias"].loc[0] = torch.nan if seed else 0.0
        return model, guide

    fleet = pd.Fleet(build, {"seed": [0, 1]})
    answer = pd.prediction.predict_fleet(fleet, X, torch.arange(6) % 3, samples=5)
    assert answer.scores()["accuracy"].isnan().tolist() == [False, True]
