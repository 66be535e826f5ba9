"""Noise and mixture weights from held-out points, against what they must be."""

import math

import pytest
import torch
from experiments.cross_validation import best_noise, log_mixture, noises, stacked
from hypothesis import given
from hypothesis import strategies as st

from tests.oracles.both_types import dtypes


@pytest.mark.deep
@given(st.floats(0.05, 20.0), st.integers(0, 100), dtypes)
def test_the_noise_found_is_that_of_the_residuals(spread: float, seed: int, dtype: torch.dtype) -> None:
    """With one draw the best precision is 1 over the mean square, which the parabola finds between grid points."""
    torch.manual_seed(seed)
    square = (spread * 0.3 * torch.randn(200, dtype=dtype)).square()
    tried = noises(True, torch.tensor([spread**2], dtype=dtype))
    scores = torch.stack([log_mixture(g, square.unsqueeze(0)).mean() for g in tried[0]]).view(1, 1, -1)
    found, height = best_noise(tried, scores)
    assert found.dtype == height.dtype == dtype
    best = -square.mean().log()
    assert found.item() == pytest.approx(best.item(), abs=5e-3)
    assert height.item() == pytest.approx(log_mixture(best, square.unsqueeze(0)).mean().item(), abs=1e-4)


def test_the_weights_are_where_the_slope_is_equal() -> None:
    """At the maximum Σ_n p_c(y_n)/p(y_n) is N for every member with weight, and less for those without."""
    torch.manual_seed(3)
    log_p = torch.randn(1, 3, 400).double()
    weights = stacked(log_p, most=3).double()
    mixture = torch.logsumexp(log_p + weights.log().unsqueeze(-1), 1, keepdim=True)
    slopes = (log_p - mixture).exp().mean(-1)[0]
    assert slopes[weights[0] > 0].tolist() == pytest.approx([1.0] * int((weights > 0).sum()), abs=1e-2)


def test_a_member_that_is_out_has_no_weight_and_few_may_have_one() -> None:
    torch.manual_seed(0)
    log_p = torch.randn(2, 5, 80)
    log_p[0, 1] = -math.inf
    weights = stacked(log_p, most=2)
    assert weights[0, 1] == 0
    assert (weights > 0).sum(1).tolist() == [2, 2]
