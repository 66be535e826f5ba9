"""Exact covariances against quadrature of the integrals that define them, and against sampled functions."""

import numpy as np
import pytest
import torch
from scipy import integrate, special, stats

from pyro_dropout.mathematics.covariance import ArcCosine, ArcSine, Layered
from tests.oracles.covariances import (
    POINTS,
    SCALES,
    WIDE,
    array,
    double,
    linear_gram,
    normal_pdf,
    quadrature_gram,
)

# --- the wide layer: the exact covariances ----------------------------------------------------------------------------


CASES = [(0.4, -1.3, 0.8, 1.6), (2.0, 1.0, 1.0, 0.5), (0.0, 1.0, 2.0, 1.0)]


@pytest.mark.parametrize(("x", "y", "scale", "bias_scale"), CASES)
def test_relu_units_have_the_integral_over_weight_and_bias(x, y, scale, bias_scale):
    def integrand(b, w):
        return (w * x + b) * (w * y + b) * normal_pdf(w * scale) * scale * normal_pdf(b * bias_scale) * bias_scale

    def both_are_on(w):
        return max(-w * x, -w * y)

    halves = [  # split at w = 0, where the corner of max(−wx, −wy) lies
        integrate.dblquad(integrand, low, high, both_are_on, 40.0, epsabs=1e-11, epsrel=1e-11)[0]
        for low, high in ((-9 / scale, 0), (0, 9 / scale))
    ]
    kernel = ArcCosine(1, None, double(scale), double(bias_scale))
    assert abs(kernel(double([x]), double([y])).item() - sum(halves)) < 1e-9


@pytest.mark.parametrize(("x", "y", "scale", "bias_scale"), CASES)
def test_erf_units_have_the_integral_over_weight_and_bias(x, y, scale, bias_scale):
    # Analytic and decaying: the trapezium rule is exact to rounding.
    z = np.linspace(-9, 9, 401)
    w, b, mass = z[:, None] / scale, z / bias_scale, stats.norm.pdf(z) * (z[1] - z[0])
    expected = mass @ (special.erf(w * x + b) * special.erf(w * y + b)) @ mass
    kernel = ArcSine(1, None, double(scale), double(bias_scale))
    assert abs(kernel(double([x]), double([y])).item() - expected) < 1e-9


@pytest.mark.parametrize("name", WIDE)
@pytest.mark.parametrize("length_scale", [1.3, [0.7, 1.9]], ids=["shared", "per-dimension"])
def test_the_exact_covariance_is_the_bivariate_normal_expectation(name, length_scale, dtype):
    kernel = WIDE[name](2, double(1.7), double(length_scale), double(0.9)).to(dtype)
    x = POINTS.to(dtype)
    expected = 1.7 * quadrature_gram(name, linear_gram(array(x), np.array(length_scale)), 0.9)
    tolerance = 1e-9 if dtype == torch.float64 else 1e-6 * expected.max()
    assert np.abs(array(kernel(x)) - expected).max() < tolerance
    assert np.abs(array(kernel(x, diag=True)) - expected.diagonal()).max() < tolerance
    assert np.abs(array(kernel(x, x[1:3])) - expected[:, 1:3]).max() < tolerance
    assert kernel(x).dtype == dtype


@pytest.mark.parametrize("name", WIDE)
def test_active_columns_are_the_only_ones_seen(name):
    kernel, wide_x = WIDE[name](2, length_scale=SCALES, active_dims=[3, 1]), torch.randn(5, 4)
    assert torch.equal(kernel(wide_x), WIDE[name](2, length_scale=SCALES)(wide_x[:, [3, 1]]))
    assert torch.equal(WIDE[name](1)(wide_x[:, 0]), WIDE[name](1)(wide_x[:, :1]))


# --- layers on layers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("top", WIDE)
@pytest.mark.parametrize("bottom", WIDE)
def test_a_layer_on_a_layer_is_the_expectation_over_the_layer_below(top, bottom):
    x = POINTS.double()
    below = 1.7 * quadrature_gram(bottom, linear_gram(array(x), 1.0), 0.9)
    above = 0.6 * quadrature_gram(top, below, 1.4)
    two = Layered(WIDE[top](1, double(0.6), None, double(1.4)), WIDE[bottom](2, double(1.7), None, double(0.9)))
    three = Layered(ArcSine(7, None, None, double(2.0)), two)
    assert np.abs(array(two(x)) - above).max() < 1e-9
    assert np.abs(array(two(x, diag=True)) - above.diagonal()).max() < 1e-9
    assert np.abs(array(two(x, x[:2])) - above[:, :2]).max() < 1e-9
    assert np.abs(array(three(x)) - quadrature_gram("erf", above, 2.0)).max() < 1e-9
