"""Microcanonical Langevin Monte Carlo against posteriors in closed form and by quadrature, and what it refuses."""

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
from pyro_dropout.errors import PyroDropoutError
from pyro_dropout.references.mclmc import _turned

SHORT: Any = {"chains": 32, "warmup": 400, "samples": 30, "thin": 10, "progress": False}
BIAS = 0.03  # of a standard deviation, and of a variance: what the errors of the steps may cost


def mcse(values: Tensor) -> float:
    return np.asarray(az.mcse(values.double().numpy())).item()  # type: ignore[no-any-return]


def line() -> tuple[pd.BayesianNet, Tensor, Tensor]:
    """Two inputs that are almost equal: the posterior is a hundred times as long as it is wide."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(20, 1, generator=generator) + 0.2 * torch.randn(20, 2, generator=generator)
    return pd.BayesianNet(nn.Linear(2, 1), pd.Prior(), pd.Gaussian(tau=10.0)), x, x.sum(-1, keepdim=True) + 0.5


def check_exact(found: Any, model: pd.BayesianNet, x: Tensor, y: Tensor) -> None:
    """Within 4 Monte Carlo standard errors and the bias, 6 numbers: one seed in 2,600 fails on correct code."""
    exact = pd.references.conjugate(model, x, y)
    draws = torch.cat([found.weights["weight"].flatten(2), found.weights["bias"]], -1).double()
    mean = torch.cat([exact.mean()["weight"].flatten(), exact.mean()["bias"]]).double()
    for k in range(3):
        variance = float(exact.covariance[k, k])
        square = (draws[..., k] - mean[k]) ** 2
        assert abs(draws[..., k].mean() - mean[k]) < 4 * mcse(draws[..., k]) + BIAS * variance**0.5
        assert abs(square.mean() - variance) < 4 * mcse(square) + BIAS * variance


def test_a_linear_model_has_its_conjugate_posterior() -> None:
    model, x, y = line()
    found = pd.mclmc(model, x, y, **SHORT)
    assert found.weights["weight"].shape == (32, 30, 1, 2)
    assert (found.weights["weight"].dtype, found.divergences) == (torch.float32, 0)
    check_exact(found, model, x, y)


class FarAway:
    """A posterior that is one point, far from the posterior."""

    def sample_weights(self, n: int) -> dict[str, Tensor]:
        return {"weight": torch.full((n, 1, 2), 5.0), "bias": torch.full((n, 1), -5.0)}


def test_the_draws_are_the_posteriors_wherever_chains_start() -> None:
    model, x, y = line()
    check_exact(pd.mclmc(model, x, y, start=FarAway(), **SHORT), model, x, y)


def test_a_positive_site_has_its_posterior_by_quadrature() -> None:
    """A scale with a log-normal prior, beside a mean that is known: within 4 standard errors and the bias."""

    def model(y: Tensor) -> None:
        scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
        pyro.sample("other", dist.Normal(0.0, 3.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(0.0, scale), obs=y)

    y = torch.tensor([0.5, -1.0, 2.0, -0.3, 1.2], dtype=torch.float64)
    draws = pd.mclmc(model, y, **SHORT).weights["scale"]
    grid = np.exp(np.linspace(-4, 4, 4001))
    density = stats.lognorm.pdf(grid, 1.0) * np.prod([stats.norm.pdf(t, 0, grid) for t in y.numpy()], 0)
    density /= np.trapezoid(density, grid)
    mean = np.trapezoid(density * grid, grid)
    width = np.trapezoid(density * (grid - mean) ** 2, grid) ** 0.5
    assert abs(float(draws.mean()) - mean) < 4 * mcse(draws) + BIAS * width
    assert abs(float(draws.std()) - width) < 0.1 * width
    assert draws.min() > 0


def test_a_turn_is_the_flow_in_a_constant_gradient() -> None:
    """Against small steps of the differential equation, and the energy that the paper assigns to a direction."""
    torch.manual_seed(0)
    d, time, steps = 5, 0.7, 20_000
    u, slope = nn.functional.normalize(torch.randn(3, d).double(), dim=-1), torch.randn(3, d).double()
    moved, kinetic = u, torch.zeros(3, 1).double()
    for _ in range(steps):
        along = (moved * slope).sum(-1, keepdim=True)
        moved = moved - (slope - along * moved) * time / steps / (d - 1)
        kinetic = kinetic - along * time / steps
    found, change = _turned(u, slope, torch.tensor(time))
    assert torch.allclose(found, moved, atol=1e-4)
    assert torch.allclose(change, kinetic, atol=1e-4)


def test_chains_that_start_in_two_modes_are_told() -> None:
    def two(y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(w[0] ** 2, 0.1), obs=y)

    with pytest.warns(UserWarning, match=r"chains disagree about site 'w': .* Use warmup=800, thin=20, start="):
        pd.mclmc(two, torch.full((20,), 1.0), **SHORT)


def wide(x: Tensor, y: Tensor) -> None:
    beta = pyro.sample("beta", dist.Normal(0.0, 1000.0).expand([3]).to_event(1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(x @ beta, 2.0), obs=y)


class OneAstray:
    """Draws of which every other one is a thousand standard deviations of the posterior away."""

    def sample_weights(self, n: int) -> dict[str, Tensor]:
        return {"beta": torch.where(torch.arange(n)[:, None] % 4 == 3, 500.0, 1.0).expand(n, 3)}


def test_chains_arrive_under_a_wide_prior() -> None:
    """Within a fifth of the exact deviations; without a warning, which would be an error here."""
    generator = torch.Generator().manual_seed(0)
    x = torch.stack([torch.ones(60), torch.randn(60, generator=generator) * 3 + 5], 1)
    x = torch.cat([x, torch.randn(60, 1, generator=generator)], 1)
    y = x @ torch.tensor([20.0, -3.0, 1.5]) + 2 * torch.randn(60, generator=generator)
    exact = (x.T @ x / 4).inverse()
    found = pd.mclmc(wide, x, y, warmup=1000, progress=False).weights["beta"].flatten(0, 1)
    torch.testing.assert_close(found.std(0), exact.diag().sqrt(), rtol=0.2, atol=0.0)
    assert bool(((found.mean(0) - exact @ (x.T @ y / 4)).abs() < 0.3 * exact.diag().sqrt()).all())
    astray = "8 of 32 chains are where the posterior has next to no mass"
    with pytest.warns(UserWarning, match=astray), pytest.warns(UserWarning, match="chains disagree"):
        pd.mclmc(wide, x, y, start=OneAstray(), **SHORT | {"warmup": 100})


def test_a_seed_repeats() -> None:
    model, x, y = line()
    how = {"chains": 2, "warmup": 100, "samples": 3, "thin": 2, "progress": False}
    one, two, other = (pd.mclmc(model, x, y, seed=seed, **how) for seed in (1, 1, 2))
    assert torch.equal(one.weights["bias"], two.weights["bias"])
    assert not torch.equal(one.weights["bias"], other.weights["bias"])


def test_what_cannot_be_sampled_is_refused() -> None:
    model, x, y = line()
    with pytest.raises(PyroDropoutError, match="warmup must be a whole number of at least 100"):
        pd.mclmc(model, x, y, warmup=10)
    with pytest.raises(PyroDropoutError, match=r"start must have draws of 'bias', each of shape .1,.; it has none"):
        pd.mclmc(model, x, y, start=pd.prediction.SampledPosterior({"weight": torch.zeros(1, 5, 1, 2)}), progress=False)
    alone = pd.BayesianNet(nn.Linear(1, 1, bias=False))
    with pytest.raises(PyroDropoutError, match="one latent number, and a direction needs two; use nuts"):
        pd.mclmc(alone, x[:, :1], y, progress=False)
