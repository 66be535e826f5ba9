"""Products in one kernel against the products themselves."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import pyro_dropout as pd
from pyro_dropout.engines import paired_products as paired
from pyro_dropout.engines import program
from pyro_dropout.engines.paired_products import pair_products
from tests.oracles.triton_here import PLACE, needed


def backward(x: Tensor, w: Tensor, v: Tensor) -> list[Tensor]:
    """Two layers and their gradients: those of the weights have the same shape, and neither needs the other."""
    h = (x @ w.t()).relu()
    slope = (h @ v.t()).tanh()
    by_v, by_h = slope.t() @ h, (slope @ v) * (h > 0)
    return [by_v.exp(), by_h.t() @ x, by_h @ w, by_h.sum(0)]


def joined(function: Any, *inputs: Tensor) -> tuple[Any, int]:
    graph = make_fx(function)(*inputs)
    pair_products(graph.graph, lambda matrix: True)
    graph.graph.lint()
    graph.recompile()
    calls = graph.graph.find_nodes(op="call_function", target=torch.ops.pyro_dropout.two_products.default)
    return graph(*inputs), len(calls)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paired, "_LEAST", 1)


@pytest.fixture
def tf32() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.usefixtures("small")
def test_gradients_of_the_weights_of_two_layers_are_a_pair() -> None:
    torch.manual_seed(0)
    x, w, v = (torch.randn(shape) for shape in ((48, 16), (16, 16), (16, 16)))
    found, pairs = joined(backward, x, w, v)
    assert pairs == 1
    torch.testing.assert_close(found, backward(x, w, v))


@pytest.mark.usefixtures("small")
def test_what_needs_the_first_product_comes_after_both() -> None:
    def function(x: Tensor, w: Tensor) -> list[Tensor]:
        first = (x @ w).relu() + 1
        return [first.sum(0), (x * 2) @ w.exp(), first @ w]

    x, w = torch.randn(16, 16), torch.randn(16, 16)
    found, pairs = joined(function, x, w)
    assert pairs == 1
    torch.testing.assert_close(found, function(x, w))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("function", "pairs"),
    [
        (lambda x, w: [x @ w, x.exp() @ w], 1),
        (lambda x, w: [(x @ w).relu() @ w], 0),  # one needs the other
        (lambda x, w: [x @ w, x.t() @ x], 0),  # other shapes
        (lambda x, w: [x @ w, x @ w.exp().t()], 0),  # another way to lie in memory
        (lambda x, w: [x[:, :16] @ w[:16, :16], x[:, :16] @ w[:16, :16].exp()], 0),  # the second has other rows
        (lambda x, w: [x @ w[:, :25].clone(), x @ w[:, 7:].clone()], 0),  # rows that are read slowly
        (lambda x, w: [x[:, :24].clone() @ w[:24], x[:, 8:].clone() @ w[8:]], 0),  # 24 terms
    ],
)
def test_only_products_of_the_same_kind_are_pairs(function: Any, pairs: int) -> None:
    x, w = torch.randn(16, 32), torch.randn(32, 32)
    found, count = joined(function, x, w)
    assert count == pairs
    torch.testing.assert_close(found, function(x, w))


@pytest.mark.usefixtures("small")
def test_products_of_what_is_written_into_stay() -> None:
    x, w = torch.ones(16, 32), torch.randn(32, 32)
    graph = make_fx(lambda x, w: [x @ w, x.add_(1) @ w])(x.clone(), w)
    before = graph.code
    pair_products(graph.graph, lambda matrix: True)
    graph.recompile()
    assert graph.code == before


@pytest.mark.parametrize("shapes", [((16, 32), (32, 32)), ((64, 2048), (2048, 64)), ((2048, 16), (16, 2048))])
def test_products_that_gain_nothing_stay(shapes: Any) -> None:
    x, w = (torch.randn(shape) for shape in shapes)
    assert joined(lambda x, w: [x @ w, x.exp() @ w], x, w)[1] == 0


def test_nothing_is_paired_where_torch_multiplies_in_full_precision() -> None:
    x, w = torch.randn(256, 512), torch.randn(512, 512)
    graph = make_fx(lambda x, w: [x @ w, x.exp() @ w])(x, w)
    pair_products(graph.graph)
    assert len(graph.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)) == 2
    assert not paired.in_tensor_cores(torch.device("cpu"))


def test_two_products_is_a_custom_operator_as_torch_wants_them() -> None:
    a, b = torch.randn(4, 3), torch.randn(5, 3)
    torch.library.opcheck(paired.two_products, (a, b, 2 * a, b + 1, [False, True, False, True]))


@pytest.mark.parametrize(("m", "k", "n"), [(64, 32, 64), (70, 96, 40), (70, 90, 40), (16, 5, 130)])
@pytest.mark.parametrize("turned", [(False, True), (False, False), (True, False), (True, True)])
def test_the_kernel_computes_both_products(m: int, k: int, n: int, turned: tuple[bool, bool]) -> None:
    needed()
    torch.manual_seed(0)

    def matrix(rows: int, columns: int, turns: bool) -> Tensor:
        return torch.randn(columns, rows, device=PLACE).t() if turns else torch.randn(rows, columns, device=PLACE)

    (a, b), (c, d) = ((matrix(m, k, turned[0]), matrix(k, n, turned[1])) for _ in range(2))
    first, second = torch.full((m, n), torch.nan, device=PLACE), torch.full((m, n), torch.nan, device=PLACE)
    paired._launch(a, b, first, c, d, second)
    slack = 1e-4 if PLACE == "cpu" else 1e-2  # ten bits of each factor
    torch.testing.assert_close(first, a @ b, rtol=slack, atol=10 * slack)
    torch.testing.assert_close(second, c @ d, rtol=slack, atol=10 * slack)


@pytest.mark.usefixtures("small")
@pytest.mark.deep
def test_inductor_compiles_a_step_with_pairs() -> None:
    """A Gaussian layer and its gradients: of six products three pairs."""

    def layer(x: Tensor, mean: Tensor, width: Tensor, noise: Tensor) -> list[Tensor]:
        leaves = [each.detach().requires_grad_() for each in (x, mean, width)]
        x, mean, width = leaves
        with torch.enable_grad():
            out = x @ mean.t() + noise * (x.square() @ width.exp().t()).sqrt()
            slopes = torch.autograd.grad(out.square().sum(), leaves)
        return [out.detach(), *(mine - 0.1 * slope for mine, slope in zip(leaves, slopes, strict=True))]

    torch.manual_seed(0)
    inputs = [torch.randn(shape) for shape in ((48, 32), (64, 32), (64, 32), (48, 64))]
    graph = make_fx(layer)(*inputs)
    pair_products(graph.graph, lambda matrix: True)
    graph.recompile()
    both = torch.ops.pyro_dropout.two_products.default
    assert len(graph.graph.find_nodes(op="call_function", target=both)) == 3
    with torch.no_grad():
        found = program._compile(graph, inputs)(*inputs)
    torch.testing.assert_close(list(found), layer(*inputs), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("small", "tf32")
@pytest.mark.skipif(PLACE == "cpu", reason="needs a GPU")
@pytest.mark.deep
def test_a_chain_of_steps_with_pairs_takes_the_eager_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three chains and two single steps, of a guide that draws nothing."""
    counts: list[int] = []
    launch = paired._launch
    monkeypatch.setattr(paired, "_launch", lambda *sides: (counts.append(1), launch(*sides)))
    torch.manual_seed(0)
    x = torch.randn(272, 64, device=PLACE)
    y, found = x[:, :1].sin(), []
    for compile in (True, False):
        torch.manual_seed(0)
        hidden = [layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.ReLU())]
        net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), *hidden, nn.Linear(256, 1))
        model = pd.BayesianNet(net.cuda())
        guide = pd.AutoDropout(model, keep=1.0).cuda()
        history = pd.fit(model, guide, x, y, steps=62, lr=1e-4, compile=compile, progress=False)
        found.append([history.losses.cpu(), *(value.detach().cpu() for value in guide.parameters())])
        assert bool(counts)
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=5e-3, atol=1e-3)
