"""Points, kernels to be built, and the integrals that define covariances: by quadrature, in numpy."""

import functools
import math
from collections.abc import Callable

import numpy as np
import pyro.contrib.gp as gp
import torch
from hypothesis import strategies as st
from scipy import integrate, special

from pyro_dropout.mathematics.covariance import ArcCosine, ArcSine, Layered
from pyro_dropout.mathematics.finite_rank import (
    FiniteRank,
    SecondLayer,
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
