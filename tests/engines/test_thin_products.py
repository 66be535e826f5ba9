"""Rewritten products against the products themselves."""

from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from pyro_dropout.engines.thin_products import (
    rewrite_skinny_products,
    sum_products_with_vectors,
)

F64 = torch.float64
PRODUCTS = ("mm", "bmm", "addmm")


def rewritten(function: Any, *inputs: torch.Tensor) -> tuple[Any, list[str]]:
    graph = make_fx(function)(*inputs)
    rewrite_skinny_products(graph.graph)
    graph.graph.lint()
    graph.recompile()
    return graph(*inputs), [n.target.__name__.split(".")[0] for n in graph.graph.nodes if n.op == "call_function"]


@pytest.mark.parametrize(
    ("function", "shapes", "left"),
    [
        (torch.mm, [(5, 1), (1, 7)], []),
        (torch.bmm, [(3, 5, 1), (3, 1, 7)], []),
        (torch.addmm, [(7,), (5, 1), (1, 7)], []),
        (torch.mm, [(2000, 10), (10, 10)], []),
        (torch.mm, [(10, 10), (10, 2000)], []),
        (torch.mm, [(2000, 10), (10, 1)], []),
        (torch.mm, [(2000, 17), (17, 10)], ["mm"]),
        (torch.mm, [(500, 10), (10, 10)], ["mm"]),
        (torch.mm, [(2000, 10), (10, 2000)], ["mm"]),
        (lambda a: a.mT @ a, [(2**17, 10)], ["bmm"]),  # in chunks, rows side by side
        (lambda a: a.mT @ a, [(2**17 + 1, 10)], ["mm"]),
        (lambda a, b: a.mT @ b, [(2**16, 3), (2**16, 5)], ["bmm"]),
        (lambda a, b: b @ a.mT, [(2000, 10), (1, 10)], []),
        (torch.mm, [(1, 10), (10, 2000)], []),
    ],
)
def test_products_stay_what_they_are(function: Any, shapes: list[tuple[int, ...]], left: list[str]) -> None:
    inputs = [torch.randn(shape, dtype=F64) for shape in shapes]
    found, calls = rewritten(function, *inputs)
    expected = function(*inputs)
    assert [call for call in calls if call in PRODUCTS] == left
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-9)


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (torch.mm, [(7, 50), (50, 1)]),
        (torch.mm, [(1, 50), (50, 7)]),
        (torch.mm, [(1, 50), (50, 1)]),
        (lambda x, w: x @ w.t(), [(7, 50), (1, 50)]),
        (lambda slope, x: slope.t() @ x, [(50, 1), (50, 7)]),
        (lambda b, x, w: torch.addmm(b, x, w), [(1,), (7, 50), (50, 1)]),
    ],
)
def test_products_with_a_vector_are_sums_on_a_gpu(function: Any, shapes: list[tuple[int, ...]]) -> None:
    for kind, replaced in ((F64, True), (torch.float32, True), (torch.bfloat16, False)):
        inputs = [torch.randn(shape, dtype=kind) for shape in shapes]
        for device, left in (("cpu", not replaced), ("cuda", True)):
            graph = make_fx(function)(*inputs)
            sum_products_with_vectors(graph.graph, device)
            graph.graph.lint()
            graph.recompile()
            products = [n for n in graph.graph.nodes if str(n.target).split(".")[-2:-1] in (["mm"], ["addmm"])]
            assert bool(products) == left
            torch.testing.assert_close(graph(*inputs), function(*inputs), rtol=1e-5, atol=1e-5)


def test_a_product_seen_from_its_other_side_is_left_alone() -> None:
    """A tall matrix that is stored by columns has no rows to lay side by side."""
    a = torch.randn(10, 2**16, dtype=F64)
    found, calls = rewritten(lambda a: a @ a.mT, a)
    assert "mm" in calls
    torch.testing.assert_close(found, a @ a.mT)
