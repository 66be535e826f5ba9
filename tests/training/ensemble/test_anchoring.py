"""Anchored members: draws of exact posteriors, of plain Pyro models too, and their anchors."""

import math
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, nn

import pyro_dropout as pd
from pyro_dropout.generative.model_call import ModelCall
from pyro_dropout.training.ensemble.anchoring import moved, perturbation

QUIET: dict[str, Any] = {"compile": False, "progress": False, "lr": 0.1, "schedule": lambda done: 1.001 - done / 600}


def distance(draws: Tensor, mean: Tensor, covariance: Tensor) -> float:
    """Return the largest difference of the draws' moments from the exact ones, in standard errors."""
    count = len(draws)
    spread = covariance.diagonal()
    means = (draws.mean(0) - mean).abs() / (spread / count).sqrt()
    errors = ((spread[:, None] * spread[None, :] + covariance.square()) / count).sqrt()
    return max(means.max().item(), ((draws.T.cov() - covariance).abs() / errors).max().item())


def exact(x: Tensor, y: Tensor, tau: float, precision: Tensor) -> tuple[Tensor, Tensor]:
    covariance = (tau * x.T @ x + precision).inverse()
    return covariance @ (tau * x.T @ y), covariance


def line(tau: float, scale: float, points: int, inputs: int, members: int, seed: int) -> float:
    torch.manual_seed(seed)
    x = torch.randn(points, inputs, dtype=torch.float64)
    y = x.sum(1, keepdim=True) + torch.randn(points, 1, dtype=torch.float64)
    net = nn.Linear(inputs, 1, bias=False).double()
    model = pd.BayesianNet(net, pd.Prior(length_scale=scale), pd.Gaussian(tau))
    ensemble = pd.Ensemble(model, members=members, start="module")
    pd.fit(model, ensemble, x, y, steps=600, **QUIET)
    drawn = ensemble.draws_at(torch.arange(members))["weight"][:, 0]
    return distance(drawn, *exact(x, y[:, 0], tau, scale**2 * torch.eye(inputs, dtype=torch.float64)))


@pytest.mark.deep
@settings(max_examples=12)
@given(st.floats(0.1, 10.0), st.floats(0.5, 2.0), st.integers(1, 20), st.integers(1, 4), st.integers(0, 10**6))
def test_any_linear_model(tau: float, scale: float, points: int, inputs: int, seed: int) -> None:
    assert line(tau, scale, points, inputs, members=20_000, seed=seed) < 4


def linear(x: Tensor, y: Tensor | None = None) -> Tensor:
    """A Pyro model that is not a network: correlated priors, and a plate of Gaussian data."""
    root = torch.tensor([[1.0, 0.0], [0.6, 0.8]], dtype=x.dtype)
    w = pyro.sample("w", dist.MultivariateNormal(torch.ones(2, dtype=x.dtype), scale_tril=root))
    with pyro.plate("points", len(x)):
        return pyro.sample("y", dist.Normal(x @ w, 0.5), obs=y)


@pytest.mark.deep
def test_any_pyro_model_with_gaussian_priors() -> None:
    x = torch.randn(8, 2, dtype=torch.float64)
    y = x.sum(1) + 0.5 * torch.randn(8, dtype=torch.float64)
    ensemble = pd.Ensemble(linear, members=1000)
    pd.fit(linear, ensemble, x, y, steps=600, **QUIET)
    root = torch.tensor([[1.0, 0.0], [0.6, 0.8]], dtype=torch.float64)
    precision = (root @ root.T).inverse()
    covariance = (4 * x.T @ x + precision).inverse()
    mean = covariance @ (4 * x.T @ y + precision @ torch.ones(2, dtype=torch.float64))
    assert distance(ensemble.draws_at(torch.arange(1000))["w"], mean, covariance) < 4


def flips(x: Tensor, y: Tensor | None = None) -> None:
    """Several outputs in a plate outside the data's: the data points are still those of the data's plate."""
    w = pyro.sample("w", dist.Normal(torch.zeros(3, 1, dtype=x.dtype), 1000.0).to_event(2))
    with pyro.plate("outputs", 3, dim=-2), pyro.plate("points", len(x), dim=-1):
        pyro.sample("y", dist.Bernoulli(logits=w.expand(3, len(x))), obs=None if y is None else y.T)


@pytest.mark.deep
def test_the_weights_are_those_of_the_data_points_not_of_an_outer_plate() -> None:
    y = (torch.arange(20).unsqueeze(-1) < torch.tensor([6, 10, 14])).double()
    ensemble = pd.Ensemble(flips, members=2000, start="module")
    pd.fit(flips, ensemble, torch.ones(20, 1, dtype=torch.float64), y, steps=600, **QUIET)
    heads = ensemble.draws_at(torch.arange(2000))["w"][..., 0].sigmoid().numpy()
    for k, column in zip((6, 10, 14), heads.T, strict=True):
        assert stats.kstest(column, stats.beta(k, 20 - k).cdf).pvalue > 1e-3


def positive(y: Tensor) -> None:
    """A site whose prior is Gaussian in unconstrained space, with a Gaussian likelihood there."""
    z = pyro.sample("z", dist.LogNormal(torch.tensor(0.5, dtype=y.dtype), 2.0))
    with pyro.plate("points", len(y)):
        pyro.sample("y", dist.Normal(z.log(), 1.0), obs=y)


@pytest.mark.deep
def test_a_lognormal_prior_is_exact_in_unconstrained_space() -> None:
    y = torch.tensor([1.0, 2.0, 0.0], dtype=torch.float64)
    ensemble = pd.Ensemble(positive, members=1000)
    pd.fit(positive, ensemble, y, steps=600, **QUIET)
    log_z = ensemble.draws_at(torch.arange(1000))["z"].log().reshape(-1, 1)
    covariance = torch.tensor([[1 / (3 + 1 / 4)]], dtype=torch.float64)
    mean = covariance[0] * (3 + 0.5 / 4)
    # The median of the prior, which the anchors are centred at, is estimated.
    assert distance(log_z, mean, covariance) < 5


F64 = torch.float64
QUICK: dict[str, Any] = {"compile": False, "progress": False, "lr": 0.2, "schedule": lambda done: 1.001 - done / 200}


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
    pd.fit(noise_only, ensemble, y, steps=200, **QUICK)
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
    pd.fit(groups, ensemble, x, y, steps=200, **QUICK)
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
    pd.fit(counted, ensemble, y, steps=200, **QUICK)
    rate = ensemble.sample_weights(600)["rate"]
    exact = (y.var(unbiased=False) / 11).sqrt().item()
    assert rate.std().item() == pytest.approx(exact, rel=0.13)  # four standard errors
    assert rate.mean().item() == pytest.approx(3.0, abs=4 * exact / 600**0.5)


def scaled(x: Tensor, y: Tensor | None = None) -> None:
    scale = pyro.sample("scale", dist.Gamma(2.0, 3.0))
    slope = pyro.sample("slope", dist.MultivariateNormal(torch.ones(2), torch.tensor([[2.0, 0.5], [0.5, 1.0]])))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(x @ slope, scale), obs=y)


def test_points_of_a_network_start_at_their_anchors() -> None:
    model = pd.BayesianNet(nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)), pd.Prior(0.5))
    ensemble = pd.Ensemble(model, members=5, start="anchor")
    x = torch.randn(6, 2)
    drawn = perturbation(ensemble.template, ensemble.seeds.tolist(), ModelCall(model, (x, x[:, :1], 6)), 6)["anchors"]
    for name, scale in pd.Prior(0.5).scales(model.net).items():
        assert torch.equal(ensemble.stacked()[f"states.{name.replace('.', '/')}.loc"], drawn[name])
        assert 0.6 < (drawn[name] / scale).square().mean().sqrt() < 1.5, "draws of the prior"
    apart = pd.Ensemble(model, members=5, seed=0).stacked()["states.0/weight.loc"]
    assert apart.abs().max() <= 2**-0.5  # torch's own initialisation, not a draw from N(0, 4)


def test_priors_of_any_kind_have_the_same_anchors_each_time() -> None:
    x = torch.randn(8, 2)
    torch.manual_seed(0)
    ensemble = pd.Ensemble(scaled, members=3, start="anchor")
    ensemble.meet(ModelCall(scaled, (x, x[:, 0])))
    seen = []
    for other in (1, 2):  # the state of torch's generator must not matter
        torch.manual_seed(other)
        seen.append(
            perturbation(ensemble.template, ensemble.seeds.tolist(), ModelCall(scaled, (x, x[:, 0])), 8)["anchors"]
        )
    assert all(torch.equal(seen[0][name], seen[1][name]) for name in ("scale", "slope"))
    own = ensemble.stacked()
    fn = dist.MultivariateNormal(torch.ones(2), torch.tensor([[2.0, 0.5], [0.5, 1.0]]))
    torch.testing.assert_close(own["states.slope.loc"][1], moved(fn, seen[0]["slope"][1]).mean)
    # Gamma's draws: start = log of a draw, so its exponential has Gamma's mean over many members
    many = pd.Ensemble(scaled, members=1000, start="anchor", seed=3)
    many.meet(ModelCall(scaled, (x, x[:, 0])))
    scales = many.stacked()["states.scale.loc"].exp()
    assert abs(scales.mean() - 2 / 3) < 4 * (2**0.5 / 3) / 1000**0.5
