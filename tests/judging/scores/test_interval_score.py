"""The interval score against its definition, and where it is least."""

import pytest
import torch
from scipy import stats

import pyro_dropout as pd


def test_it_is_width_and_penalty(dtype: torch.dtype) -> None:
    low, high = torch.tensor([[0.0], [-1.0]], dtype=dtype), torch.tensor([[2.0], [3.0]], dtype=dtype)
    y = torch.tensor([[2.5], [-4.0]], dtype=dtype)
    expected = torch.tensor([[2 + 40 * 0.5], [4 + 40 * 3]], dtype=dtype)
    torch.testing.assert_close(pd.judging.interval_score(low, high, y), expected)


def test_true_quantiles_have_the_least_score() -> None:
    y = torch.randn(200_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def score(factor: float) -> float:
        end = torch.full_like(y, factor * stats.norm.ppf(0.975))
        return pd.judging.interval_score(-end, end, y).mean().item()

    assert score(1.0) < min(score(0.9), score(1.1))
    # E = 2z + (2/α)·2(φ(z) - (1 - Φ(z)) z), by hand
    z = stats.norm.ppf(0.975)
    assert score(1.0) == pytest.approx(2 * z + 80 * (stats.norm.pdf(z) - 0.025 * z), rel=0.01)  # 0.2 % standard error
