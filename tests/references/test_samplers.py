"""Both samplers on models, against posteriors in closed form and by quadrature; what they warn about and refuse."""

import warnings
from typing import Any, NamedTuple

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

QUIET: Any = {"progress": False}
SHORT: Any = {"chains": 32, "warmup": 400, "samples": 30, "thin": 10, **QUIET}


class Sampler(NamedTuple):
    """A sampler, how long it runs for quadrature, and how far it may be off.

    Attributes:
        run: the sampler.
        how: its settings.
        errors: how many Monte Carlo standard errors.
        bias: of a standard deviation, and of a variance: what the errors of the steps may cost.
    """

    run: Any
    how: dict[str, Any]
    errors: float
    bias: float


SAMPLERS = {
    "nuts": Sampler(pd.nuts, {"samples": 500, "warmup": 200, "compile": False, **QUIET}, 5.5, 0.0),
    "mclmc": Sampler(pd.mclmc, SHORT, 4.0, 0.03),
}


def check_mean(values: Tensor, exact: float, errors: float, slack: float) -> None:
    error = np.asarray(az.mcse(values.double().numpy())).item()
    assert abs(float(values.double().mean()) - exact) < errors * error + slack


def check_exact(found: Any, model: pd.BayesianNet, x: Tensor, y: Tensor, errors: float, bias: float) -> None:
    """Of 6 numbers within 3 standard errors, one seed in 60 fails on correct code; within 4, one in 2,600."""
    exact = pd.references.conjugate(model, x, y)
    assert (found.weights["weight"].dtype, found.divergences) == (x.dtype, 0)
    draws = torch.cat([found.weights["weight"].flatten(2), found.weights["bias"]], -1).double()
    mean = torch.cat([exact.mean()["weight"].flatten(), exact.mean()["bias"]]).double()
    for k in range(3):
        variance = float(exact.covariance[k, k])
        check_mean(draws[..., k], float(mean[k]), errors, bias * variance**0.5)
        check_mean((draws[..., k] - mean[k]) ** 2, variance, errors, bias * variance)


# --- posteriors that are known ----------------------------------------------------------------------------------------


@pytest.mark.deep
@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.thinned(2)
def test_nuts_finds_the_conjugate_posterior_of_a_linear_model(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    x = torch.randn(20, 2, dtype=dtype)
    y = x @ torch.tensor([[1.0], [-2.0]], dtype=dtype) + 0.5
    model = pd.BayesianNet(nn.Linear(2, 1).to(dtype), likelihood=pd.Gaussian(tau=2.0))
    found = pd.nuts(model, x, y, samples=600, warmup=300, seed=0, compile=False, **QUIET)
    assert found.weights["weight"].shape == (4, 600, 1, 2)
    check_exact(found, model, x, y, 3.0, 0.0)


def line() -> tuple[pd.BayesianNet, Tensor, Tensor]:
    """Two inputs that are almost equal: the posterior is a hundred times as long as it is wide."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(20, 1, generator=generator) + 0.2 * torch.randn(20, 2, generator=generator)
    return pd.BayesianNet(nn.Linear(2, 1), pd.Prior(), pd.Gaussian(tau=10.0)), x, x.sum(-1, keepdim=True) + 0.5


class FarAway:
    """A posterior that is one point, far from the posterior."""

    def sample_weights(self, n: int) -> dict[str, Tensor]:
        return {"weight": torch.full((n, 1, 2), 5.0), "bias": torch.full((n, 1), -5.0)}


@pytest.mark.parametrize("start", [None, FarAway()], ids=["usual start", "far away"])
def test_mclmc_finds_the_conjugate_posterior_wherever_it_starts(start: Any) -> None:
    model, x, y = line()
    found = pd.mclmc(model, x, y, start=start, **SHORT)
    assert found.weights["weight"].shape == (32, 30, 1, 2)
    check_exact(found, model, x, y, 4.0, 0.03)


@pytest.mark.parametrize("name", [pytest.param("nuts", marks=pytest.mark.deep), "mclmc"])
def test_a_positive_site_has_its_posterior_by_quadrature(name: str) -> None:
    """A scale with a log-normal prior, beside a mean that is known: its mean and its mean square."""

    def model(y: Tensor) -> None:
        scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
        pyro.sample("other", dist.Normal(0.0, 3.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(0.0, scale), obs=y)

    sampler = SAMPLERS[name]
    y = torch.tensor([0.5, -1.0, 2.0, -0.3, 1.2], dtype=torch.float64)
    draws = sampler.run(model, y, **sampler.how).weights["scale"]
    grid = np.exp(np.linspace(-4, 4, 4001))
    density = stats.lognorm.pdf(grid, 1.0) * np.prod([stats.norm.pdf(t, 0, grid) for t in y.numpy()], 0)
    density /= np.trapezoid(density, grid)
    for power in (1, 2):
        exact = np.trapezoid(density * grid**power, grid)
        width = np.trapezoid(density * (grid**power - exact) ** 2, grid) ** 0.5
        check_mean(draws**power, exact, sampler.errors, sampler.bias * width)
        assert power == 2 or abs(float(draws.std()) - width) < 0.1 * width
    assert draws.min() > 0


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_seed_repeats(name: str) -> None:
    model, x, y = line()
    how = {"chains": 2, "samples": 3, **({"warmup": 100, "thin": 2} if name == "mclmc" else {"warmup": 10}), **QUIET}
    one, two, other = (SAMPLERS[name].run(model, x, y, seed=seed, **how) for seed in (1, 1, 2))
    assert torch.equal(one.weights["bias"], two.weights["bias"])
    assert not torch.equal(one.weights["bias"], other.weights["bias"])
    assert one.seconds > 0


# --- what is warned of ------------------------------------------------------------------------------------------------


def two_modes(y: Tensor) -> None:
    """A posterior with two modes, of which each chain finds one."""
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(w[0] ** 2, 0.1), obs=y)


def test_chains_that_start_in_two_modes_are_told() -> None:
    with pytest.warns(UserWarning, match=r"chains disagree about site 'w': .* Use warmup=800, thin=20, start="):
        pd.mclmc(two_modes, torch.full((20,), 1.0), **SHORT)


def test_draws_are_not_lost_where_warnings_are_errors() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match=r"diverged|disagree") as raised:
            pd.nuts(two_modes, torch.full((6,), 1.0), chains=4, samples=10, warmup=5, compile=False, **QUIET)
    assert raised.value.posterior.weights["w"].shape == (4, 10, 2)  # type: ignore[attr-defined]


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
    how: Any = {"chains": 2, "samples": 50, "warmup": 30, "target_accept": 0.6, "max_tree_depth": 6, "compile": False}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = pd.nuts(funnel, x, x, **how, **QUIET)
    assert found.divergences > 0
    told = [str(warning.message) for warning in caught]
    assert any("diverged" in text and "target_accept" in text for text in told)
    assert f"{found.divergences} divergence" in repr(found)


# --- microcanonical steps ---------------------------------------------------------------------------------------------


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


def test_what_cannot_be_sampled_is_refused() -> None:
    model, x, y = line()
    with pytest.raises(PyroDropoutError, match="warmup must be a whole number of at least 100"):
        pd.mclmc(model, x, y, warmup=10)
    with pytest.raises(PyroDropoutError, match=r"start must have draws of 'bias', each of shape .1,.; it has none"):
        pd.mclmc(model, x, y, start=pd.prediction.SampledPosterior({"weight": torch.zeros(1, 5, 1, 2)}), progress=False)
    alone = pd.BayesianNet(nn.Linear(1, 1, bias=False))
    with pytest.raises(PyroDropoutError, match="one latent number, and a direction needs two; use nuts"):
        pd.mclmc(alone, x[:, :1], y, progress=False)
