"""The models of §3.1 and §4.5 against numpy networks, closed-form kernels, conjugate posteriors and scipy.

What the constructor and a call refuse is here too; what Pyro does with the models is in the file beside this one.
"""

import itertools
import math
from typing import Any

import numpy as np
import pyro
import pytest
import torch
from pyro import poutine
from pyro.infer import Predictive, Trace_ELBO
from pyro.infer.autoguide import AutoDelta, AutoNormal
from scipy import stats
from torch import Tensor, nn

from pyro_dropout.errors import PyroDropoutError
from pyro_dropout.generative.gaussian_processes import DeepGP, FiniteRankGP
from pyro_dropout.generative.likelihoods import Categorical, Gaussian
from pyro_dropout.mathematics.covariance import ArcCosine, Layered
from pyro_dropout.mathematics.distributions import BernoulliMixture
from pyro_dropout.mathematics.finite_rank import finite_rank_features, finite_rank_log_marginal
from pyro_dropout.mathematics.per_data_point import PerDataPoint
from tests.oracles.covariances import NUMPY

POINTS = torch.tensor([[-1.0, 0.5], [0.3, -0.2], [1.5, 1.0], [0.0, 0.0], [-0.4, -2.0]])
UPPER = np.triu_indices(len(POINTS))
WIDTHS = [6, 4, 3]  # more and fewer units than points: both ways in which function space is drawn
LENGTH, BIAS_LENGTH = 0.8, 1.3
SCALES = {"length_scale": LENGTH, "bias_length_scale": BIAS_LENGTH}


def numpy_functions(name: str, depth: int, count: int, outputs: int) -> np.ndarray:
    """Draws of f from the prior, (count, N, outputs), by the definition of the network."""
    rng, act, h = np.random.default_rng(7), NUMPY[name], POINTS.numpy().astype(float)
    for below, width in itertools.pairwise([2, *WIDTHS[:depth]]):
        weight = rng.normal(size=(count, below, width)) / (1.0 if h.ndim == 3 else LENGTH)
        h = act(h @ weight + rng.normal(size=(count, 1, width)) / BIAS_LENGTH) / math.sqrt(width)
    return h @ rng.normal(size=(count, WIDTHS[depth - 1], outputs))


def functions(model: nn.Module, count: int, x: Tensor = POINTS) -> np.ndarray:
    """Draws of f from the prior, (count, N, D)."""
    with torch.no_grad(), pyro.plate("draws", count, dim=-2):
        return model(x).double().numpy()


def moments(f: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Second moments between points, and fourth ones between outputs, each with its standard error."""
    second = np.einsum("sid,sjd->sij", f, f)[:, *UPPER] / f.shape[-1]
    fourth = f[..., 0] ** 2 * f[..., 1] ** 2
    each = np.concatenate([second, fourth], axis=1)
    return each.mean(0), each.std(0) / math.sqrt(len(f))


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", ["relu", "tanh"])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("space", ["weight", "function"])
def test_both_spaces_have_the_prior_of_the_network(name: str, depth: int, space: Any) -> None:
    # 20 comparisons at 4 standard errors: fails on correct code with probability 0.0013.
    model = DeepGP(2, WIDTHS[:depth], 2, nonlinearity=name, space=space, **SCALES)
    ours, our_error = moments(functions(model, 20_000))
    oracle, error = moments(numpy_functions(name, depth, 20_000, 2))
    np.testing.assert_array_less(np.abs(ours - oracle), 4 * np.hypot(our_error, error))


@pytest.mark.parametrize(
    ("space", "depth", "count", "outputs"), [("weight", 1, 1000, 30), ("weight", 2, 24, 300), ("function", 2, 500, 20)]
)
@pytest.mark.thinned(3)
def test_wide_layers_have_the_closed_form_covariance(space: Any, depth: int, count: int, outputs: int) -> None:
    # 15 comparisons at 4 standard errors: fails on correct code with probability below 0.001.
    width = 2000
    kernel: Any = ArcCosine(2, **SCALES)
    kernel = Layered(ArcCosine(1, bias_length_scale=BIAS_LENGTH), kernel) if depth == 2 else kernel
    exact = kernel(POINTS).detach().numpy()[UPPER]
    model = DeepGP(2, [width] * depth, outputs, space=space, **SCALES)
    f = np.concatenate([functions(model, 4) for _ in range(count // 4)])
    each = np.einsum("sid,sjd->sij", f, f)[:, *UPPER] / outputs
    error = each.std(0) / math.sqrt(count)
    np.testing.assert_array_less(np.abs(each.mean(0) - exact), 4 * error + 5 * exact / width)
    assert (error < 0.05 * exact + 0.01).all(), "the test has lost its power"


def one_trace(space: str) -> tuple[Any, Tensor, Tensor, float]:
    """A trace of the model, and of it the features Φ, the targets and τ, in float64."""
    x, y = torch.randn(9, 2).double(), torch.randn(9, 3).double()
    model = FiniteRankGP(
        2, 5, 3, nonlinearity="tanh", space=space, jitter=1e-3, likelihood=Gaussian(2.5), **SCALES
    ).double()  # fmt: skip
    trace = poutine.trace(model).get_trace(x, y)
    trace.compute_log_prob()
    values = {name: trace.nodes[name]["value"] for name in ("W1", "b1")}
    return trace, finite_rank_features(x, values["W1"], values["b1"], "tanh"), y, model.likelihood.tau.item()


def test_weights_integrate_out_to_the_finite_rank_marginal() -> None:
    trace, features, y, tau = one_trace("weight")
    phi, w2 = features.numpy(), trace.nodes["W2"]["value"].numpy()
    precision = tau * phi.T @ phi + np.eye(5)
    # p(y) = p(y | w) p(w) / p(w | y), at any w
    joint = float(trace.nodes["y"]["log_prob_sum"] + trace.nodes["W2"]["log_prob_sum"])
    posterior = sum(
        stats.multivariate_normal.logpdf(
            w2[d], np.linalg.solve(precision, tau * phi.T @ y[:, d].numpy()), np.linalg.inv(precision)
        )
        for d in range(3)
    )
    evidence = finite_rank_log_marginal(y, features, tau).item()
    assert joint - posterior == pytest.approx(evidence, rel=1e-9)
    direct = stats.multivariate_normal(np.zeros(9), phi @ phi.T + np.eye(9) / tau)
    assert direct.logpdf(y.numpy().T).sum() == pytest.approx(evidence, rel=1e-9)


def test_function_values_integrate_out_to_the_same_marginal() -> None:
    trace, features, y, tau = one_trace("function")
    phi = features.numpy()
    covariance = phi @ phi.T
    covariance += 1e-3 * np.diag(covariance).mean() * np.eye(9)
    posterior = np.linalg.inv(np.linalg.inv(covariance) + tau * np.eye(9))
    f = trace.nodes["F"]["value"].numpy()
    joint = float(trace.nodes["y"]["log_prob_sum"] + trace.nodes["F"]["log_prob_sum"])
    joint -= sum(
        stats.multivariate_normal.logpdf(f[:, d], tau * posterior @ y[:, d].numpy(), posterior) for d in range(3)
    )
    direct = stats.multivariate_normal(np.zeros(9), covariance + np.eye(9) / tau)
    assert joint == pytest.approx(direct.logpdf(y.numpy().T).sum(), rel=1e-8)


def test_priors_are_as_wide_as_they_are_told() -> None:
    model = DeepGP(2, [9, 4], 1, length_scale=torch.tensor([0.5, 4.0]), bias_length_scale=8.0)
    trace = poutine.trace(model).get_trace(POINTS)
    expected = {"W1": [2.0, 0.25], "b1": 0.125, "W2": 1.0, "b2": 0.125, "W3": 1.0}
    for name, std in expected.items():
        found = trace.nodes[name]["fn"].stddev
        torch.testing.assert_close(found, torch.tensor(std).expand(found.shape))


# --- in Pyro's hands --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("space", ["weight", "function"])
def test_particles_have_the_loss_of_one(space: Any) -> None:
    y = torch.randn(5, 2)
    model = DeepGP(2, WIDTHS, 2, space=space)
    guide = AutoDelta(model)  # every particle is the same
    one = Trace_ELBO().loss(model, guide, POINTS, y, 50 if space == "weight" else 5)
    many = Trace_ELBO(num_particles=4, vectorize_particles=True)
    assert many.loss(model, guide, POINTS, y, 50 if space == "weight" else 5) == pytest.approx(one, rel=1e-5)


@pytest.mark.parametrize("space", ["weight", "function"])
@pytest.mark.parametrize("likelihood", [Gaussian(4.0), Categorical()])
def test_parallel_prediction_is_the_sequential_one(space: Any, likelihood: Any) -> None:
    model = DeepGP(2, WIDTHS, 3, space=space, likelihood=likelihood)
    guide = AutoNormal(model)
    guide(POINTS, torch.zeros(5).long() if isinstance(likelihood, Categorical) else torch.zeros(5, 3))
    sites = ["_RETURN", "y", "W1", "b2"]
    from_guide = [
        Predictive(model, guide=guide, num_samples=4, parallel=parallel, return_sites=sites)(POINTS)
        for parallel in (True, False)
    ]
    assert {k: v.shape for k, v in from_guide[0].items()} == {k: v.shape for k, v in from_guide[1].items()}
    assert from_guide[0]["_RETURN"].shape == (4, 5, 3)
    samples = Predictive(guide, num_samples=4)(POINTS)
    assert samples["W1"].shape == (4, 6, 2), "without a place for the plate: the guide has none"
    alone = Predictive(model, samples, return_sites=["_RETURN"])(POINTS)["_RETURN"]
    for given in (samples, {name: value.unsqueeze(1) for name, value in samples.items()}):
        together = Predictive(model, given, return_sites=["_RETURN"], parallel=True)(POINTS)["_RETURN"]
        torch.testing.assert_close(together, alone)


@pytest.mark.parametrize("particles", [1, 3])
def test_draws_for_each_data_point_are_repeated_points(particles: int) -> None:
    # With keep=1 and scale=0 every draw is the mean, so the stand-ins can be used as they are.
    model = DeepGP(2, [6, 4], 3)
    plain, marked = {}, {}
    for site, shape in model.sites.items():
        plain[site] = torch.randn(shape)
        value = plain[site] if particles == 1 else plain[site].expand(particles, 1, *shape)
        marked[site] = value.clone() if site == "W1" and particles == 1 else value
    for site in ("W1", "W2", "W3"):
        recipe = PerDataPoint(site, BernoulliMixture(plain[site], keep=1.0))
        marked[site] = recipe.mark(marked[site].clone())
    expected = poutine.condition(model, plain)(POINTS)
    with poutine.trace() as tape:
        f = poutine.condition(model, marked)(POINTS)
    torch.testing.assert_close(
        f, expected.expand(particles, 5, 3).squeeze(0) if particles == 1 else expected.expand(3, 5, 3)
    )
    assert tape.trace.nodes["y"]["value"].shape == f.shape
    if particles > 1:
        marked["b1"] = torch.randn(particles, 1, 6)
        with pytest.raises(PyroDropoutError, match="'b1' has shared draws"):
            poutine.condition(model, marked)(POINTS)
    with pytest.raises(PyroDropoutError, match="function space has one W1"):
        poutine.condition(DeepGP(2, [6, 4], 3, space="function"), {"W1": marked["W1"]})(POINTS)
