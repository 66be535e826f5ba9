"""Row mixtures as torch distributions: draws fit the density, moments fit the draws, and the interface is whole."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from pyro_dropout.paper import BernoulliMixture, MultiplicativeNormal, RowMixture
from tests.oracles.both_types import digits, dtypes
from tests.oracles.mixtures import mixture_log_density

F64 = torch.float64
seeds = st.integers(0, 2**31)


def mixture(
    seed: int = 0,
    components: int = 3,
    rank: int = 0,
    shared: bool = False,
    shape: tuple[int, ...] = (2, 1),
    row_dim: int | None = 1,
    dtype: torch.dtype = F64,
) -> RowMixture:
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, dtype=F64, generator=generator).to(dtype)

    rows = math.prod(shape) if row_dim is None else shape[row_dim]
    each = 1 if shared else components
    return RowMixture(
        normal(components, *shape),
        0.2 + normal(each, *shape).abs(),
        torch.softmax(normal(rows, components), -1),
        row_dim,
        normal(each, rows, math.prod(shape) // rows, rank) if rank else None,
    )


# Every family with two weights in one row (or two rows of one weight), so that a plane holds the whole distribution.
PLANE: dict[str, Callable[[], RowMixture]] = {
    "one diagonal component": lambda: mixture(1, 1),
    "one low-rank component": lambda: mixture(2, 1, rank=1),
    "three separate components": lambda: mixture(3, 3),
    "two shared low-rank components": lambda: mixture(4, 2, rank=2, shared=True),
    "three separate low-rank components": lambda: mixture(5, 3, rank=1),
    "every weight a row": lambda: mixture(6, 2, row_dim=None),
    "dropout": lambda: BernoulliMixture(torch.tensor([[1.0], [-2.0]], dtype=F64), 0.7, 0.4),
    "dropout, width by component": lambda: BernoulliMixture(
        torch.tensor([[1.0], [-2.0]], dtype=F64), 0.7, torch.tensor([0.3, 0.9], dtype=F64).reshape(2, 1, 1)
    ),
    "multiplicative by row": lambda: MultiplicativeNormal(torch.tensor([[1.0], [-2.0]], dtype=F64), 0.5, 0.3),
    "multiplicative by weight": lambda: MultiplicativeNormal(
        torch.tensor([[1.0], [-2.0]], dtype=F64), 0.5, row_dim=None
    ),
}


@pytest.mark.parametrize("family", PLANE)
def test_draws_fit_the_density(family: str) -> None:
    """A chi-squared test of 100,000 draws against the density integrated over the cells of a grid.

    p > 1e-4: fails 1 correct run in 10,000 for each family.
    """
    q = PLANE[family]()
    draws = q.sample((100_000,)).reshape(-1, 2).numpy()
    inner = [np.quantile(draws[:, k], np.linspace(0.02, 0.98, 13)) for k in range(2)]
    nodes, weights = np.polynomial.legendre.leggauss(20)
    axes, areas = [], []
    for edges in inner:
        half = np.diff(edges)[:, None] / 2
        axes.append((edges[:-1, None] + half + half * nodes).ravel())
        areas.append((half * weights).ravel())
    grid = torch.as_tensor(np.stack(np.meshgrid(*axes, indexing="ij"), -1)).reshape(-1, 2, 1)
    density = q.log_prob(grid).exp().numpy().reshape(len(axes[0]), len(axes[1])) * np.outer(*areas)
    cells = density.reshape(12, 20, 12, 20).sum((1, 3)).ravel()
    expected = np.append(cells, 1 - cells.sum()) * len(draws)
    counts = np.histogram2d(*draws.T, bins=inner)[0].ravel()
    counts = np.append(counts, len(draws) - counts.sum())
    rare = expected < 10
    if rare.any():
        expected = np.append(expected[~rare], expected[rare].sum())
        counts = np.append(counts[~rare], counts[rare].sum())
    statistic = ((counts - expected) ** 2 / expected.clip(1e-9)).sum()
    assert stats.chi2.sf(statistic, len(counts) - 1) > 1e-4


@pytest.mark.parametrize("family", PLANE)
def test_moments_fit_the_draws(family: str) -> None:
    # 4 standard errors on 4 numbers: fails 3 correct runs in 10,000
    q = PLANE[family]()
    draws = q.sample((100_000,))
    error = (q.variance / len(draws)).sqrt()
    assert ((draws.mean(0) - q.mean).abs() <= 4 * error).all()
    squares = (draws - q.mean).square()
    assert ((squares.mean(0) - q.variance).abs() <= 4 * squares.std(0) / math.sqrt(len(draws))).all()


@given(seeds, st.integers(1, 3), st.integers(0, 2), st.booleans(), dtypes)
def test_log_prob_against_full_covariances(
    seed: int, components: int, rank: int, shared: bool, dtype: torch.dtype
) -> None:
    q = mixture(seed, components, rank, shared, shape=(3, 2), dtype=dtype)
    w = torch.randn(3, 2, dtype=dtype)
    expected = 0.0
    for row in range(2):
        means = [q.locs[k, :, row].double().numpy() for k in range(components)]
        covariances = []
        for k in range(components):
            c = 0 if shared else k
            cov = np.diag(q.scale[c, :, row].double().numpy() ** 2)
            if q.cov_factor is not None:
                cov = cov + q.cov_factor[c, row].double().numpy() @ q.cov_factor[c, row].double().numpy().T
            covariances.append(cov)
        expected += mixture_log_density(
            w[:, row].double().numpy(), means, covariances, list(q.probs[row].double().numpy())
        )
    assert q.log_prob(w).item() == pytest.approx(
        float(expected), rel=digits(dtype, 1e-9), abs=digits(dtype, 1e-9, 1e-3)
    )


def test_a_draw_at_a_tiny_scale_keeps_its_density() -> None:
    """In float32 m + σε == m, so a density of the rounded draw would miss ½ε² for every weight."""
    q = BernoulliMixture(torch.ones(50, 40), 0.9, 1e-20)
    w = q.rsample()
    lost = (q.log_prob(w.clone()) - q.log_prob(w)).item()
    assert lost == pytest.approx(0.5 * 2000 * 0.9, rel=0.2)  # the dropped tenth is drawn around 0, where nothing rounds
    assert q.expand((2,)).log_prob(w).shape == (2,)


@given(seeds, st.floats(0.05, 1.0), st.sampled_from([0, 1, 2, None]), dtypes)
def test_draws_at_scale_zero_are_masked_means(seed: int, keep: float, row_dim: int | None, dtype: torch.dtype) -> None:
    torch.manual_seed(seed)
    loc = torch.randn(2, 3, 4, dtype=dtype)
    q = BernoulliMixture(loc, keep, row_dim=row_dim)
    z = q.to_rows(q.sample((7,)) / loc)
    assert ((z == 0) | (z == 1)).all()
    assert (z == z[..., :1]).all()  # one label for all weights of a row


@given(seeds, st.integers(1, 3), st.integers(0, 2), dtypes)
def test_shapes_follow_torchs_rules(seed: int, components: int, rank: int, dtype: torch.dtype) -> None:
    q = mixture(seed, components, rank, shape=(3, 2), dtype=dtype)
    big = q.expand((4, 5))
    assert (q.batch_shape, q.event_shape, big.batch_shape, big.event_shape) == ((), (3, 2), (4, 5), (3, 2))
    w = big.rsample((6,))
    assert w.shape == (6, 4, 5, 3, 2)
    assert big.log_prob(w).shape == (6, 4, 5)
    assert big.log_prob(torch.zeros(3, 2, dtype=dtype)).shape == (4, 5)
    assert big.mean.shape == big.variance.shape == big.stddev.shape == (4, 5, 3, 2)
    assert big.support.check(w).all()
    torch.testing.assert_close(q.log_prob(w), big.log_prob(w), rtol=digits(dtype, 1e-7), atol=digits(dtype, 1e-7, 1e-3))
