"""The KL and its gap, against quadrature, plain Monte Carlo in numpy, and torch's own Gaussians."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pyro.distributions import Normal as PyroNormal
from torch.distributions import (
    Independent,
    LowRankMultivariateNormal,
    MultivariateNormal,
    Normal,
    kl_divergence,
)

from pyro_dropout.paper import BernoulliMixture, MultiplicativeNormal, RowMixture, kl, kl_gap
from tests.oracles.both_types import digits, dtypes
from tests.oracles.mixtures import kl_two_components

F64 = torch.float64
seeds = st.integers(0, 2**31)


def gaussian(length_scale: float, dtype: torch.dtype = F64) -> Normal:
    """N(0, l⁻²) in float64: a Python number would be rounded to float32 on the way in."""
    return Normal(torch.zeros((), dtype=dtype), torch.tensor(1 / length_scale, dtype=dtype))


def one_row(keep: float, d: float, rest: int, sigma: float, seed: int = 0) -> BernoulliMixture:
    direction = torch.randn(rest, 1, dtype=F64, generator=torch.Generator().manual_seed(seed))
    return BernoulliMixture(direction / direction.norm() * d * sigma, keep, sigma)


def settings(count: int, seed: int) -> list[tuple[float, float, int, float, float]]:
    """Random (keep, d, K, σ, l): d up to 40, keep down to 1e-4 of either end."""
    rng = np.random.default_rng(seed)
    logits = rng.uniform(-9, 9, count)
    return [
        (1 / (1 + math.exp(-a)), float(d), int(k), float(s), float(length))
        for a, d, k, s, length in zip(
            logits,
            rng.uniform(0, 40, count) ** rng.choice([1.0, 0.6, 0.2], count),
            rng.integers(1, 200, count),
            10 ** rng.uniform(-3, 1, count),
            10 ** rng.uniform(-2, 2, count),
            strict=True,
        )
    ]


@pytest.mark.parametrize("count", [20, pytest.param(1000, marks=pytest.mark.deep)])
def test_exact_kl_against_adaptive_quadrature(count: int) -> None:
    worst = 0.0
    for keep, d, rest, sigma, length_scale in settings(count, seed=1):
        q = one_row(keep, d, rest, sigma)
        # the part in l² grows like (l·d·σ)²; what the quadrature must resolve is the mixture, so l·σ·d stays moderate
        length_scale = min(length_scale, 10 / (sigma * max(d, 1)))
        found = kl(q, gaussian(length_scale), "exact").item()
        worst = max(worst, abs(found - kl_two_components(keep, d, rest, sigma, length_scale)))
    print(f"largest error over {count:,} settings: {worst:.2e}")
    assert worst <= 1e-9


@pytest.mark.deep
@pytest.mark.parametrize(("keep", "sigma"), [(0.7, 0.5), (0.95, 0.2)])
def test_exact_kl_of_dropout_against_a_million_draws(keep: float, sigma: float) -> None:
    # 4 standard errors: fails 6 runs in 100,000. numpy draws the rows and weighs them; nothing of the package does.
    rng, length_scale = np.random.default_rng(7), 1.5
    m = rng.normal(size=(3, 2)) * 0.8  # three rows of two weights
    w = (rng.random((1_000_000, 3, 1)) < keep) * m + sigma * rng.standard_normal((1_000_000, 3, 2))
    kept, dropped = (-0.5 * ((w - at) ** 2).sum(-1) / sigma**2 for at in (m, 0.0))
    log_q = np.logaddexp(math.log(keep) + kept, math.log1p(-keep) + dropped) - 2 * math.log(sigma)
    each = (log_q + 0.5 * length_scale**2 * (w**2).sum(-1) - 2 * math.log(length_scale)).sum(-1)
    found = kl(BernoulliMixture(torch.tensor(m.T), keep, sigma), gaussian(length_scale), "exact").item()
    assert abs(found - each.mean()) <= 4 * each.std() / 1000


@given(seeds, st.floats(0.01, 0.999), st.floats(1e-3, 10), st.floats(0.1, 10), dtypes)
def test_large_k_plus_gap_is_exact(
    seed: int, keep: float, scale: float, length_scale: float, dtype: torch.dtype
) -> None:
    torch.manual_seed(seed)
    q = BernoulliMixture(torch.randn(3, 4, dtype=dtype), keep, scale)
    prior = gaussian(length_scale, dtype)
    exact, large_k, gap = kl(q, prior, "exact"), kl(q, prior), kl_gap(q)
    assert (exact - large_k - gap).abs().item() <= digits(dtype, 1e-12) * max(1, exact.abs().item())
    entropy = -4 * (keep * math.log(keep) + (1 - keep) * math.log1p(-keep))
    assert -1e-14 <= gap.item() <= entropy * (1 + digits(dtype, 1e-12))


def test_large_k_form_can_be_negative_where_the_exact_kl_cannot() -> None:
    q = BernoulliMixture(torch.zeros(4, 3, dtype=F64), 0.5, 1.0)  # q is the prior
    assert kl(q, Normal(0.0, 1.0)).item() == pytest.approx(-3 * math.log(2))
    assert kl(q, Normal(0.0, 1.0), "exact").item() == pytest.approx(0, abs=1e-12)


@given(seeds, st.integers(0, 3), st.sampled_from(["large_k", "exact"]), dtypes)
def test_one_component_is_torchs_gaussian(seed: int, rank: int, method: str, dtype: torch.dtype) -> None:
    """L=1, diagonal or low-rank, against torch's KL of (LowRank)MultivariateNormal, row by row."""
    torch.manual_seed(seed)
    rows, rest = 3, 5
    loc, scale = torch.randn(rest, rows, dtype=dtype), torch.rand(rest, rows, dtype=dtype) + 0.05
    factor = torch.randn(1, rows, rest, rank, dtype=dtype) if rank else None
    prior = Normal(torch.zeros((), dtype=dtype), torch.rand(rest, rows, dtype=dtype) + 0.2)
    q = RowMixture(loc.unsqueeze(0), scale, torch.ones(1, dtype=dtype), cov_factor=factor)
    expected = torch.zeros((), dtype=dtype)
    for row in range(rows):
        base = MultivariateNormal(torch.zeros(rest, dtype=dtype), torch.diag(prior.scale[:, row] ** 2))
        if factor is None:
            mine = MultivariateNormal(loc[:, row], torch.diag(scale[:, row] ** 2))
        else:
            low = LowRankMultivariateNormal(loc[:, row], factor[0, row], scale[:, row] ** 2)
            mine = MultivariateNormal(low.loc, low.covariance_matrix)
        expected = expected + kl_divergence(mine, base)
    assert abs(kl(q, prior, method).item() - expected.item()) <= digits(dtype, 1e-9) * max(1, expected.item())
    assert kl_gap(q).item() == 0


@given(seeds, dtypes)
def test_multiplicative_noise_is_torchs_gaussian(seed: int, dtype: torch.dtype) -> None:
    torch.manual_seed(seed)
    loc, alpha = torch.randn(4, 1, dtype=dtype), torch.rand((), dtype=dtype) + 0.1
    per_weight = kl(MultiplicativeNormal(loc, alpha, 0.1, row_dim=None), Normal(0.0, 1.0))
    spread = (alpha * loc**2 + 0.01).sqrt()
    torch.testing.assert_close(per_weight, kl_divergence(Normal(loc, spread), Normal(0.0, 1.0)).sum())
    full = MultivariateNormal(loc[:, 0], alpha * loc @ loc.T + 0.01 * torch.eye(4, dtype=dtype))
    base = MultivariateNormal(torch.zeros(4, dtype=dtype), torch.eye(4, dtype=dtype))
    torch.testing.assert_close(kl(MultiplicativeNormal(loc, alpha, 0.1), Normal(0.0, 1.0)), kl_divergence(full, base))


@pytest.mark.parametrize("rank", [0, 2])
def test_gradients_of_the_exact_kl(rank: int) -> None:
    torch.manual_seed(0)
    loc = torch.randn(3, 2, dtype=F64, requires_grad=True)
    scale = (torch.rand(3, 2, dtype=F64) + 0.3).requires_grad_()
    keep = torch.tensor([0.5, 0.8], dtype=F64, requires_grad=True)
    factor = torch.randn(1, 2, 3, rank, dtype=F64, requires_grad=True) if rank else None

    def function(loc: torch.Tensor, scale: torch.Tensor, keep: torch.Tensor, *factors: torch.Tensor) -> torch.Tensor:
        locs, probs = torch.stack([loc, torch.zeros_like(loc)]), torch.stack([keep, 1 - keep], -1)
        q = RowMixture(locs, scale, probs, cov_factor=factors[0] if factors else None, validate_args=False)
        return kl(q, Normal(0.0, 1.5), "exact")

    assert torch.autograd.gradcheck(function, (loc, scale, keep) if factor is None else (loc, scale, keep, factor))


@pytest.mark.parametrize(
    ("components", "rank", "shared"),
    [
        pytest.param(*case, marks=[] if case == (2, 0, True) else pytest.mark.deep)
        for case in itertools.product((2, 3), (0, 2), (True, False))
    ],
)
def test_every_method_agrees_for_general_mixtures(components: int, rank: int, shared: bool) -> None:
    # 5 standard errors of the noisier estimate: fails 6 runs in 10 million
    torch.manual_seed(components * 10 + rank)
    rows, rest, each = 2, 3, 1 if shared else components
    q = RowMixture(
        torch.randn(components, rest, rows, dtype=F64),
        torch.rand(each, rest, rows, dtype=F64) + 0.2,
        torch.softmax(torch.randn(rows, components, dtype=F64), -1),
        cov_factor=torch.randn(each, rows, rest, rank, dtype=F64) if rank else None,
    )
    prior = Normal(0.0, 1.3)
    exact = kl(q, prior, "exact", num_samples=200_000)
    w = q.sample((400_000,))
    each_draw = q.log_prob(w) - prior.log_prob(w).sum((-2, -1))
    error = each_draw.std() / math.sqrt(len(w))
    assert (exact - each_draw.mean()).abs() <= 5 * error
    assert (kl(q, prior, "monte_carlo", num_samples=400_000) - exact).abs() <= 7 * error


@pytest.mark.deep
def test_gradient_of_the_sampled_gap_is_unbiased() -> None:
    # 4 standard errors on 3 numbers: fails 2 runs in 10,000
    torch.manual_seed(6)
    loc, scale = torch.randn(3, 1, dtype=F64), torch.full((3, 1), 0.8, dtype=F64)
    leaves = [t.requires_grad_() for t in (loc, scale, torch.tensor(0.6, dtype=F64))]
    exact = torch.autograd.grad(kl_gap(BernoulliMixture(leaves[0], leaves[2], leaves[1])), leaves)
    draws = []
    for _ in range(800):
        spread = leaves[1].expand(2, 3, 1).clone()
        q = BernoulliMixture(leaves[0], leaves[2], spread)
        draws.append(torch.autograd.grad(kl_gap(q, num_samples=4), leaves))
    for want, got in zip(exact, zip(*draws, strict=True), strict=True):
        got = torch.stack(got)
        assert ((got.mean(0) - want).abs() <= 4 * got.std(0) / math.sqrt(len(got)) + 1e-12).all()


def test_torchs_own_door_gives_the_large_k_value() -> None:
    q = BernoulliMixture(torch.randn(3, 4), 0.8, 0.1)
    for prior in (
        Normal(0.0, 1.0),
        Normal(torch.zeros(3, 4), 1.0),
        Independent(Normal(torch.zeros(3, 4), 1.0), 2),
        PyroNormal(0.0, 1.0).expand([3, 4]).to_event(2),
    ):
        torch.testing.assert_close(kl_divergence(q, prior), kl(q, prior, "large_k"))


def test_batches_of_q_and_of_p_broadcast() -> None:
    q = BernoulliMixture(torch.randn(3, 4, dtype=F64), 0.8, 0.1)
    one = kl(q, Normal(0.0, 1.0), "exact")
    assert kl(q.expand((5,)), Normal(0.0, 1.0), "exact").shape == (5,)
    scales = torch.tensor([1.0, 2.0], dtype=F64).reshape(2, 1, 1).expand(2, 3, 4)
    many = kl(q, Independent(Normal(torch.zeros(2, 3, 4, dtype=F64), scales), 2), "exact")
    torch.testing.assert_close(many, torch.stack([one, kl(q, Normal(0.0, 2.0), "exact")]))
    rough = kl(q, Independent(Normal(torch.zeros(2, 3, 4, dtype=F64), scales), 2), "monte_carlo", num_samples=20_000)
    torch.testing.assert_close(rough, many, rtol=0.05, atol=0.0)


# --- scale = 0 --------------------------------------------------------------------------------------------------------


@given(seeds, st.floats(0.05, 1.0), st.floats(0.1, 10), dtypes)
def test_at_scale_zero_only_the_terms_in_sigma_are_dropped(
    seed: int, keep: float, length_scale: float, dtype: torch.dtype
) -> None:
    torch.manual_seed(seed)
    loc = torch.randn(3, 4, dtype=dtype)
    prior = gaussian(length_scale, dtype)
    slack = digits(dtype, 1e-9)  # in float32 of the terms in sigma, which are near 200
    sigma = 1e-6
    dropped = 12 * 0.5 * ((length_scale * sigma) ** 2 - 2 * math.log(length_scale * sigma) - 1)
    expected = kl(BernoulliMixture(loc, keep, sigma), prior).item() - dropped
    assert kl(BernoulliMixture(loc, keep), prior).item() == pytest.approx(expected, rel=slack, abs=slack)
    by_hand = keep / 2 * length_scale**2 * (loc.double() ** 2).sum().item()
    by_hand += 4 * (keep * math.log(keep) + ((1 - keep) * math.log1p(-keep) if keep < 1 else 0))
    assert kl(BernoulliMixture(loc, keep), prior, "exact").item() == pytest.approx(by_hand, rel=slack, abs=slack)


def test_at_scale_zero_a_learned_length_scale_keeps_its_normaliser() -> None:
    loc = torch.randn(3, 4, dtype=F64)
    scale = torch.tensor(0.7, dtype=F64, requires_grad=True)
    (limit,) = torch.autograd.grad(kl(BernoulliMixture(loc, 0.8), Normal(torch.zeros((), dtype=F64), scale)), scale)
    (near,) = torch.autograd.grad(
        kl(BernoulliMixture(loc, 0.8, 1e-7), Normal(torch.zeros((), dtype=F64), scale)), scale
    )
    torch.testing.assert_close(limit, near)


def test_at_scale_zero_multiplicative_noise_keeps_what_its_mean_moves() -> None:
    loc = torch.randn(3, 1, dtype=F64, requires_grad=True)
    prior = Normal(0.0, 1.0)
    (limit,) = torch.autograd.grad(kl(MultiplicativeNormal(loc, 0.3), prior), loc)
    (near,) = torch.autograd.grad(kl(MultiplicativeNormal(loc, 0.3, 1e-6), prior), loc)
    torch.testing.assert_close(limit, near, rtol=1e-8, atol=1e-8)


def test_at_scale_zero_a_row_of_zeros_keeps_its_label_secret() -> None:
    loc = torch.ones(3, 2, dtype=F64)
    loc[:, 1] = 0
    assert kl_gap(BernoulliMixture(loc, 0.5)).item() == pytest.approx(math.log(2))


def test_other_posteriors_go_to_torch() -> None:
    assert kl(Normal(0.5, 1.0), Normal(0.0, 1.0)).item() == pytest.approx(0.125)
