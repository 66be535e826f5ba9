"""Covariances against quadrature of the integrals that define them, numpy loops, scipy densities and Monte Carlo."""

import functools
import math
from collections.abc import Callable

import numpy as np
import pyro
import pyro.contrib.gp as gp
import pyro.distributions as dist
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pyro.nn import PyroSample
from scipy import integrate, special, stats

from pyro_dropout.mathematics.covariance import ArcCosine, ArcSine, Layered
from pyro_dropout.mathematics.errors import RangeError, ShapeError
from pyro_dropout.mathematics.finite_rank import (
    FiniteRank,
    SecondLayer,
    finite_rank_features,
    finite_rank_log_marginal,
    second_layer_features,
)

WIDE = {"relu": ArcCosine, "erf": ArcSine}
NUMPY = {"relu": lambda a: np.maximum(a, 0), "tanh": np.tanh, "erf": special.erf, "cos": np.cos}
SCALES = torch.tensor([0.7, 1.9])
POINTS = torch.tensor([[0.0, 0.0], [0.3, -1.2], [2.0, 0.5], [-2.0, -0.5], [0.3, -1.2]])

numbers = st.floats(-3, 3)
points = st.lists(st.tuples(numbers, numbers), min_size=1, max_size=4).map(
    lambda p: torch.tensor(p, dtype=torch.float64)
)
scales = st.floats(0.2, 5)
seeds = st.integers(0, 2**31)
kinds = st.sampled_from([ArcCosine, ArcSine])
names = st.sampled_from(["relu", "tanh", "erf", "cos"])


def recipe(make: Callable[..., gp.kernels.Kernel], *parts: st.SearchStrategy) -> st.SearchStrategy:
    """Kernels to be built in the test: beartype picks at random what it checks, and strategies must not."""
    return st.builds(functools.partial, st.just(make), *parts)


def build_wide(kind, first, other, bias, variance):
    return kind(2, variance, torch.tensor([first, other]), bias).double()


def build_featured(name, width, length_scale, bias, seed):
    return FiniteRank(name, width, 2, 1.5, length_scale, bias, seed).double()


def build_second(name, bias, terms, seed):
    return SecondLayer(name, 2, bias, terms, seed).double()


wide = recipe(build_wide, kinds, scales, scales, scales, scales)
featured = recipe(build_featured, names, st.integers(1, 8), scales, scales, seeds)
second = recipe(build_second, names, scales, st.integers(1, 3), seeds)
layered = recipe(lambda outer, inner: Layered(outer(), inner()), wide, st.one_of(wide, featured))
kernels = st.one_of(wide, featured, second, layered)


def array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().double().numpy()


def double(value: float | list[float]) -> torch.Tensor:
    """A float64 tensor: a plain number would be rounded to torch's default type first."""
    return torch.tensor(value, dtype=torch.float64)


def expectation(name: str, s_xx: float, s_xy: float, s_yy: float) -> float:
    """E[σ(u)σ(v)] for (u, v) ~ N(0, [[s_xx, s_xy], [s_xy, s_yy]]): v given u by hand, u by quadrature."""
    slope = s_xy / s_xx
    rest = max(s_yy - slope * s_xy, 0.0)

    def integrand(u: float) -> float:
        mean, root = slope * u, math.sqrt(rest)
        if name == "erf":
            inner = special.erf(mean / math.sqrt(1 + 2 * rest))
        else:
            inner = (
                mean * special.ndtr(mean / root) + root * normal_pdf(mean / root) if root > 1e-12 else max(mean, 0.0)
            )
        return float(NUMPY[name](u) * inner * normal_pdf(u / math.sqrt(s_xx)) / math.sqrt(s_xx))

    reach = 12 * math.sqrt(s_xx)
    halves = [
        integrate.quad(integrand, a, b, epsabs=1e-13, epsrel=1e-12, limit=200) for a, b in ((-reach, 0), (0, reach))
    ]
    return halves[0][0] + halves[1][0]


def normal_pdf(z: float) -> float:
    return math.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)


def quadrature_gram(name: str, inner: np.ndarray, bias_length_scale: float) -> np.ndarray:
    """The covariance of a wide layer on top of one with covariance ``inner``, entry by entry."""
    s = inner + bias_length_scale**-2
    n = len(s)
    return np.array([[expectation(name, s[i, i], s[i, j], s[j, j]) for j in range(n)] for i in range(n)])


def linear_gram(x: np.ndarray, length_scale: np.ndarray | float) -> np.ndarray:
    return np.array([[float(np.sum(a * b / np.square(length_scale))) for b in x] for a in x])


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


@pytest.mark.parametrize("name", WIDE)
def test_a_layer_on_a_layer_is_what_sampled_functions_give(name):
    # 4 standard errors on each of 3 entries: on correct code it fails for 2e-4 of the seeds.
    draws, x = 200_000, torch.tensor([[0.2, -1.0], [1.5, 0.7]], dtype=torch.float64)
    inner, rng = ArcSine(2).double(), np.random.default_rng(0)
    f = rng.multivariate_normal(np.zeros(2), array(inner(x)), size=draws) + rng.normal(size=(draws, 1)) / 2.0
    products = NUMPY[name](f)[:, :, None] * NUMPY[name](f)[:, None, :]
    error = np.abs(array(Layered(WIDE[name](1, None, None, 2.0), inner)(x)) - products.mean(0))
    assert (error < 4 * products.std(0) / math.sqrt(draws)).all()


# --- finite rank ------------------------------------------------------------------------------------------------------


def exact_limit(name: str, x: np.ndarray) -> np.ndarray:
    if name == "cos":
        return np.array([[math.exp(-0.5 * np.sum((a - b) ** 2) / 1.5**2) for b in x] for a in x])
    return quadrature_gram(name, linear_gram(x, 1.5), 0.5)


@pytest.mark.parametrize("name", ["relu", "erf", "cos"])
def test_finite_rank_tends_to_the_exact_covariance_as_one_over_root_width(name):
    # Over blocks of 16 seeds the slope was seen to vary with a standard deviation of 0.039 (relu; less for the others),
    # so of 0.02 over 64: on correct code it leaves ±0.1 for fewer than 1e-6 of the seeds.
    x = POINTS[:4].double()
    expected, widths = exact_limit(name, array(x)), [100, 1_000, 10_000, 100_000]
    prior = {"variance": 2.0, "bias_prior": "uniform"} if name == "cos" else {"bias_length_scale": 0.5}

    def rms(width):
        grams = [array(FiniteRank(name, width, 2, length_scale=1.5, seed=s, **prior)(x)) for s in range(64)]
        return np.sqrt(np.mean((np.stack(grams) - expected) ** 2))

    errors = [rms(width) for width in widths]
    slope = np.polyfit(np.log(widths), np.log(errors), 1)[0]
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


def test_features_broadcast_over_draws_of_the_weights():
    x, weight, bias = torch.randn(3, 2), torch.randn(4, 1, 5, 2), torch.randn(6, 5)
    phi = finite_rank_features(x, weight, bias, torch.sigmoid)
    assert phi.shape == (4, 6, 3, 5)
    torch.testing.assert_close(phi[2, 1], finite_rank_features(x, weight[2, 0], bias[1], torch.sigmoid))
    h = torch.randn(4, 1, 3, 5)
    torch.testing.assert_close(
        second_layer_features(h, bias, "tanh")[3, 2], second_layer_features(h[3, 0], bias[2], "tanh")
    )


def test_a_kernel_of_finite_rank_holds_its_draws_and_learns_its_scales():
    kernel = FiniteRank("tanh", 6, 2, 1.5, SCALES, 0.5, seed=3)
    again, other = (
        FiniteRank("tanh", 6, 2, 1.5, SCALES, 0.5, seed=3),
        FiniteRank("tanh", 6, 2, 1.5, SCALES, 0.5, seed=4),
    )
    assert torch.equal(kernel(POINTS), again(POINTS))
    assert not torch.equal(kernel(POINTS), other(POINTS))
    assert set(dict(kernel.named_buffers())) == {"standard_weight", "standard_bias"}
    phi = 1.5**0.5 * finite_rank_features(POINTS, kernel.standard_weight / SCALES, kernel.standard_bias / 0.5, "tanh")
    torch.testing.assert_close(kernel.features(POINTS), phi)
    kernel(POINTS).sum().backward()
    assert all(p.grad is not None and bool(p.grad.abs().sum() > 0) for p in kernel.parameters())
    uniform = FiniteRank("cos", 1000, bias_prior="uniform", seed=0)
    assert set(dict(uniform.named_parameters())) == {"variance_unconstrained", "length_scale_unconstrained"}


def test_a_uniform_bias_goes_once_around_the_circle():
    # Kolmogorov and Smirnov at level 1e-6: on correct code it fails for 1e-6 of the seeds.
    kernel = FiniteRank(lambda a: a, 5_000, bias_prior="uniform", seed=0)
    biases = array(kernel.features(torch.zeros(1))[0]) * math.sqrt(5_000)
    assert stats.kstest(biases, stats.uniform(0, 2 * math.pi).cdf).pvalue > 1e-6


def test_a_seed_means_the_same_draws_in_either_precision():
    single = FiniteRank("relu", 4, seed=7)
    torch.set_default_dtype(torch.float64)
    torch.testing.assert_close(
        single.standard_weight, FiniteRank("relu", 4, seed=7).standard_weight.float(), rtol=0, atol=0
    )


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
def test_the_exact_second_layer_is_the_integral_over_its_bias(name):
    x, scale = torch.randn(3, 2, dtype=torch.float64), 0.75

    def integral(u, v):
        def integrand(b):
            return NUMPY[name](u + b) * NUMPY[name](v + b) * normal_pdf(b * scale) * scale

        return integrate.quad(integrand, -20, 20, epsabs=1e-12, epsrel=1e-12, limit=400)[0]

    expected = [[np.mean([integral(u, v) for u, v in zip(a, b, strict=True)]) for b in array(x)] for a in array(x)]
    assert np.abs(array(SecondLayer(name, 2, double(scale)).exact(x)) - expected).max() < 1e-9


@pytest.mark.parametrize("name", ["tanh", "erf"])
def test_many_terms_tend_to_the_exact_second_layer(name):
    # 4 standard errors on each of 6 entries: on correct code it fails for 4e-4 of the seeds.
    terms, x = 20_000, torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    kernel = SecondLayer(name, 4, 0.8, terms=terms, seed=0, variance=1.3).double()
    phi = array(kernel.features(x)).reshape(3, terms, 4) * math.sqrt(terms)
    spread = np.einsum("itk,jtk->tij", phi, phi).std(0) / math.sqrt(terms)
    assert (np.abs(array(kernel(x)) - array(kernel.exact(x))) < 4 * spread).all()
    np.testing.assert_allclose(array(kernel.exact(x, x[:2])), array(kernel.exact(x))[:, :2])


def test_a_kink_leaves_the_quadrature_a_small_error():
    x = torch.tensor([[0.3], [-0.8]], dtype=torch.float64)
    expected = integrate.quad(lambda b: (0.3 + b) * (b - 0.8) * normal_pdf(b), 0.8, 20)[0]
    assert abs(SecondLayer("relu", 1).double().exact(x)[0, 1].item() - expected) < 2e-3


# --- equation 12 ------------------------------------------------------------------------------------------------------


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


# --- properties -------------------------------------------------------------------------------------------------------


@given(kernels, points, points)
def test_a_covariance_is_symmetric(build, x, z):
    kernel = build()
    whole = kernel(torch.cat([x, z]))
    torch.testing.assert_close(whole, whole.mT, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(kernel(x, z), whole[: len(x), len(x) :], rtol=1e-12, atol=1e-12)


@given(kernels, points)
def test_a_gram_matrix_is_positive_semi_definite(build, x):
    kernel = build()
    gram = kernel(x)
    assert torch.linalg.eigvalsh(gram).min() >= -1e-10 * gram.trace()


@given(kernels, points)
def test_covariances_obey_cauchy_and_schwarz(build, x):
    gram = build()(x)
    assert (gram.square() <= gram.diagonal() * gram.diagonal()[:, None] * (1 + 1e-12) + 1e-24).all()


@given(kernels, points)
def test_the_diagonal_is_the_diagonal(build, x):
    kernel = build()
    torch.testing.assert_close(kernel(x, diag=True), kernel(x).diagonal(), rtol=1e-12, atol=1e-14)


@given(kernels, points, st.randoms(use_true_random=False))
def test_points_may_come_in_any_order(build, x, random):
    kernel = build()
    order = random.sample(range(len(x)), len(x))
    torch.testing.assert_close(kernel(x[order]), kernel(x)[order][:, order], rtol=1e-12, atol=1e-13)


@given(kinds, points, scales, scales, scales)
def test_a_length_scale_is_a_unit_of_the_inputs(kind, x, first, other, bias_length_scale):
    unit = torch.tensor([first, other], dtype=torch.float64)
    torch.testing.assert_close(kind(2, 1.0, unit, bias_length_scale)(x), kind(2, 1.0, 1.0, bias_length_scale)(x / unit))


@given(kinds, points, st.floats(0, 2 * math.pi), scales)
def test_a_shared_length_scale_sees_no_rotation(kind, x, angle, length_scale):
    c, s = math.cos(angle), math.sin(angle)
    kernel, turned = kind(2, None, length_scale).double(), x @ torch.tensor([[c, s], [-s, c]], dtype=torch.float64)
    torch.testing.assert_close(kernel(turned), kernel(x), rtol=1e-9, atol=1e-9)


@given(points, st.floats(0.01, 100), scales)
def test_relu_units_without_a_bias_are_homogeneous(x, factor, length_scale):
    kernel = ArcCosine(2, None, length_scale, double(1e150)).double()  # 1/l'² is 1e-300
    torch.testing.assert_close(kernel(factor * x), factor**2 * kernel(x), rtol=1e-9, atol=1e-12 * factor**2)


@given(wide, points, points)
def test_wide_layers_keep_their_bounds(build, x, z):
    kernel = build()
    covariance = kernel(x, z) / kernel.variance
    assert (covariance >= 0).all() if isinstance(kernel, ArcCosine) else (covariance.abs() < 1).all()


@given(wide, st.floats(0, 10), st.floats(0, 10), st.floats(-1, 1), st.floats(-1, 1))
def test_a_wide_layer_grows_with_the_correlation_below(build, k_xx, k_yy, one, other):
    kernel = build()
    root = math.sqrt(k_xx * k_yy)
    below = torch.tensor(sorted([one * root, other * root]), dtype=torch.float64)
    low, high = kernel.of_gram(below, torch.full_like(below, k_xx), torch.full_like(below, k_yy)).tolist()
    assert low <= high + 1e-14 * (1 + k_xx + k_yy) * kernel.variance.item()


@given(wide, points, st.floats(1.01, 5))
def test_a_weaker_bias_leaves_less_variance(build, x, factor):
    kernel = build()
    weaker_bias = kernel.bias_length_scale.detach() * factor
    weaker = type(kernel)(2, kernel.variance.detach(), kernel.length_scale.detach(), weaker_bias)
    assert (weaker(x, diag=True) < kernel(x, diag=True)).all()


@given(featured, points)
def test_the_rank_is_at_most_the_width(build, x):
    kernel = build()
    x = torch.cat([x, x + 0.7, x - 1.3])
    values = torch.linalg.eigvalsh(kernel(x)).flip(0)
    assert kernel.features(x).shape == (len(x), kernel.width)
    assert (values[kernel.width :].abs() <= 1e-12 * values.sum()).all()


@given(st.integers(1, 5), st.integers(1, 5), st.floats(0.01, 100), seeds)
def test_the_log_marginal_does_not_see_which_side_is_inverted(n, k, tau, seed):
    generator = torch.Generator().manual_seed(seed)
    y, phi = (torch.randn(n, m, dtype=torch.float64, generator=generator) for m in (2, k))
    padded = torch.cat([phi, torch.zeros(n, n, dtype=torch.float64)], -1)  # the same ΦΦᵀ, and now K ≥ N
    turn = torch.linalg.qr(torch.randn(k, k, dtype=torch.float64, generator=generator)).Q
    found = finite_rank_log_marginal(y, phi, tau)
    torch.testing.assert_close(finite_rank_log_marginal(y, padded, tau), found, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(finite_rank_log_marginal(y, phi @ turn, tau), found, rtol=1e-9, atol=1e-9)
    apart = sum(finite_rank_log_marginal(y[:, d], phi, tau) for d in range(2))
    torch.testing.assert_close(apart, found, rtol=1e-9, atol=1e-9)


@given(second, points, points)
def test_the_exact_second_layer_is_a_covariance_too(build, x, z):
    kernel = build()
    exact, between = kernel.exact(torch.cat([x, z]), nodes=8), kernel.exact(x, z, nodes=8)
    torch.testing.assert_close(between, exact[: len(x), len(x) :])
    assert torch.linalg.eigvalsh(exact).min() >= -1e-10 * exact.trace()


# --- gradients --------------------------------------------------------------------------------------------------------

DIFFERENTIABLE: dict[str, Callable[[], gp.kernels.Kernel]] = {
    "ArcCosine": lambda: ArcCosine(2, 1.5, SCALES, 0.8),
    "ArcSine": lambda: ArcSine(2, 1.5, SCALES, 0.8),
    "Layered": lambda: Layered(ArcCosine(1, 0.7), Layered(ArcSine(1), ArcCosine(2, 1.5, SCALES, 0.8))),
    "FiniteRank": lambda: FiniteRank("tanh", 5, 2, 1.5, SCALES, 0.8, seed=0),
    "SecondLayer": lambda: SecondLayer("erf", 2, 0.8, terms=2, seed=0),
}


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients_are_those_of_differences_even_where_points_repeat(name):
    kernel = DIFFERENTIABLE[name]().double()  # POINTS hold a zero, two equal points and two opposite ones
    x = POINTS.double().requires_grad_()
    parameters = {key: value.detach().requires_grad_() for key, value in kernel.named_parameters()}

    def gram(inputs, *values):
        return torch.func.functional_call(kernel, dict(zip(parameters, values, strict=True)), (inputs,))

    assert torch.autograd.gradcheck(gram, (x, *parameters.values()))
    assert torch.autograd.gradcheck(lambda inputs: kernel(inputs, diag=True), (x,))
    assert torch.autograd.gradgradcheck(kernel, (x,))


@pytest.mark.parametrize("kind", [ArcCosine, ArcSine])
def test_rounding_between_near_neighbours_far_out_does_no_harm(kind):
    x = 1e6 * torch.randn(50, 2)
    x = torch.cat([x, x * (1 + 1e-7)]).requires_grad_()
    gram = kind(2)(x)  # here s_xx s_yy − s_xy² is nothing but rounding, of either sign
    gram.sum().backward()
    assert gram.isfinite().all()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("name", DIFFERENTIABLE)
@pytest.mark.parametrize("size", [0.0, 1e-20, 1e-4, 1.0, 1e4, 1e8])
def test_gradients_are_finite_at_every_size(name, size, dtype):
    kernel = DIFFERENTIABLE[name]().to(dtype)
    x = (size * POINTS.to(dtype)).requires_grad_()
    kernel(x).sum().backward()
    assert x.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in kernel.parameters() if p.grad is not None)


@pytest.mark.parametrize("kind", [ArcCosine, ArcSine])
def test_gradients_are_finite_where_the_bias_rounds_to_nothing(kind, dtype):
    kernel, x = kind(2, bias_length_scale=1e30).to(dtype), torch.zeros(3, 2, dtype=dtype, requires_grad=True)
    kernel(x).sum().backward()
    assert x.grad.isfinite().all()
    assert kernel(x).isfinite().all()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own, on the first use of jacfwd
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_kernels_work_under_the_transforms_of_torch(name):
    kernel, x = DIFFERENTIABLE[name]().double(), torch.randn(3, 4, 2, dtype=torch.float64)
    torch.testing.assert_close(torch.func.vmap(kernel)(x), torch.stack([kernel(each) for each in x]))
    forward, backward = (mode(kernel)(POINTS.double()) for mode in (torch.func.jacfwd, torch.func.jacrev))
    torch.testing.assert_close(forward, backward)


# --- in Pyro ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ArcCosine", "Layered", "FiniteRank"])
def test_gaussian_process_regression_fits_with_it(name):
    x = torch.linspace(-2, 2, 15)
    y = torch.relu(x) + 0.1 * torch.sin(9 * x)
    kernels_1d = {
        "ArcCosine": ArcCosine(1),
        "Layered": Layered(ArcSine(1), ArcCosine(1)),
        "FiniteRank": FiniteRank("relu", 30, seed=0),
    }
    model = gp.models.GPRegression(x, y, kernels_1d[name], noise=torch.tensor(0.5))
    losses = gp.util.train(model, torch.optim.Adam(model.parameters(), lr=0.05), num_steps=30)
    assert losses[-1] < losses[0] - 1
    mean, variance = model(torch.linspace(-3, 3, 7), full_cov=False, noiseless=False)
    assert mean.isfinite().all()
    assert (variance > 0).all()


def test_kernels_that_stand_alone_keep_to_their_own_parameters():
    x = torch.zeros(1)
    assert [ArcCosine(1, v)(x).item() for v in (2.0, 6.0)] == pytest.approx([1.0, 3.0])
    assert [Layered(ArcCosine(1, v), ArcCosine(1))(x).item() for v in (2.0, 4.0)] == pytest.approx([1.5, 3.0])
    assert len(pyro.get_param_store()) == 0


def test_in_a_model_parameters_are_pyros():
    kernel = FiniteRank("relu", 4, seed=0)
    for call in (kernel, kernel.features):
        pyro.clear_param_store()
        sites = pyro.poutine.trace(call).get_trace(torch.ones(2)).nodes
        assert {"variance", "length_scale", "bias_length_scale"} <= set(sites)
        assert set(pyro.get_param_store().keys()) == {"variance", "length_scale", "bias_length_scale"}


def test_a_length_scale_with_a_prior_is_drawn_once_a_call():
    inner = ArcCosine(1)
    inner.length_scale = PyroSample(dist.LogNormal(0.0, 1.0))
    kernel, x = Layered(ArcSine(1), inner), torch.tensor([0.3, 1.0])
    trace = pyro.poutine.trace(kernel).get_trace(x)
    assert [name for name, site in trace.nodes.items() if site["type"] == "sample"] == ["inner.length_scale"]
    drawn = trace.nodes["inner.length_scale"]["value"]
    found = trace.nodes["_RETURN"]["value"]
    torch.testing.assert_close(found, Layered(ArcSine(1), ArcCosine(1, None, drawn))(x))


# --- the door ---------------------------------------------------------------------------------------------------------

ones = torch.ones
NAN = torch.tensor([[math.nan, 0.0]])
OUT_OF_RANGE: dict[str, Callable[[], object]] = {
    "input_dim must be a whole number of at least 1; got 0": lambda: ArcCosine(0),
    "variance must be positive and finite; got -1.0": lambda: ArcSine(1, -1.0),
    "length_scale must be positive and finite; got 0.0": lambda: ArcCosine(1, None, 0.0),
    "length_scale must be positive and finite; got nan": lambda: ArcSine(1, None, math.nan),
    "length_scale must be positive and finite; got [1.0, -2.0]": lambda: ArcSine(2, None, torch.tensor([1.0, -2.0])),
    "variance must be positive and finite; got 0.0": lambda: ArcSine(1, 1e-60),
    "bias_length_scale must be positive and finite; got -2": lambda: ArcSine(1, None, None, -2),
    "X must be finite; got [[nan, 0.0]]": lambda: ArcCosine(2)(NAN),
    "X must be a floating-point tensor; got torch.int64": lambda: ArcCosine(2)(ones(1, 2, dtype=torch.int64)),
    "Z must be finite; got [[nan, 0.0]]": lambda: Layered(ArcSine(1), ArcCosine(2))(ones(1, 2), NAN),
    "outer must be ArcCosine or ArcSine (deeper layers go in inner); got RBF": lambda: Layered(
        gp.kernels.RBF(1), ArcSine(1)
    ),
    "outer must be ArcCosine or ArcSine (deeper layers go in inner); got Layered": lambda: Layered(
        Layered(ArcSine(1), ArcSine(1)), ArcSine(1)
    ),
    "inner must be a Pyro kernel; got Identity": lambda: Layered(ArcSine(1), torch.nn.Identity()),
    "nonlinearity must be one of relu, tanh, erf, cos or a callable; got 'sigmoid'": lambda: FiniteRank("sigmoid", 3),
    "nonlinearity must be one of relu, tanh, erf, cos or a callable; got ''": lambda: SecondLayer("", 3),
    "cos or a callable; got 'step'": lambda: finite_rank_features(ones(1, 1), ones(1, 1), ones(1), "step"),
    "cos or a callable; got 'RELU'": lambda: second_layer_features(ones(1, 1), ones(1), "RELU"),
    "width must be a whole number of at least 1; got 0": lambda: FiniteRank("relu", 0),
    "width must be a whole number of at least 1; got -1": lambda: SecondLayer("relu", -1),
    "terms must be a whole number of at least 1; got 0": lambda: SecondLayer("relu", 2, terms=0),
    "nodes must be a whole number of at least 1; got 0": lambda: SecondLayer("relu", 2).exact(ones(1, 2), nodes=0),
    "bias_prior must be 'normal' or 'uniform'; got 'flat'": lambda: FiniteRank("cos", 3, bias_prior="flat"),
    "bias_length_scale must be absent for a uniform prior; got 1.5": lambda: FiniteRank(
        "cos", 3, bias_length_scale=1.5, bias_prior="uniform"
    ),
    "X must be finite": lambda: FiniteRank("cos", 3, 2).features(NAN),
    "x must be finite": lambda: finite_rank_features(NAN, ones(1, 2), ones(1), "relu"),
    "weight must be finite": lambda: finite_rank_features(ones(1, 2), NAN, ones(1), "relu"),
    "bias must be finite": lambda: finite_rank_features(ones(1, 2), ones(2, 2), NAN[0], "relu"),
    "h must be finite": lambda: second_layer_features(NAN, ones(2), "relu"),
    "tau must be positive and finite; got 0.0": lambda: finite_rank_log_marginal(ones(2), ones(2, 1), 0.0),
    "tau must be positive and finite; got inf": lambda: finite_rank_log_marginal(ones(2), ones(2, 1), math.inf),
    "y must be finite": lambda: finite_rank_log_marginal(NAN, ones(1, 1), 1.0),
    "features must be finite": lambda: finite_rank_log_marginal(ones(1), NAN, 1.0),
}
OUT_OF_SHAPE: dict[str, Callable[[], object]] = {
    "length_scale must have shape () or (2,); got (3,)": lambda: ArcCosine(2, None, ones(3)),
    "bias_length_scale must have shape (); got (2,)": lambda: ArcSine(2, None, None, ones(2)),
    "variance must have shape (); got (1, 1)": lambda: ArcSine(2, ones(1, 1)),
    "active_dims must name 2 columns, counted from 0; got [1]": lambda: ArcSine(2, active_dims=[1]),
    "active_dims must name 1 columns, counted from 0; got [-1]": lambda: ArcSine(1, active_dims=[-1]),
    "X must have shape (N, 2); got (3, 4)": lambda: ArcCosine(2)(ones(3, 4)),
    "X must have shape (N, 2); got (3,)": lambda: ArcSine(2)(ones(3)),
    "X must have shape (N, 3 or more); got (3, 2)": lambda: ArcSine(1, active_dims=[2])(ones(3, 2)),
    "X must have shape (N, 2); got (1, 3)": lambda: SecondLayer("relu", 2)(ones(1, 3)),
    "Z must have shape (N, 2); got (3, 1)": lambda: ArcSine(2)(ones(3, 2), ones(3, 1)),
    "k_xy must have shape (N, M) or (N,); got ()": lambda: ArcSine(1).of_gram(ones(()), ones(1), ones(1)),
    "k_xx must have shape (2,); got (3,)": lambda: ArcSine(1).of_gram(ones(2, 3), ones(3), ones(3)),
    "k_yy must have shape (3,); got (2,)": lambda: ArcSine(1).of_gram(ones(2, 3), ones(2), ones(2)),
    "x must have shape (..., N, Q); got (2,)": lambda: finite_rank_features(ones(2), ones(1, 2), ones(1), "cos"),
    "weight must have shape (..., K, 2); got (4, 3)": lambda: finite_rank_features(
        ones(1, 2), ones(4, 3), ones(4), "cos"
    ),
    "bias must have shape (..., 4); got (3,)": lambda: finite_rank_features(ones(1, 2), ones(4, 2), ones(3), "cos"),
    "leading dimensions must broadcast; got (), (5,), (3,)": lambda: finite_rank_features(
        ones(5, 1, 2), ones(3, 4, 2), ones(4), "cos"
    ),
    "h must have shape (..., N, K₂); got (2,)": lambda: second_layer_features(ones(2), ones(2), "cos"),
    "bias must have shape (..., 2); got (3,)": lambda: second_layer_features(ones(1, 2), ones(3), "cos"),
    "leading dimensions must broadcast; got (3,), (5,)": lambda: second_layer_features(
        ones(5, 1, 2), ones(3, 2), "cos"
    ),
    "tau must have shape (); got (2,)": lambda: finite_rank_log_marginal(ones(2), ones(2, 1), ones(2)),
    "y must have shape (2,) or (2, D); got (3,)": lambda: finite_rank_log_marginal(ones(3), ones(2, 1), 1.0),
    "features must have shape (..., N, K); got (3,)": lambda: finite_rank_log_marginal(ones(3), ones(3), 1.0),
}
BAD = [(RangeError, *case) for case in OUT_OF_RANGE.items()] + [(ShapeError, *case) for case in OUT_OF_SHAPE.items()]


@pytest.mark.parametrize(("error", "message", "call"), BAD, ids=[message for _, message, _ in BAD])
def test_bad_input_is_named_at_the_door(error, message, call):
    with pytest.raises(error) as caught:
        call()
    assert message in str(caught.value)
