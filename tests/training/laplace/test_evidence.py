"""The evidence of Laplace approximations: against linear models, where it is known, and by what it finds."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import optimize, stats
from torch import Tensor, nn

import pyro_dropout as pd
from pyro_dropout.mathematics.curvature import log_evidence
from pyro_dropout.training.laplace.evidence import evidence_slope, most_probable

F64 = torch.float64
STRUCTURES = ("full", "layer", "kron", "diagonal", "last")
QUIET: dict[str, Any] = {"progress": False}


def line(number: int = 30) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(3)
    x = rng.normal(size=(number, 2)) @ [[1.0, 0.6], [0.0, 0.5]]
    y = x @ [[1.5], [-0.7]] + 0.4 + 0.2 * rng.normal(size=(number, 1))
    return torch.tensor(x), torch.tensor(y)


def linear(tau: float | Tensor = 4.0, length: float = 1.0, bias: float = 1.0) -> pd.BayesianNet:
    return pd.BayesianNet(nn.Linear(2, 1).to(F64), pd.Prior(length, bias), pd.Gaussian(tau))


def exact(x: Tensor, y: Tensor, log_tau: float, log_length: float, log_bias: float) -> float:
    """log p(y) of the linear model, from the covariance of y."""
    xs, ys = x.numpy(), y.numpy().ravel()
    covariance = xs @ xs.T * math.exp(-2 * log_length) + math.exp(-2 * log_bias) + np.eye(len(ys)) * math.exp(-log_tau)
    return float(stats.multivariate_normal(np.zeros(len(ys)), covariance).logpdf(ys))


def slopes(function: Any, at: tuple[float, ...], step: float = 1e-5) -> list[float]:
    """Central differences."""
    found = []
    for k in range(len(at)):
        high, low = (tuple(v + sign * step * (i == k) for i, v in enumerate(at)) for sign in (1, -1))
        found.append((function(*high) - function(*low)) / (2 * step))
    return found


@pytest.mark.parametrize("structure", ["full", "layer", "kron", "last"])
def test_it_is_exact_in_a_linear_model(structure: Any) -> None:
    """Value and gradient: at the maximum the point's own dependence on the settings adds nothing to the gradient."""
    x, y = line()
    model = linear(4.0, 0.7, 1.3)
    guide = pd.laplace(model, pd.references.conjugate(model, x, y), x, y, structure)
    logs = math.log(4.0), math.log(0.7), math.log(1.3)
    assert guide.log_evidence().item() == pytest.approx(exact(x, y, *logs), rel=1e-10)
    changes = {name: torch.zeros((), dtype=F64, requires_grad=True) for name in ("tau", "weight", "bias")}
    log_evidence(guide.curvature, guide.mean(), changes).backward()
    found = [
        scale * change.grad.item() for scale, change in zip((1, 2, 2), changes.values(), strict=True)
    ]  # log P = 2 log l
    assert found == pytest.approx(slopes(lambda *at: exact(x, y, *at), logs), rel=1e-6)


def two_layers(likelihood: pd.generative.Likelihood, outputs: int) -> tuple[pd.BayesianNet, Tensor]:
    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, outputs)).to(F64)
    return pd.BayesianNet(net, pd.Prior(), likelihood), torch.randn(12, 2, dtype=F64)


@pytest.mark.filterwarnings("ignore:the point of this Laplace")
@pytest.mark.parametrize("structure", STRUCTURES)
def test_its_gradient_is_that_of_its_value(structure: Any) -> None:
    """Of a network: with other settings, the curvature at the same point is computed anew."""
    model, x = two_layers(pd.Gaussian(torch.tensor([2.0, 5.0], dtype=F64)), 2)
    y = torch.randn(12, 2, dtype=F64)
    sites = ["2.weight", "2.bias"] if structure == "last" else list(model.sites)
    guide = pd.laplace(model, model, x, y, structure)
    factor, lengths = 1.7, {name: 0.5 + 0.3 * k for k, name in enumerate(sites)}
    rest = {name: 1 / model.prior_scale(name) for name in model.sites}
    weights, biases = ({n: v for n, v in (rest | lengths).items() if n.endswith(end)} for end in ("weight", "bias"))
    noise = pd.Gaussian(factor * torch.tensor([2.0, 5.0], dtype=F64))
    again = pd.BayesianNet(model.net, pd.Prior(weights, biases), noise)
    before = {name: 1 / model.prior_scale(name) for name in sites}
    start = (math.log(factor), *(2 * math.log(lengths[name] / before[name]) for name in sites))

    def moved(*logs: Any) -> Tensor:
        named = zip(("tau", *sites), logs, strict=True)
        return log_evidence(guide.curvature, guide.mean(), {n: torch.as_tensor(v, dtype=F64) for n, v in named})

    there = pd.laplace(again, again, x, y, structure).log_evidence()
    assert moved(*start).item() == pytest.approx(there.item(), rel=1e-10)
    at = [torch.tensor(value, dtype=F64, requires_grad=True) for value in start]
    moved(*at).backward()
    expected = slopes(lambda *logs: moved(*logs).item(), start)
    assert [a.grad.item() for a in at] == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_its_slope_counts_that_the_point_moves() -> None:
    """The slope of log det(H + P) in the weights, by automatic differentiation, along a Gauss-Newton step of them."""
    model, x = two_layers(pd.Gaussian(4.0), 1)
    y = x[:, :1].sin()
    guide = pd.laplace(model, most_probable(model, x, y, dict(model.net.named_parameters()), 1000), x, y)
    mean = guide.mean()
    sizes = {name: value.numel() for name, value in mean.items()}
    precisions = {name: model.prior_scale(name).pow(-2).expand(size) for name, size in sizes.items()}
    prior = torch.cat(list(precisions.values()))
    point = torch.cat([value.flatten() for value in mean.values()])

    def outputs(flat: Tensor) -> Tensor:
        parts = zip(mean.items(), flat.split(list(sizes.values())), strict=True)
        weights = {name: part.reshape(value.shape) for (name, value), part in parts}
        return torch.func.functional_call(model.net, weights, (x,)).flatten()

    def precision(flat: Tensor) -> Tensor:
        jacobian = torch.func.jacrev(outputs)(flat)
        return 4 * jacobian.mT @ jacobian + prior.diag()

    turn = torch.func.grad(lambda flat: torch.logdet(precision(flat)))(point)
    changes = {name: torch.zeros((), dtype=F64, requires_grad=True) for name in ("tau", *mean)}
    log_evidence(guide.curvature, mean, changes).backward()
    expected, through = {}, 0.0
    for name in mean:
        pull = torch.cat([(each == name) * p for each, p in precisions.items()]) * point
        moved = -0.5 * turn @ torch.linalg.solve(precision(point), -pull)
        expected[name] = (changes[name].grad + moved).item()
        through -= moved.item()
    expected = {"tau": changes["tau"].grad.item() + through, **expected}
    assert abs(through) > 0.1
    found = evidence_slope(model, guide, x, y, list(expected))
    assert list(found.values()) == pytest.approx(list(expected.values()), rel=0.02, abs=0.02)


def test_the_maximum_of_a_linear_model_is_found() -> None:
    """Against a search for the maximum of the exact evidence."""
    x, y = line(60)
    model = linear(tau=1.0)
    found = pd.training.maximise_evidence(model, x, y, tolerance=1e-5, **QUIET)
    best = optimize.minimize(lambda at: -exact(x, y, *at), np.zeros(3), method="Nelder-Mead", options={"xatol": 1e-6})
    assert found.log_evidence == pytest.approx(-best.fun, abs=1e-4)
    settings = [math.log(v) for v in (found.tau, found.length_scales["weight"], found.length_scales["bias"])]
    assert settings == pytest.approx(best.x.tolist(), abs=0.01)
    assert found.log_evidence == max(found.trace) == found.guide.log_evidence().item()
    # The model has the settings, and a new one that is made with them too.
    assert model.likelihood.tau.item() == pytest.approx(found.tau)
    assert model.prior_of("weight").stddev[0, 0].item() == pytest.approx(1 / found.length_scales["weight"])
    assert torch.equal(pd.Gaussian(found.tau).log_tau, model.likelihood.log_tau)


def waves(number: int = 200) -> tuple[Tensor, Tensor]:
    """Noise of precision 25."""
    rng = np.random.default_rng(5)
    x = rng.uniform(-2, 2, size=(number, 1))
    y = np.sin(2 * x) + 0.2 * rng.normal(size=(number, 1))
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.float32)


def waves_net(learn: bool = False) -> pd.BayesianNet:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 12), nn.Tanh(), nn.Linear(12, 1))
    return pd.BayesianNet(net, pd.Prior(learn=learn, tempered=False), pd.Gaussian(1.0, learn=learn))


@pytest.mark.deep
@pytest.mark.parametrize("structure", ["full", "kron"])
def test_the_noise_of_made_data_is_found(structure: Any) -> None:
    """The precision of 200 draws of noise has a relative standard error of 10 %."""
    x, y = waves()
    model = waves_net()
    found = pd.training.maximise_evidence(model, x, y, structure, tolerance=5.0, **QUIET)
    assert 25 * 0.7 < found.tau < 25 * 1.4
    assert found.log_evidence > found.trace[0] + 50
    error = (model.evaluate(found.guide.mean(), x) - torch.sin(2 * x)).square().mean().sqrt()
    assert error < 0.08


def test_what_is_meant_to_be_learned_stays_so() -> None:
    """τ and widths that ELBO would learn are found by their evidence, and only those asked for."""
    x, y = waves(60)
    model = waves_net(learn=True)
    before = {name: model.prior_scale(name).item() for name in model.sites}
    found = pd.training.maximise_evidence(model, x, y, tune=["tau"], rounds=5, tolerance=1e6, **QUIET)
    assert model.likelihood.log_tau.requires_grad
    assert model.learned == list(model.sites)
    assert {name: model.prior_scale(name).item() for name in model.sites} == before
    assert model.likelihood.tau.item() == pytest.approx(found.tau, rel=1e-5) != 1.0


def test_classes_have_no_noise_to_find() -> None:
    x, y = waves(60)
    net = nn.Sequential(nn.Linear(1, 5), nn.Tanh(), nn.Linear(5, 2))
    model = pd.BayesianNet(net, pd.Prior(), pd.Categorical())
    found = pd.training.maximise_evidence(model, x, (y[:, 0] > 0).long(), tolerance=10.0, **QUIET)
    assert found.tau is None
    assert found.log_evidence > found.trace[0]
    with pytest.raises(pd.errors.PyroDropoutError, match=r"tune must hold 'length_scales'.*Categorical"):
        pd.training.maximise_evidence(model, x, y, tune=["tau"])


@pytest.mark.filterwarnings("ignore:the point of this Laplace", "ignore:log p.D. may rise")
def test_ordinary_parameters_are_trained_too() -> None:
    x, y = waves(60)
    norm = nn.LayerNorm(12)
    model = pd.BayesianNet(nn.Sequential(nn.Linear(1, 12), norm, nn.Tanh(), nn.Linear(12, 1)))
    before = [value.clone() for value in norm.parameters()]
    found = pd.training.maximise_evidence(model, x, y, rounds=2, steps=40, first_steps=80, **QUIET)
    assert found.trace[1] > found.trace[0] + 5
    assert all(not torch.equal(a, b) for a, b in zip(before, norm.parameters(), strict=True))
    again = pd.laplace(model, found.guide, x, y)  # with the parameters and settings that the model now has
    assert again.log_evidence().item() == pytest.approx(found.log_evidence, abs=1e-3)
