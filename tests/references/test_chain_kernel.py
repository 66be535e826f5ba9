"""Kernels of whole chains, run on the CPU and on a GPU: operations against torch, chains against the CPU's own path."""

import math
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

import pyro_dropout as pd
from pyro_dropout.engines.generated.values import UnsupportedError
from pyro_dropout.generative.model_call import ModelCall
from pyro_dropout.references.nuts.adaptation import Plan
from pyro_dropout.references.nuts.chains import ChainResult, _Run, run_chains
from pyro_dropout.references.nuts.chains_on_gpu import ChainsOnGpu, Source
from pyro_dropout.references.nuts.energy import Energy
from tests.oracles.host_kernel import THREADS, compiled, computed
from tests.references.test_energy import cases
from tests.references.test_no_u_turn import bent, energies

F64 = torch.float64
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
PLAN = Plan(12, 30, 0.8, 3)
HOST = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
pytestmark = pytest.mark.usefixtures("unchecked_shapes")


def finished(run: _Run) -> list[ChainResult]:
    while run.left:
        run.block()
    return run.results()


def on_cpu(energy: Any, starts: Tensor, plan: Plan, seed: int) -> list[ChainResult]:
    return finished(_Run(energy, starts, plan, seed, False))


def on_gpu(energy: Any, starts: Tensor, plan: Plan, seed: int) -> list[ChainResult]:
    """Run chains on the GPU, and nowhere else."""
    run = _Run(energy, starts, plan, seed, True, CUDA)
    found = finished(run)
    assert run.not_on_gpu is None
    assert run._gpu is not None
    return found


def on_host(steps: int, before: int = 0, compile: Any = compiled) -> Callable[..., list[ChainResult]]:
    """Run chains as a kernel, with the CPU in place of a GPU, after this many blocks without it."""

    def sampled(energy: Any, starts: Tensor, plan: Plan, seed: int) -> list[ChainResult]:
        run = _Run(energy, starts, plan, seed, False)
        for _ in range(before):
            run.block()
        run._to_gpu(
            lambda *parts: ChainsOnGpu(*parts[:-1], CPU, steps, compile, threads=THREADS, lanes=1)  # type: ignore[misc]
        )
        return finished(run)

    return sampled


def starts(chains: int, size: int = 3) -> Tensor:
    return torch.from_numpy(np.random.default_rng(0).normal(size=(chains, size)))


def elementwise(x: Tensor, y: Tensor, n: Tensor) -> list[Tensor]:
    """Operations on elements, with infinite numbers and others that are none."""
    wild = torch.tensor([math.inf, -math.inf, math.nan, 0.0], dtype=F64)
    return [
        *(x + y, x - 2 * y, 3 - x, x * y, x / y, -x, x.abs(), x.sign(), x**2, (1 + x**2) ** -0.75),
        *(x.exp(), (1 + x**2).log(), x.tanh(), x.sigmoid(), torch.erf(x), torch.lgamma(x**2 + 1), x.sin()),
        *(torch.logaddexp(x, y), torch.logaddexp(wild[:, None], x), torch.maximum(x, wild[:, None])),
        *(x.clamp(-0.5, 0.5), x.clamp_min(0.1), x.relu(), torch.where(x > y, x, 0.0), (x < 0) | (y < 0)),
        *(~(x > 0), (x > 0) & (x >= y), n % 3, n & 5, -n % 4, n == 2, torch.isfinite(wild * x[0, 0]), n * 0.5),
        *(x.float(), x.float() * 2, wild.isnan(), torch.minimum(wild, x[0, 0]), wild.sign()),
    ]


def across(x: Tensor, y: Tensor, n: Tensor) -> list[Tensor]:
    """Sums, products, and views of several kinds."""
    whole = torch.arange(24, dtype=F64).reshape(2, 3, 4) + x.sum()
    long = torch.linspace(-1, 1, 17 * 40, dtype=F64).reshape(17, 40) * x.sum()
    return [
        *(x.sum(), x.sum(0), x.sum(1, keepdim=True), x.amax(1), x.amin(0), (x > 0).any(1), (x > 9).any(), x.mean(0)),
        *((x > -9).all(0), x.prod(1), x @ y.T, torch.bmm(whole, whole.transpose(1, 2)), whole.permute(2, 0, 1)),
        *(torch.cat([x, y[:, 1:]], 1), torch.cat([x.sum(0), y[0]]), pad(x, (1, 2), value=3.0), pad(x, (-1, 0, 2, -1))),
        *(x[:, 1], x[1:], whole[:, ::2], whole[..., -1], whole.reshape(6, 4), (whole * 2).reshape(4, 6)),
        *(x[None].expand(2, -1, -1), x.gather(1, n), torch.zeros_like(x).scatter_add(1, n, y), x.t() * 2),
        *torch.split(x * y, [1, 2], 1),
        *(torch.addmm(x[0, :1], x, y.T), torch.addmm(x[0, :1], x, y.T, alpha=0.5, beta=3.0), x.cumsum(1), y.cumsum(0)),
        *((x + y).mul_(2), x.clone().add_(1)),
        *(torch.zeros_like(x).scatter(1, n[:, :1], y[:, :1]), long.sum(), (long @ long.T).sum(1), long @ long.T[:, :9]),
        whole.sum((0, 2)).exp().log() + whole.flatten(1).sum(),
    ]


def slopes(x: Tensor, y: Tensor, n: Tensor) -> list[Tensor]:
    """Gradients of activations and losses."""
    found = []
    losses: list[Callable[[Tensor], Tensor]] = [
        *(torch.relu, torch.tanh, torch.sigmoid, nn.functional.gelu, nn.functional.silu, nn.functional.softplus),
        *(nn.functional.elu, nn.functional.leaky_relu, nn.functional.logsigmoid, lambda z: z[:, 1] ** 3, torch.lgamma),
        *(lambda z: z.log_softmax(1).gather(1, n[:, :1]), lambda z: z[1:].exp(), lambda z: z.softmax(1) * y),
        *(lambda z: torch.distributions.StudentT(4.0, validate_args=False).log_prob(z), lambda z: (z * y).logsumexp(1)),
    ]
    for loss in losses[:10] + losses[11:]:
        z = x.detach().requires_grad_()
        with torch.enable_grad():
            value = loss(z)
            found += [value.detach(), *torch.autograd.grad(value.sum(), z)]
    return [*found, losses[10](x * x)]


@HOST
@pytest.mark.parametrize("function", [elementwise, across, pytest.param(slopes, marks=pytest.mark.deep)])
def test_operations_are_those_of_torch(function: Callable[..., list[Tensor]]) -> None:
    torch.manual_seed(0)
    x, y, n = torch.randn(4, 3, dtype=F64), torch.randn(4, 3, dtype=F64), torch.randint(0, 3, (4, 3))
    expected = function(x, y, n)
    for one, other in zip(computed(function, [x, y, n]), expected, strict=True):
        close = 1e-6 if one.dtype == torch.float32 else 1e-12
        torch.testing.assert_close(one, other, rtol=close, atol=1e-12, equal_nan=True)


@HOST
@pytest.mark.parametrize(
    "function",
    [
        lambda x: [torch.linalg.cholesky(x @ x.T)],
        lambda x: [x + torch.rand(3, dtype=F64)],
        lambda x: [x.t().add_(1)],
        lambda x: [x.view(torch.int64)],
    ],
    ids=["cholesky", "random", "in-place", "bits"],
)
def test_what_a_kernel_does_not_know_is_refused(function: Callable[..., list[Tensor]]) -> None:
    with pytest.raises(UnsupportedError):
        computed(function, [torch.randn(3, 3, dtype=F64)])


KERNELS = [
    *(pytest.param(on_host(n, 1), PLAN, True, marks=[HOST, pytest.mark.deep], id=f"host-{n}") for n in (7, 64, 300)),
    pytest.param(on_gpu, Plan(15, 45, 0.8, 3), False, marks=GPU, id="gpu"),
    pytest.param(on_gpu, Plan(25, 0, 0.8, 10), True, marks=GPU, id="gpu-deep-trees"),
]


@pytest.mark.parametrize(("kernel", "plan", "deep"), KERNELS)
@pytest.mark.parametrize("energy", [energies, bent])
def test_chains_of_a_kernel_are_those_of_the_cpu(energy: Any, kernel: Any, plan: Plan, deep: bool) -> None:
    """Every draw, step size, scale and count, whatever the steps of a launch."""
    found, expected = (run(energy, starts(3), plan, 5) for run in (kernel, on_cpu))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.draws, other.draws, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(one.scale, other.scale, rtol=1e-5)
        assert one.step == pytest.approx(other.step, rel=1e-5)
        assert (one.diverged, one.deepest, one.steps) == (other.diverged, other.deepest, other.steps)
    assert any(chain.deepest for chain in expected) or not deep


def wide(x: Tensor, y: Tensor | None = None) -> Tensor:
    """A model with a site that is positive, and no network."""
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(x, scale).to_event(1), obs=y)
    return scale * x


def models() -> list[Any]:
    counts = torch.tensor([[0.0], [1.0], [3.0], [0.0], [2.0], [1.0]])
    relu = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    return [
        pytest.param(pd.BayesianNet(relu, likelihood=pd.Poisson()), torch.randn(6, 2), counts, id="counts"),
        pytest.param(wide, torch.randn(6, 1).double(), torch.randn(6, 1).double(), id="positive"),
        *(case for case in cases() if case.id not in ("recurrent", "constrained")),
    ]


@HOST
@pytest.mark.deep
@pytest.mark.parametrize(("model", "x", "y"), models())
def test_models_of_many_kinds_become_kernels(model: Any, x: Tensor, y: Tensor) -> None:
    same_draws(on_host(32), model, x, y, Plan(5, 0, 0.8, 3))


@GPU
def test_a_chain_that_needs_more_memory_than_its_processor_has_is_that_of_the_cpu() -> None:
    x = torch.linspace(-2, 2, 12).unsqueeze(-1)
    net = nn.Sequential(nn.Linear(1, 120), nn.Tanh(), nn.Linear(120, 1))
    same_draws(on_gpu, pd.BayesianNet(net, likelihood=pd.Gaussian(tau=25.0)), x, torch.sin(x), Plan(4, 0, 0.8, 3))


def same_draws(kernel: Any, model: Any, x: Tensor, y: Tensor, plan: Plan) -> None:
    """Check that a kernel's chains on a model are those of the CPU."""
    energy = Energy(ModelCall(model, (x, y)))
    torch.manual_seed(1)
    first = torch.stack([energy.start() for _ in range(2)])
    for one, other in zip(*(run(energy, first, plan, 2) for run in (kernel, on_cpu)), strict=True):
        np.testing.assert_allclose(one.draws, other.draws, rtol=1e-6, atol=1e-7)


@GPU
def test_draws_of_a_model_on_a_gpu_lie_there_and_repeat() -> None:
    x = torch.randn(20, 2, device=CUDA)
    model = pd.BayesianNet(nn.Linear(2, 1), likelihood=pd.Gaussian(tau=2.0)).cuda()
    options: Any = {"chains": 16, "samples": 300, "warmup": 150, "compile": True, "progress": False}
    one, again = (pd.nuts(model, x, x[:, :1], seed=0, **options).weights["weight"] for _ in range(2))
    assert one.shape == (16, 300, 1, 2)
    assert one.is_cuda
    assert torch.equal(one, again)


@HOST
def test_a_kernel_that_is_wrong_is_noticed() -> None:
    def broken(source: Source, device: torch.device) -> Callable[..., None]:
        launch = compiled(source, device)

        def launched(states: Tensor, *others: Any) -> None:
            launch(states, *others)
            states[:, 0] += 1e-3

        return launched

    with pytest.raises(UnsupportedError, match="is not that of the model"):
        on_host(10, compile=broken)(energies, starts(2), PLAN, 0)


def unsupported(z: Tensor) -> tuple[Tensor, Tensor]:
    """An energy that reads its values, which no kernel can."""
    return (0.5 * (z**2).sum(-1), z) if float(z.sum().item()) < 1e9 else (z[:, 0], z)


@pytest.mark.parametrize("compile", ["auto", False])
def test_an_energy_that_is_no_kernel_stays_on_the_cpu_with_the_same_draws(
    compile: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pyro_dropout.references.nuts.chains._WORTH_A_GPU", 0)
    plan = Plan(40, 20, 0.8, 4)
    expected = run_chains(unsupported, starts(2), plan, 3, compile=False)
    run = _Run(unsupported, starts(2), plan, 3, compile, CUDA)
    found = finished(run)
    assert run._gpu is None
    assert (run.not_on_gpu is not None) == (compile == "auto")
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.draws, other.draws, rtol=1e-9)
