"""Covariances of finite rank, and of the second layer, against their sums, limits, scipy densities and Monte Carlo."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from pyro_dropout.mathematics.finite_rank import (
    FiniteRank,
    SecondLayer,
    finite_rank_features,
    finite_rank_log_marginal,
)
from tests.oracles.covariances import NUMPY, POINTS, array, double, linear_gram, quadrature_gram

# --- finite rank ------------------------------------------------------------------------------------------------------


def exact_limit(name: str, x: np.ndarray) -> np.ndarray:
    if name == "cos":
        return np.array([[math.exp(-0.5 * np.sum((a - b) ** 2) / 1.5**2) for b in x] for a in x])
    return quadrature_gram(name, linear_gram(x, 1.5), 0.5)


@pytest.mark.parametrize("name", ["relu", "erf", "cos"])
@pytest.mark.thinned(3)
def test_finite_rank_tends_to_the_exact_covariance_as_one_over_root_width(name):
    # Over blocks of 16 seeds the slope was seen to vary with a standard deviation of 0.039 (relu; less for the others),
    # so of 0.02 over 64: on correct code it leaves ±0.1 for fewer than 1e-6 of the seeds.
    x = POINTS[:4].double()
    expected, widths = exact_limit(name, array(x)), [50, 500, 5_000, 50_000]
    prior = {"variance": 2.0, "bias_prior": "uniform"} if name == "cos" else {"bias_length_scale": 0.5}

    def rms(width):
        grams = [array(FiniteRank(name, width, 2, length_scale=1.5, seed=s, **prior)(x)) for s in range(64)]
        return np.sqrt(np.mean((np.stack(grams) - expected) ** 2))

    errors = [rms(width) for width in widths]
    slope = np.polyfit(np.log(widths), np.log(errors), 1)[0]
    print(f"{name}: the error falls as K^{slope:.3f}")
    assert abs(slope + 0.5) < 0.1
    assert errors[-1] < 0.02 * expected.max()


@pytest.mark.parametrize("name", NUMPY)
def test_features_are_the_sum_over_units(name, dtype):
    x, weight, bias = (torch.randn(*shape, dtype=dtype) for shape in [(3, 2), (5, 2), (5,)])
    expected = np.zeros((3, 3))
    for w, b in zip(array(weight), array(bias), strict=True):
        unit = NUMPY[name](array(x) @ w + b)
        expected += np.outer(unit, unit) / 5
    phi = finite_rank_features(x, weight, bias, name)
    assert phi.dtype == dtype
    np.testing.assert_allclose(array(phi @ phi.mT), expected, rtol=1e-5 if dtype == torch.float32 else 1e-12, atol=1e-6)


# --- the second layer -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NUMPY)
@pytest.mark.parametrize("terms", [1, 3])
def test_the_second_layer_is_its_definition_term_by_term(name, terms, dtype):
    kernel = SecondLayer(name, 3, double(0.5), terms, seed=1, variance=double(1.7)).to(dtype)
    h = torch.randn(4, 3, dtype=dtype)
    x, biases = array(h), array(kernel.standard_bias) / 0.5
    expected = np.zeros((4, 4))
    for b in biases:
        for i in range(4):
            for j in range(4):
                for k in range(3):
                    expected[i, j] += 1.7 / (3 * terms) * NUMPY[name](x[i, k] + b[k]) * NUMPY[name](x[j, k] + b[k])
    tolerance = 2e-6 if dtype == torch.float32 else 1e-12
    np.testing.assert_allclose(array(kernel(h)), expected, atol=tolerance)
    np.testing.assert_allclose(array(kernel(h, diag=True)), expected.diagonal(), atol=tolerance)


@pytest.mark.parametrize("name", ["tanh", "erf", "cos"])
def test_the_second_layer_tends_to_the_integral_over_its_bias(name):
    """At 6 standard errors of numbers below 1: wrong for one of 1e8 seeds."""
    x, scale, terms = torch.randn(3, 2, dtype=torch.float64), 0.75, 100_000
    z = np.linspace(-9, 9, 401)  # analytic and decaying: the trapezium rule is exact to rounding
    units = NUMPY[name](array(x)[:, :, None] + z / scale)
    expected = np.einsum("ikb,jkb,b->ij", units, units, stats.norm.pdf(z) * (z[1] - z[0])) / 2
    found = array(SecondLayer(name, 2, double(scale), terms, seed=0)(x))
    assert np.abs(found - expected).max() < 6 / terms**0.5


# --- eq. 9 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "k"), [(7, 3), (3, 7), (4, 4), (5, 1), (1, 5)])
@pytest.mark.parametrize("outputs", [None, 1, 3])
def test_the_log_marginal_is_the_normal_density(n, k, outputs, dtype):
    y, phi, tau = (
        torch.randn(*((n,) if outputs is None else (n, outputs)), dtype=dtype),
        torch.randn(n, k, dtype=dtype),
        2.5,
    )
    normal = stats.multivariate_normal(np.zeros(n), array(phi) @ array(phi).T + np.eye(n) / tau)
    expected = sum(normal.logpdf(column) for column in array(y).reshape(n, -1).T)
    found = finite_rank_log_marginal(y, phi, tau)
    assert found.dtype == dtype
    print(f"off by {abs(found.item() - expected):.1e}")
    assert abs(found.item() - expected) < (1e-9 if dtype == torch.float64 else 1e-6 * abs(expected) + 1e-6)


@pytest.mark.parametrize(("n", "k"), [(40, 6), (6, 40)])
def test_the_log_marginal_survives_a_high_precision(n, k, dtype):
    # Nearly dependent features, where N×N or K×K matrices in float32 lose positive definiteness.
    x = torch.linspace(-1, 1, n, dtype=dtype)[:, None]
    phi = FiniteRank("tanh", k, seed=0).features(x).detach()
    y, tau = (phi @ torch.ones(k, dtype=dtype)), 1e8
    covariance = array(phi) @ array(phi).T + np.eye(n) / tau
    values, vectors = np.linalg.eigh(covariance)
    expected = -0.5 * (np.sum((vectors.T @ array(y)) ** 2 / values) + np.sum(np.log(2 * np.pi * values)))
    assert abs(finite_rank_log_marginal(y, phi, tau).item() - expected) < 1e-5 * abs(expected)


def test_the_log_marginal_is_the_integral_over_the_weights():
    # 4 standard errors: on correct code it fails for 6e-5 of the seeds.
    rng, draws, tau = np.random.default_rng(0), 400_000, 1.5
    phi, y = rng.normal(size=(3, 2)), rng.normal(size=3)
    density = stats.norm.pdf(y, rng.normal(size=(draws, 2)) @ phi.T, tau**-0.5).prod(-1)
    found = math.exp(finite_rank_log_marginal(torch.tensor(y), torch.tensor(phi), tau).item())
    assert abs(found - density.mean()) < 4 * density.std() / math.sqrt(draws)


def test_the_log_marginal_takes_many_features_and_has_gradients():
    y, phi = torch.randn(4, 2, dtype=torch.float64), torch.randn(3, 4, 6, dtype=torch.float64)
    many = finite_rank_log_marginal(y, phi, 2.0)
    assert many.shape == (3,)
    torch.testing.assert_close(many, torch.stack([finite_rank_log_marginal(y, f, 2.0) for f in phi]))
    torch.testing.assert_close(
        many, torch.func.vmap(finite_rank_log_marginal, (None, 0, None))(y, phi, torch.tensor(2.0))
    )
    tau = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    for features in (phi[0], phi[0, :, :2]):
        assert torch.autograd.gradcheck(finite_rank_log_marginal, (y, features.clone().requires_grad_(), tau))
