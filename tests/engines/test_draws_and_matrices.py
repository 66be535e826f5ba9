"""Random numbers and small matrices in C: their draws, products, factors and parts are those of torch."""

import threading
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from pyro_dropout.engines.engine import CannotError
from pyro_dropout.engines.in_c import compiler
from tests.engines.test_plain_c import in_c_of, ran

aten = torch.ops.aten
pytestmark = pytest.mark.skipif(not compiler(), reason="there is no C compiler")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draws_are_those_of_torch_in_the_same_order(dtype: torch.dtype) -> None:
    shapes = [(1,), (3,), (700,), (15,), (16,), (7, 91), (2,)]

    def function(x: Tensor) -> list[Tensor]:
        return [draw(shape, dtype=dtype) + x for shape in shapes for draw in (torch.rand, torch.randn)]

    run, x = in_c_of(function, torch.zeros((), dtype=dtype)), torch.zeros((), dtype=dtype)
    torch.manual_seed(3)
    found = [[each.clone() for each in run()] for _ in range(3)]
    left = torch.get_rng_state()
    torch.manual_seed(3)
    torch.testing.assert_close(found, [function(x) for _ in range(3)], rtol=0, atol=1e-6)
    assert torch.equal(left, torch.get_rng_state())  # also the half of a pair that the next draw begins with


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draws_into_empty_tensors_are_those_of_torch(dtype: torch.dtype) -> None:
    """So draw the distributions of torch, and the guides of Pyro with them."""

    def function(x: Tensor) -> list[Tensor]:
        drawn = [torch.empty(shape, dtype=dtype).normal_() for shape in ((3,), (16,), (7, 91))]
        first, _ = drawn[0], drawn[0].mul_(2.0)  # and change
        return [*(each + x for each in drawn), first + x, torch.zeros(3, dtype=dtype).normal_() + x]

    x = torch.zeros((), dtype=dtype)
    run = in_c_of(function, x)
    torch.manual_seed(3)
    found = [[each.clone() for each in run()] for _ in range(3)]
    torch.manual_seed(3)
    torch.testing.assert_close(found, [function(x) for _ in range(3)], rtol=0, atol=1e-6)


@pytest.mark.parametrize("function", [lambda x: torch.empty(3).normal_(1.0, 2.0) + x, lambda x: (x + 1).normal_()])
def test_other_draws_in_place_are_not_taken(function: Any) -> None:
    with pytest.raises(CannotError):
        in_c_of(lambda x: [function(x)], torch.zeros(3))


def test_a_generator_that_is_not_known_draws_by_itself() -> None:
    with mock.patch("pyro_dropout.engines.c.source.is_known", return_value=False):
        found, expected = ran(lambda x: [torch.randn(40) + x, torch.rand(1)], torch.zeros(()))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("m", "k", "n"), [(1, 7, 5), (6, 7, 1), (2, 1, 2), (2, 3, 17), (13, 40, 16), (5, 9, 33)])
@pytest.mark.thinned(5)
def test_products_of_any_sizes_and_strides(m: int, k: int, n: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, y, more = (torch.randn(shape, dtype=dtype) for shape in ((3, m, k), (3, k, n), (3, m, n)))

    def products(x: Tensor, y: Tensor, more: Tensor) -> list[Tensor]:
        left, right = x.mT.contiguous().mT[1], (2 * y).mT.contiguous().mT[2]
        found = [x @ y, x.mT.contiguous().mT @ (y + 1), left @ right, torch.baddbmm(more, x, y, beta=0.5, alpha=2)]
        return [*found, torch.addmm(more[0], left, y[1]), y.mT @ x.mT, torch.mm(x[0, :, :1], y[0, :1])]

    found, expected = ran(products, x, y, more)
    slack = 2e-5 if dtype == torch.float32 else 1e-13
    torch.testing.assert_close(found, expected, rtol=slack, atol=slack)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("terms", [512, 513, 1300, 80_000])
def test_a_product_of_many_terms_fits_on_a_small_stack(terms: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(2, terms, dtype=dtype), torch.randn(terms, 18 if terms < 2000 else 3, dtype=dtype)
    run, found = in_c_of(lambda x, y: [x @ y], x, y), list[Tensor]()
    before = threading.stack_size(2**20)
    try:
        thread = threading.Thread(target=lambda: found.extend(run()))
        thread.start()
        thread.join()
    finally:
        threading.stack_size(before)
    size = (x.double().abs() @ y.double().abs()).max().item()
    torch.testing.assert_close(
        found[0].double(), x.double() @ y.double(), rtol=0, atol=size * 30 * torch.finfo(dtype).eps
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(2,), (4, 9), (32,), (33,)])
def test_factors_of_positive_matrices(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(*shape, shape[-1], dtype=dtype)

    def factors(x: Tensor) -> list[Tensor]:
        whole = (x @ x.mT / shape[-1] + torch.eye(shape[-1], dtype=dtype)).mT
        lower = torch.linalg.cholesky_ex(whole).L
        # Of what is not positive only the number of the pivot is told.
        return [lower, torch.cholesky_inverse(lower), torch.linalg.cholesky_ex(whole - 1).info]

    found, expected = ran(factors, x)
    slack = 2e-5 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(found, expected, rtol=slack, atol=slack)


@pytest.mark.parametrize("distance", [-2, 0, 1, 5])
def test_triangles_diagonals_and_padding_of_less_than_nothing(distance: int) -> None:
    x = torch.randn(3, 5, 7)
    diagonal = torch.randn_like(x.diagonal(distance, 1, 2))

    def step(x: Tensor, diagonal: Tensor) -> list[Tensor]:
        scattered = (2 * x).diagonal_scatter(diagonal + 1, distance, 1, 2)
        back = aten.diagonal_backward(2 * diagonal, x.shape, distance, 1, 2)
        return [scattered, back, x.tril(distance) + 1, (x + 1).triu(distance), F.pad(2 * x, (-1, 3, 1, -2))]

    found, expected = ran(step, x, diagonal)
    torch.testing.assert_close(found, expected)
