"""What must hold of every covariance function: properties, gradients, and how it behaves in Pyro."""

from collections.abc import Callable

import pyro
import pyro.contrib.gp as gp
import pyro.distributions as dist
import pytest
import torch
from hypothesis import given
from pyro.nn import PyroSample

from pyro_dropout.mathematics.covariance import ArcCosine, ArcSine, Layered
from pyro_dropout.mathematics.finite_rank import (
    FiniteRank,
    SecondLayer,
)
from tests.oracles.both_types import digits, dtypes
from tests.oracles.covariances import (
    POINTS,
    SCALES,
    kernels,
    kinds,
    points,
    scales,
)

# --- properties -------------------------------------------------------------------------------------------------------


@given(kernels, points, points, dtypes)
def test_a_covariance_is_symmetric(build, x, z, dtype):
    x, z = x.to(dtype), z.to(dtype)
    kernel = build().to(dtype)
    whole = kernel(torch.cat([x, z]))
    torch.testing.assert_close(whole, whole.mT, rtol=digits(dtype, 1e-12), atol=digits(dtype, 1e-12))
    torch.testing.assert_close(
        kernel(x, z), whole[: len(x), len(x) :], rtol=digits(dtype, 1e-12), atol=digits(dtype, 1e-12)
    )


@given(kernels, points, dtypes)
def test_a_gram_matrix_is_positive_semi_definite(build, x, dtype):
    x = x.to(dtype)
    kernel = build().to(dtype)
    gram = kernel(x)
    assert torch.linalg.eigvalsh(gram).min() >= -digits(dtype, 1e-10, 1e-5) * gram.trace()


@given(kinds, points, scales, scales, scales, dtypes)
def test_a_length_scale_is_a_unit_of_the_inputs(kind, x, first, other, bias_length_scale, dtype):
    x = x.to(dtype)
    unit = torch.tensor([first, other], dtype=dtype)
    torch.testing.assert_close(kind(2, 1.0, unit, bias_length_scale)(x), kind(2, 1.0, 1.0, bias_length_scale)(x / unit))


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


@pytest.mark.parametrize("name", DIFFERENTIABLE)
@pytest.mark.parametrize("size", [0.0, 1e-20, 1e-4, 1.0, 1e4, 1e8])
@pytest.mark.thinned(3)
def test_gradients_are_finite_at_every_size(name, size, dtype):
    kernel = DIFFERENTIABLE[name]().to(dtype)
    x = (size * POINTS.to(dtype)).requires_grad_()
    kernel(x).sum().backward()
    assert x.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in kernel.parameters() if p.grad is not None)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own, on the first use of jacfwd
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_kernels_work_under_the_transforms_of_torch(name):
    kernel, x = DIFFERENTIABLE[name]().double(), torch.randn(3, 4, 2, dtype=torch.float64)
    torch.testing.assert_close(torch.func.vmap(kernel)(x), torch.stack([kernel(each) for each in x]))
    forward, backward = (mode(kernel)(POINTS.double()) for mode in (torch.func.jacfwd, torch.func.jacrev))
    torch.testing.assert_close(forward, backward)


# --- in Pyro ----------------------------------------------------------------------------------------------------------


def test_kernels_that_stand_alone_keep_to_their_own_parameters():
    x = torch.zeros(1)
    assert [ArcCosine(1, v)(x).item() for v in (2.0, 6.0)] == pytest.approx([1.0, 3.0])
    assert [Layered(ArcCosine(1, v), ArcCosine(1))(x).item() for v in (2.0, 4.0)] == pytest.approx([1.5, 3.0])
    assert len(pyro.get_param_store()) == 0


def test_a_length_scale_with_a_prior_is_drawn_once_a_call():
    inner = ArcCosine(1)
    inner.length_scale = PyroSample(dist.LogNormal(0.0, 1.0))
    kernel, x = Layered(ArcSine(1), inner), torch.tensor([0.3, 1.0])
    trace = pyro.poutine.trace(kernel).get_trace(x)
    assert [name for name, site in trace.nodes.items() if site["type"] == "sample"] == ["inner.length_scale"]
    drawn = trace.nodes["inner.length_scale"]["value"]
    found = trace.nodes["_RETURN"]["value"]
    torch.testing.assert_close(found, Layered(ArcSine(1), ArcCosine(1, None, drawn))(x))
