"""The curvature of each likelihood and structure against Hessians by autograd, of the linearised model."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev

import pyro_dropout as pd
from pyro_dropout.mathematics.curvature_blocks import Dense
from tests.networks.layers import Output, Parts
from tests.training.laplace.test_laplace import untrained

F64 = torch.float64
N = 5


def mlp(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, outputs)).to(F64)


def maps(classes: int) -> nn.Module:
    """Outputs (N, C, 2, 1): classes first, at two positions."""
    return Output(mlp(2 * classes), lambda net, x: net(x).reshape(len(x), 2, -1).mT.unsqueeze(-1))


def ignored() -> Tensor:
    y = torch.arange(2 * N).reshape(N, 2, 1) % 3
    y[0, 0], y[2] = -100, -100
    return y


# The likelihood, the network, targets, and -log p(y | f) of one point as a formula of f and y. The heteroscedastic
# Gaussian's is convex only in expectation: its formula takes E[(y - m)²] = 1/τ at the point f0.
CASES: dict[str, tuple[Callable[[], Any], Callable[[], nn.Module], Callable[[], Tensor], Callable[..., Tensor]]] = {
    "gaussian": (
        lambda: pd.Gaussian(tau=3.0),
        lambda: mlp(1),
        lambda: torch.randn(N, 1, dtype=F64),
        lambda f, y, f0: 1.5 * (y - f).square().sum(),
    ),
    "gaussian, tau by output": (
        lambda: pd.Gaussian(tau=torch.tensor([2.0, 5.0], dtype=F64)),
        lambda: mlp(2),
        lambda: torch.randn(N, 2, dtype=F64),
        lambda f, y, f0: (torch.tensor([1.0, 2.5], dtype=F64) * (y - f).square()).sum(),
    ),
    "heteroscedastic": (
        pd.HeteroscedasticGaussian,
        lambda: mlp(4),
        lambda: torch.randn(N, 2, dtype=F64),
        lambda f, y, f0: 0.5 * (f[2:].exp() * ((f[:2] - f0[:2]).square() + (-f0[2:]).exp()) - f[2:]).sum(),
    ),
    "heteroscedastic map": (
        lambda: pd.HeteroscedasticGaussian(dims=(2, 2, 1), dim=0),
        lambda: maps(2),
        lambda: torch.randn(N, 2, 1, dtype=F64),
        lambda f, y, f0: 0.5 * (f[2:].exp() * ((f[:2] - f0[:2]).square() + (-f0[2:]).exp()) - f[2:]).sum(),
    ),
    "classes": (
        pd.Categorical,
        lambda: mlp(3),
        lambda: torch.arange(N) % 3,
        lambda f, y, f0: torch.logsumexp(f, 0) - f[y],
    ),
    "map of classes": (
        lambda: pd.Categorical(dims=(3, 2, 1), dim=0, ignore_index=-100),
        lambda: maps(3),
        ignored,
        lambda f, y, f0: nn.functional.cross_entropy(
            f.reshape(1, 3, 2, 1), y[None], ignore_index=-100, reduction="sum"
        ),
    ),
    "yes or no": (
        pd.Bernoulli,
        lambda: mlp(2),
        lambda: (torch.randn(N, 2) > 0).to(F64),
        lambda f, y, f0: (nn.functional.softplus(f) - y * f).sum(),
    ),
    "counts": (
        pd.Poisson,
        lambda: mlp(2),
        lambda: torch.poisson(torch.ones(N, 2, dtype=F64)),
        lambda f, y, f0: (f.exp() - y * f).sum(),
    ),
    "logarithms": (
        lambda: pd.Transformed(pd.Gaussian(4.0), "log"),
        lambda: mlp(2),
        lambda: torch.rand(N, 2, dtype=F64) + 0.5,
        lambda f, y, f0: 2 * (y.log() - f).square().sum(),
    ),
}


def hessian(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """``torch.func.hessian`` without its forward mode, whose first use warns of torch's own deprecations."""
    return jacrev(jacrev(function))


def gauss_newton(net: nn.Module, x: Tensor, y: Tensor, minus_log_p: Callable[..., Tensor]) -> Tensor:
    """Return the Hessian in w of -log p(y | f0 + J (w - w0)), one point after another, by torch.func."""
    names = [name for name, _ in net.named_parameters()]
    shapes = [p.shape for p in net.parameters()]
    start = torch.cat([p.detach().flatten() for p in net.parameters()])

    def f(flat: Tensor, xn: Tensor) -> Tensor:
        parts = flat.split([shape.numel() for shape in shapes])
        weights = {name: part.reshape(shape) for name, part, shape in zip(names, parts, shapes, strict=True)}
        return functional_call(net, weights, (xn[None],)).flatten()

    total = torch.zeros(len(start), len(start), dtype=F64)
    for xn, yn in zip(x, y, strict=True):
        f0, slope = f(start, xn), jacrev(f)(start, xn)
        total += hessian(lambda w, f0=f0, slope=slope, yn=yn: minus_log_p(f0 + slope @ (w - start), yn, f0))(start)
    return total


def matrix(guide: pd.guides.AutoLaplace) -> Tensor:
    """The curvature of all sites, in model order, without the prior."""
    (block,) = guide.curvature
    assert isinstance(block, Dense)
    return block.hessian


@pytest.mark.parametrize("name", CASES)
def test_it_is_the_hessian_of_the_linearised_model(name: str) -> None:
    likelihood, make, targets, minus_log_p = CASES[name]
    net, x, y = make(), torch.randn(N, 2, dtype=F64), targets()
    model = pd.BayesianNet(net, likelihood=likelihood())
    expected = gauss_newton(net, x, y, minus_log_p)
    full = untrained(model, net, x, y, structure="full", batch_size=2)
    torch.testing.assert_close(matrix(full), expected, rtol=1e-8, atol=1e-8)
    assert torch.linalg.eigvalsh(matrix(full)).min() > -1e-9
    layers = untrained(model, net, x, y, structure="layer")
    ends = [9, len(expected)]
    for block, start, end in zip(layers.curvature, [0, 9], ends, strict=True):
        torch.testing.assert_close(block.hessian, expected[start:end, start:end], rtol=1e-8, atol=1e-8)
    (diagonal,) = untrained(model, net, x, y, structure="diagonal").curvature
    torch.testing.assert_close(diagonal.diagonal, expected.diagonal(), rtol=1e-8, atol=1e-8)
    (last,) = untrained(model, net, x, y, structure="last").curvature
    torch.testing.assert_close(last.hessian, expected[9:, 9:], rtol=1e-8, atol=1e-8)
    f = model.evaluate(dict(net.named_parameters()), x)
    checked = model.likelihood.checked(f, y)
    log_p = model.likelihood.distribution(f).log_prob(checked).sum()
    torch.testing.assert_close(full.curvature.log_likelihood, log_p.detach())
    assert full.curvature.num_data == N


# What a network makes of the outputs f of its last layer, and of what enters it, h.
ENDS: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "as it is": lambda last, f, h: f,
    "a view": lambda last, f, h: f.reshape(-1, 2),
    "in place": lambda last, f, h: f.add_(h),
    "plus": lambda last, f, h: f + h,
    "scaled": lambda last, f, h: 2 * f,
    "softmax": lambda last, f, h: f.softmax(-1),
    "clamped": lambda last, f, h: f.clamp(-0.1, 0.1),
    "twice": lambda last, f, h: last(f),
}


@pytest.mark.parametrize("how", ENDS)
def test_the_block_of_the_last_layer_is_that_of_all_weights(how: str) -> None:
    """Also where the network's outputs are not those of the layer, and what enters it does not say how they bend."""

    def read(net: Any, x: Tensor) -> Tensor:
        h = torch.tanh(net.first(x))
        return ENDS[how](net.last, net.last(h), h)

    net = Parts(read, last=nn.Linear(2, 2), first=nn.Linear(2, 2)).to(F64)  # the last layer is named first
    model, x = pd.BayesianNet(net, likelihood=pd.Gaussian(3.0)), torch.randn(N, 2, dtype=F64)
    full, last = (untrained(model, model, x, 0 * x, structure=each) for each in ("full", "last"))
    (block,) = last.curvature
    assert list(block.shapes) == ["last.weight", "last.bias"]
    torch.testing.assert_close(block.hessian, matrix(full)[:6, :6], rtol=1e-8, atol=1e-10)


def test_kron_is_exact_for_one_point() -> None:
    """With one point, a layer's block is g gᵀ ⊗ a aᵀ, whatever the network and the number of outputs."""
    net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(inplace=True), nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 3, bias=False))
    model = pd.BayesianNet(net.to(F64), likelihood=pd.Categorical())
    x, y = torch.randn(1, 2, dtype=F64), torch.tensor([1])
    kron = untrained(model, net, x, y, structure="kron")
    layers = untrained(model, net, x, y, structure="layer")
    for factors, block in zip(kron.curvature, layers.curvature, strict=True):
        whole = torch.kron(factors.outputs, factors.inputs)
        order = matrix_order(factors.shapes)
        torch.testing.assert_close(whole, block.hessian[order][:, order], rtol=1e-9, atol=1e-12)


def matrix_order(shapes: dict[str, torch.Size]) -> Tensor:
    """Where the numbers of (W, b), laid out by outputs, are in W and then b."""
    outputs = next(iter(shapes.values()))[0]
    sizes = [shape.numel() for shape in shapes.values()]
    at = torch.arange(sum(sizes)).split(sizes)
    return torch.cat([part.reshape(outputs, -1) for part in at], -1).flatten()


@pytest.mark.parametrize("outputs", [1, 3])
def test_kron_is_exact_for_one_layer_with_constant_noise(outputs: int) -> None:
    net = nn.Linear(4, outputs).to(F64)
    model = pd.BayesianNet(net, pd.Prior(length_scale=2.0, bias_length_scale=0.5), pd.Gaussian(tau=3.0))
    x, y = torch.randn(7, 4, dtype=F64), torch.randn(7, outputs, dtype=F64)
    kron, full = (untrained(model, net, x, y, structure=each) for each in ("kron", "full"))
    rows = {"weight": torch.randn(6, outputs, 4, dtype=F64), "bias": torch.randn(6, outputs, dtype=F64)}
    ours, theirs = (guide.covariance_root(rows) for guide in (kron, full))
    torch.testing.assert_close(ours @ ours.mT, theirs @ theirs.mT, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(kron.curvature.log_det(), full.curvature.log_det(), rtol=1e-10, atol=0)
    for name in rows:
        one, other = kron.posterior(name), full.posterior(name)
        torch.testing.assert_close(one.covariance_matrix, other.covariance_matrix, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(one.variance, other.variance, rtol=1e-9, atol=1e-12)
        w = other.sample((3,))
        torch.testing.assert_close(one.log_prob(w), other.log_prob(w), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv1d(2, 3, 3, padding="same", padding_mode="circular"), (2, 5)),
        (nn.Conv2d(2, 3, 2, stride=2, padding=1, dilation=2), (2, 5, 4)),
        (nn.Conv3d(1, 2, 2), (1, 3, 3, 2)),
    ],
    ids=["1d", "2d", "3d"],
)
def test_kron_of_a_convolution_is_its_definition(layer: nn.Module, shape: tuple[int, ...]) -> None:
    """A = Σ a aᵀ / rows over patches, B = Σ g gᵀ: both from gradients in a weight that has one copy a position."""
    layer = layer.to(F64)
    with torch.no_grad():
        positions = layer(torch.zeros(1, *shape, dtype=F64)).shape[2:].numel()
    net = nn.Sequential(layer, nn.Tanh(), nn.Flatten(), nn.Linear(positions * layer.out_channels, 2)).to(F64)
    model = pd.BayesianNet(net, likelihood=pd.Gaussian(tau=2.0))
    x = torch.randn(3, *shape, dtype=F64)
    guide = untrained(model, net, x, torch.zeros(3, 2, dtype=F64), structure="kron")
    block = next(iter(guide.curvature))
    # The slope of one output of the layer, at one position, in its weights is the patch there.
    patches = torch.stack(
        [
            torch.cat([grad.flatten(), torch.ones(1, dtype=F64)])
            for n in range(3)
            for t in range(positions)
            for grad in torch.autograd.grad(layer(x[n : n + 1]).flatten(2)[0, 0, t], layer.weight)
            for grad in [grad[0]]
        ]
    )
    torch.testing.assert_close(block.inputs, patches.mT @ patches / len(patches), rtol=1e-10, atol=1e-12)
    s = layer(x).detach().requires_grad_()
    f = net[1:](s)
    slopes = [torch.autograd.grad(f[:, d].sum(), s, retain_graph=True)[0].movedim(1, -1).flatten(0, -2) for d in (0, 1)]
    expected = 2.0 * sum(g.mT @ g for g in slopes)
    torch.testing.assert_close(block.outputs, expected, rtol=1e-10, atol=1e-12)
