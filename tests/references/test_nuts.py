"""The no-U-turn sampler on models, against posteriors in closed form and by quadrature; what it warns about."""

import warnings
from typing import Any

import arviz as az
import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

import pyro_dropout as pd

QUIET: Any = {"progress": False}


def mcse(values: Tensor) -> float:
    return np.asarray(az.mcse(values.double().numpy())).item()  # type: ignore[no-any-return]


@pytest.mark.deep
@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.thinned(2)
def test_a_linear_model_has_its_conjugate_posterior(dtype: torch.dtype) -> None:
    """Within 3 Monte Carlo standard errors, 6 numbers: one seed in 60 fails on correct code, and this one does not."""
    torch.manual_seed(1)
    x = torch.randn(20, 2, dtype=dtype)
    y = x @ torch.tensor([[1.0], [-2.0]], dtype=dtype) + 0.5
    model = pd.BayesianNet(nn.Linear(2, 1).to(dtype), likelihood=pd.Gaussian(tau=2.0))
    found = pd.nuts(model, x, y, samples=600, warmup=300, seed=0, compile=False, **QUIET)
    exact = pd.references.conjugate(model, x, y)
    assert found.weights["weight"].shape == (4, 600, 1, 2)
    assert found.weights["weight"].dtype == dtype
    assert found.divergences == 0
    draws = torch.cat([found.weights["weight"].flatten(2), found.weights["bias"]], -1).double()
    mean = torch.cat([exact.mean()["weight"].flatten(), exact.mean()["bias"]]).double()
    for k in range(3):
        square = (draws[..., k] - mean[k]) ** 2
        assert abs(draws[..., k].mean() - mean[k]) < 3 * mcse(draws[..., k])
        assert abs(square.mean() - exact.covariance[k, k]) < 3 * mcse(square)


@pytest.mark.deep
def test_a_positive_site_has_its_posterior_by_quadrature() -> None:
    """A scale with a log-normal prior: 2 numbers within 5.5 standard errors, 1e-7 to fail on correct code."""

    def model(x: Tensor, y: Tensor | None = None) -> Tensor:
        scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(torch.zeros_like(x), scale).to_event(1), obs=y)
        return scale * torch.ones_like(x)

    x = torch.zeros(5, 1, dtype=torch.float64)
    y = torch.tensor([[0.5], [-1.0], [2.0], [-0.3], [1.2]], dtype=torch.float64)
    draws = pd.nuts(model, x, y, chains=4, samples=500, warmup=200, compile=False, **QUIET).weights["scale"]
    grid = np.exp(np.linspace(-4, 4, 4001))
    density = stats.lognorm.pdf(grid, 1.0) * np.prod([stats.norm.pdf(t, 0, grid) for t in y[:, 0].numpy()], 0)
    density /= np.trapezoid(density, grid)
    for power in (1, 2):
        exact = np.trapezoid(density * grid**power, grid)
        assert abs(float((draws**power).mean()) - exact) < 5.5 * mcse(draws**power)
    assert draws.min() > 0


def test_a_seed_repeats() -> None:
    model = pd.BayesianNet(nn.Linear(1, 1))
    x = torch.randn(5, 1)
    options = {"chains": 2, "samples": 3, "warmup": 10, "compile": False, **QUIET}
    one, two, other = (pd.nuts(model, x, x, seed=seed, **options) for seed in (1, 1, 2))
    assert torch.equal(one.weights["bias"], two.weights["bias"])
    assert not torch.equal(one.weights["bias"], other.weights["bias"])
    assert one.seconds > 0


def test_chains_that_disagree_are_told_with_what_to_do() -> None:
    net = nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1))
    model = pd.BayesianNet(net, likelihood=pd.Gaussian(tau=100.0))
    x = torch.linspace(-1, 1, 10).unsqueeze(-1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pd.nuts(model, x, x**2, samples=10, warmup=20, max_tree_depth=2, compile=False, **QUIET)
    told = [str(warning.message) for warning in caught if "R-hat" in str(warning.message)]
    assert len(told) == 1
    assert "more samples" in told[0]
    assert "max_tree_depth" in told[0]


@pytest.mark.deep
def test_trajectories_that_are_lost_are_told_with_what_to_do() -> None:
    def funnel(x: Tensor, y: Tensor | None = None) -> Tensor:
        width = pyro.sample("width", dist.Normal(0.0, 3.0))
        value = pyro.sample("value", dist.Normal(0.0, torch.exp(width)).expand([4]).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(x, 1.0).to_event(1), obs=y)
        return x + value[0]

    x = torch.zeros(1, 1, dtype=torch.float64)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = pd.nuts(
            funnel, x, x, chains=2, samples=50, warmup=30, target_accept=0.6, max_tree_depth=6, compile=False, **QUIET
        )
    assert found.divergences > 0
    told = [str(warning.message) for warning in caught]
    assert any("diverged" in text and "target_accept" in text for text in told)
    assert f"{found.divergences} divergence" in repr(found)


LINE = torch.linspace(-1, 1, 6).unsqueeze(-1)


def disagreeing(x: Tensor, y: Tensor) -> None:
    """A posterior with two modes, of which each chain finds one."""
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(10 * w**2, 0.01), obs=y)


def test_draws_are_not_lost_where_warnings_are_errors() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match=r"diverged|disagree") as raised:
            pd.nuts(disagreeing, LINE, torch.full((6,), 10.0), chains=4, samples=10, warmup=5, compile=False, **QUIET)
    assert raised.value.posterior.weights["w"].shape == (4, 10)  # type: ignore[attr-defined]
