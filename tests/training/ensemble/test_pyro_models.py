"""Anchored ensembles of plain Pyro models: latent widths of the noise, and groups around a mean."""

import math
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor, nn

import pyro_dropout as pd
from pyro_dropout.generative.model_call import ModelCall
from pyro_dropout.training.ensemble.anchoring import perturbation

F64 = torch.float64
QUIET: dict[str, Any] = {"compile": False, "progress": False, "lr": 0.2, "schedule": lambda done: 1.001 - done / 200}


def noise_only(y: Tensor) -> None:
    """Gaussian noise of unknown width, with a prior that says nothing about it."""
    scale = pyro.sample("scale", dist.LogNormal(torch.zeros((), dtype=F64), 3.0))
    with pyro.plate("points", len(y)):
        pyro.sample("y", dist.Normal(0.0, scale), obs=y)


def normal_quantiles(count: int) -> Tensor:
    """A sample with the moments of a normal distribution."""
    return torch.distributions.Normal(0.0, 1.0).icdf((torch.arange(count, dtype=F64) + 0.5) / count)


def test_members_differ_in_a_latent_width_as_the_posterior_does() -> None:
    """The exact posterior of scale² is inverse gamma: log scale has the standard deviation ½ √ψ'(N/2)."""
    y = 0.5 * normal_quantiles(80)
    ensemble = pd.Ensemble(noise_only, members=400, start="module", seed=0)
    pd.fit(noise_only, ensemble, y, steps=200, **QUIET)
    found = ensemble.sample_weights(400)["scale"].log()
    exact = 0.5 * torch.polygamma(1, torch.tensor(40.0)).sqrt().item()
    # The spread of 400 members is known to 3.5 %; the bootstrap's differs from the posterior's by a few percent.
    assert found.std().item() == pytest.approx(exact, rel=0.15)
    assert found.mean().item() == pytest.approx(math.log(0.5), abs=0.03)


@pytest.mark.parametrize(
    ("likelihood", "outputs", "shape"),
    [
        (pd.Gaussian(2.0), 1, None),
        (pd.Gaussian(2.0, learn=True), 1, None),  # all members share it: it is trained on the targets as they are
        (pd.HeteroscedasticGaussian(), 4, (3, 8, 2)),
    ],
)
def test_only_a_latent_width_gets_weights(likelihood: Any, outputs: int, shape: tuple[int, ...] | None) -> None:
    model = pd.BayesianNet(nn.Linear(1, outputs), likelihood=likelihood)
    call = ModelCall(model, (torch.ones(8, 1), torch.ones(8, 2 if outputs == 4 else 1)))
    widths = perturbation(pd.AutoMeanField(model), [1, 2, 3], call, batch=5)["widths"]
    assert {name: tuple(value.shape) for name, value in widths.items()} == ({} if shape is None else {"y": shape})
    assert all(value.mean((1, 2)).tolist() == pytest.approx([1.0] * 3) for value in widths.values())


def groups(x: Tensor, y: Tensor) -> None:
    """Groups around a mean, all widths known: linear and Gaussian."""
    mu = pyro.sample("mu", dist.Normal(torch.zeros((), dtype=F64), 2.0))
    with pyro.plate("groups", 3):
        theta = pyro.sample("theta", dist.Normal(mu, 1.5))
    with pyro.plate("points", len(x)):
        pyro.sample("y", dist.Normal(theta[x], 0.7), obs=y)


@pytest.mark.deep
def test_groups_with_known_widths_are_exact() -> None:
    x = torch.tensor([0, 0, 0, 1, 1, 2])
    y = torch.tensor([1.0, 2.0, 1.5, -1.0, 0.0, 3.0], dtype=F64)
    ensemble = pd.Ensemble(groups, members=800, start="module", seed=0)
    pd.fit(groups, ensemble, x, y, steps=200, **QUIET)
    found = ensemble.draws_at(torch.arange(800))
    draws = torch.cat([found["mu"].reshape(-1, 1), found["theta"].reshape(-1, 3)], 1)
    # p(mu, theta) is Gaussian with this precision, to which the data add theirs.
    precision = torch.zeros(4, 4, dtype=F64)
    precision[0, 0] = 1 / 4 + 3 / 1.5**2
    precision[0, 1:] = precision[1:, 0] = -1 / 1.5**2
    counts = torch.tensor([3.0, 2.0, 1.0], dtype=F64)
    precision[1:, 1:] = torch.diag(1 / 1.5**2 + counts / 0.7**2)
    sums = torch.tensor([0.0, 4.5, -1.0, 3.0], dtype=F64) / 0.7**2
    covariance = precision.inverse()
    error = (covariance.diagonal() / 800).sqrt()
    assert ((draws.mean(0) - covariance @ sums).abs() / error).max() < 4  # fails once in 4,000 on correct code
    wide = (covariance.diagonal().outer(covariance.diagonal()) + covariance.square()) / 800
    assert ((draws.T.cov() - covariance).abs() / wide.sqrt()).max() < 4


def counted(y: Tensor) -> None:
    """Counts with one rate, and a prior that says nothing about it."""
    rate = pyro.sample("rate", dist.LogNormal(torch.zeros((), dtype=F64), 3.0))
    with pyro.plate("points", len(y)):
        pyro.sample("y", dist.Poisson(rate), obs=y)


def test_bootstrapped_counts_have_the_moments_of_weighted_means() -> None:
    """Weights of the Bayesian bootstrap are Dirichlet: the weighted mean has the variance s²/(n + 1)."""
    y = torch.tensor([0.0, 1, 1, 2, 2, 3, 3, 4, 5, 9], dtype=F64)
    ensemble = pd.Ensemble(counted, members=600, start="module", seed=0)
    pd.fit(counted, ensemble, y, steps=200, **QUIET)
    rate = ensemble.sample_weights(600)["rate"]
    exact = (y.var(unbiased=False) / 11).sqrt().item()
    assert rate.std().item() == pytest.approx(exact, rel=0.13)  # four standard errors
    assert rate.mean().item() == pytest.approx(3.0, abs=4 * exact / 600**0.5)
