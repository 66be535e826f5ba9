"""float32 from σ = 1e-12 to 1e3, memory of long low-rank rows, and what bad input is told."""

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal

from pyro_dropout.paper import BernoulliMixture, MultiplicativeNormal, RowMixture, kl, kl_gap
from tests.oracles.memory import peak_allocated

SCALES = [1e-12, 1e-6, 1e-3, 1.0, 30.0, 1e3]


def families(loc: Tensor, scale: Tensor, factor: Tensor) -> dict[str, RowMixture]:
    two, three = torch.stack([loc, -2 * loc]), torch.stack([loc, 0 * loc, 1 - loc])
    each = torch.stack([scale, 2 * scale, scale])
    thirds = loc.new_tensor([0.25, 0.5, 0.25])
    return {
        "dropout": BernoulliMixture(loc, 0.9, scale),
        "multiplicative by row": MultiplicativeNormal(loc, 0.3, scale),
        "multiplicative by weight": MultiplicativeNormal(loc, 0.3, scale, row_dim=None),
        "two low-rank": RowMixture(two, scale, thirds[:1].new_tensor([0.4, 0.6]), cov_factor=factor),
        "three separate": RowMixture(three, each, thirds),
        "three low-rank": RowMixture(three, each, thirds, cov_factor=factor.expand(3, -1, -1, -1)),
    }


def everything(loc: Tensor, scale: Tensor, factor: Tensor, name: str) -> dict[str, Tensor]:
    """All values that a family offers; draws use the same stream of random numbers in either precision."""
    q = families(loc, scale, factor)[name]
    prior = Normal(loc.new_tensor(0.0), loc.new_tensor(0.5))
    values = {"large_k": kl(q, prior), "mean": q.mean.sum(), "variance": q.variance.sum()}
    if name not in ("three separate", "three low-rank"):
        values["exact"] = kl(q, prior, "exact")
        values["gap"] = kl_gap(q)
    labels = torch.arange(2 * q.rows).reshape(2, q.rows) % q.components
    noise = torch.linspace(-2, 2, 2 * q.rows * q.rest, dtype=torch.float32).reshape(2, q.rows, q.rest).to(loc)
    eta = None if q.cov_factor is None else loc.new_full((2, q.rows, q.cov_factor.shape[-1]), 0.7)
    values["log_prob of draws"] = torch.logsumexp(q.log_joint(labels, noise, eta), 0).sum()
    return values


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", families(torch.ones(5, 4), torch.ones(5, 4), torch.ones(1, 4, 5, 2)))
@pytest.mark.thinned(3)
def test_float32_is_finite_and_follows_float64(name: str, scale: float) -> None:
    torch.manual_seed(0)
    loc, factor = torch.randn(5, 4) * 3, torch.randn(1, 4, 5, 2)
    inputs = [loc, torch.full((5, 4), scale), factor]
    single = [t.clone().requires_grad_() for t in inputs]
    double = [t.double().requires_grad_() for t in inputs]
    for (what, got), want in zip(everything(*single, name).items(), everything(*double, name).values(), strict=True):
        assert torch.isfinite(got), what
        slack = 1e-5 * max(1.0, abs(want.item()), (200.0 if what == "gap" else 0) * abs(want.item()))
        assert abs(got.item() - want.item()) <= slack, what
        if not got.requires_grad:
            continue
        slopes = torch.autograd.grad(got, single, retain_graph=True, allow_unused=True)
        exact = torch.autograd.grad(want, double, retain_graph=True, allow_unused=True)
        for s, e in zip(slopes, exact, strict=True):
            if s is None:
                continue
            assert torch.isfinite(s).all(), what
            assert e is not None
            # relative to the largest slope, and to 1/σ: single ones may be differences of numbers of that size
            assert ((s.double() - e).abs() <= 1e-4 * e.abs().max() + 1e-6 / scale).all(), what


def test_long_low_rank_rows_need_little_memory() -> None:
    """K = 200,000 with R = 10 in float32: value, density and gradients in under 200 MB (a K×K matrix is 160 GB)."""
    loc, factor = torch.randn(1, 200_000, 1).requires_grad_(), torch.randn(1, 1, 200_000, 10).requires_grad_()

    def work() -> None:
        q = RowMixture(loc, torch.full((200_000, 1), 0.1), torch.ones(1), cov_factor=factor)
        (kl(q, Normal(0.0, 1.0)) + q.log_prob(q.rsample())).backward()

    megabytes = (peak_allocated(work) + 11 * 200_000 * 4) / 1e6  # and the parameters themselves
    print(f"peak: {megabytes:.0f} MB")
    assert 20 < megabytes < 200  # under 20 the measurement would not be one: V and its gradient are 16
