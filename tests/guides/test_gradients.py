"""Every guide's gradient is unbiased: Monte Carlo against enumeration and quadrature that share no code with it."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyro
import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap

import pyro_dropout as pd
from tests.oracles.posteriors import CASES, L_BIAS, L_WEIGHT, K, Q, State
from tests.oracles.small_net import expected_surprise

TAU = 2.5
X = torch.tensor([[0.9, -0.4], [-0.3, 1.2]], dtype=torch.float64)
Y = torch.tensor([[0.7], [-1.1]], dtype=torch.float64)
CALLS, DRAWS = 40, 100_000
DEEP = pytest.param(5, marks=pytest.mark.deep)  # five times as many calls
# Every number is compared at 4 standard errors of 40 calls: on correct code one in 3,700 lies further away (Student, 39
# degrees of freedom), so one of a case's 20 numbers in 1 of 190 cases; twice in a row in 1 of 36,000, and one of the 42
# cases in 1 run of 850. The seeds are fixed.
ERRORS = 4.0


@pytest.fixture(autouse=True)
def in_float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    with pyro.validation_enabled(False):  # checks of values cannot be mapped over draws
        yield


def average(loss: Callable[[int], Tensor], parameters: list[Tensor], calls: int) -> tuple[list[Tensor], list[Tensor]]:
    """Mean and standard error of loss and gradients over calls of ``DRAWS / CALLS`` draws each."""
    found = []
    for _ in range(calls):
        value = loss(DRAWS // CALLS)
        found.append([value.detach(), *torch.autograd.grad(value, parameters)])
    columns = [torch.stack(column) for column in zip(*found, strict=True)]
    return [c.mean(0) for c in columns], [c.std(0) / math.sqrt(calls) for c in columns]


def drawn_loss(elbo: pd.ELBO, model: Any, guide: Any, x: Tensor, y: Tensor) -> Callable[[int], Tensor]:
    """-ELBO averaged over ``draws`` draws: a data point repeated is a draw more, or one loss is mapped over draws."""

    def of_rows(draws: int) -> Tensor:
        times = draws // len(x)
        return elbo.differentiable_loss(model, guide, x.repeat(times, 1), y.repeat(times, *[1] * (y.dim() - 1)), len(x))

    def of_draws(draws: int) -> Tensor:
        each = vmap(lambda zero: elbo.differentiable_loss(model, guide, x, y) + zero, randomness="different")
        return each(torch.zeros(draws)).mean()

    elbo.loss(model, guide, x, y)  # Pyro's store meets all parameters, which it cannot do inside vmap
    return of_rows if elbo.per_example else of_draws


def assert_unbiased(
    elbo: pd.ELBO, model: Any, guide: Any, data: tuple[Tensor, Tensor], exact: Sequence[Tensor | None], times: int
) -> None:
    """Compare value and gradients; one number too far is measured once more, with as many draws again."""
    names = ["value", *(name for name, _ in guide.named_parameters())]
    loss = drawn_loss(elbo, model, guide, *data)
    for _ in range(2):
        means, errors = average(loss, list(guide.parameters()), times * CALLS)
        found = zip(names, means, errors, exact, strict=True)
        # at σ = 0 the value is defined up to a constant only, and is not compared
        off = {
            name: float(((m - e).abs() / (se + 1e-9 * (1 + e.abs()))).max())
            for name, m, se, e in found
            if e is not None
        }
        print(f"largest deviation: {max(off.values()):.2f} standard errors")
        if max(off.values()) <= ERRORS:
            return
    raise AssertionError(f"further than {ERRORS} standard errors from the exact values, twice: {off}")


def scatter(guide: Any, seed: int) -> None:
    """Move all parameters to places where nothing is symmetric, small or special."""
    generator = torch.Generator().manual_seed(seed)
    starts = {"log_scale": math.log(0.3), "log_alpha": math.log(0.4), "share_logit": 0.5}
    sizes = {"loc": 0.8, "locs": 0.8, "factor": 0.4, "logits": 0.5}
    sizes |= {"log_scale": 0.3, "log_alpha": 0.2, "share_logit": 0.3}
    with torch.no_grad():
        for name, value in guide.named_parameters():
            kind = name.rsplit(".", 1)[-1]
            noise = torch.randn(value.shape, generator=generator, dtype=torch.float64)
            value.copy_(starts.get(kind, 0.0) + sizes[kind] * noise)


def leaves(guide: Any) -> State:
    """The guide's parameters by site and name, as leaves of a graph of their own."""
    found: State = {}
    for path, value in guide.named_parameters():
        _, site, name = path.split(".")
        found.setdefault(site.replace("/", "."), {})[name] = value.detach().clone().requires_grad_()
    return found


RUNS = [
    (name, per_example, kl)
    for name, case in CASES.items()
    for per_example in (True, False)
    # where both forms have one gradient, each mode takes one of them
    for kl in (case.kls if len(case.kls) > 1 else (("large_k",) if per_example else ("exact",)))
]


@pytest.mark.parametrize("times", [1, DEEP])
@pytest.mark.parametrize(
    ("name", "per_example", "kl"),
    [
        pytest.param(
            *run,
            id=f"{run[0]}-{'per-example' if run[1] else 'shared'}-{run[2]}",
            marks=[pytest.mark.deep] if number % 10 else [],
        )
        for number, run in enumerate(RUNS)
    ],
)
@pytest.mark.thinned(2)
def test_gradient_is_unbiased(name: str, per_example: bool, kl: Any, times: int) -> None:
    case = CASES[name]
    net = nn.Sequential(nn.Linear(Q, K), nn.Tanh(), nn.Linear(K, 1))
    model = pd.BayesianNet(net, pd.Prior(L_WEIGHT, L_BIAS, width_scaled=False), pd.Gaussian(TAU))
    guide = case.guide(model)
    scatter(guide, seed=1)
    state = leaves(guide)
    value = expected_surprise(case.nodes(state), X, Y, TAU) + case.divergence(state, kl != "large_k")
    gradients = torch.autograd.grad(value, [p for site in state.values() for p in site.values()])
    # a call maps over 2,500 shared draws, each with a KL of its own; with a draw for each row there is one KL a call
    elbo = pd.ELBO(kl=kl, per_example=per_example, kl_samples=1000 if per_example else 2)
    assert_unbiased(elbo, model, guide, (X, Y), [value.detach() if case.value else None, *gradients], times)
