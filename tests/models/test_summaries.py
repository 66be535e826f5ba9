"""What is said of scores, beside scipy, theory and sums by hand."""

import math

import numpy as np
import pytest
import torch
from experiments.summaries import few_draws, first_reach, gain, running_mean, standard_error, wins
from scipy.stats import sem


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_it_is_scipy_s(dim: int, dtype: torch.dtype) -> None:
    values = torch.randn(7, 4, dtype=dtype)
    torch.testing.assert_close(standard_error(values, dim), torch.tensor(sem(values.numpy(), axis=dim), dtype=dtype))


@pytest.mark.parametrize("count", [2, 10])
def test_normal_draws_err_as_theory_says(count: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    mean, std = few_draws(3 + 2 * torch.randn(4000, 300, generator=generator, dtype=dtype), count)
    # E[s]/σ of n draws is c4; E[(s/σ - 1)²] = 2(1 - c4)
    c4 = math.sqrt(2 / (count - 1)) * math.gamma(count / 2) / math.gamma((count - 1) / 2)
    assert mean == pytest.approx(math.sqrt(1 / count), rel=0.02)
    assert std == pytest.approx(math.sqrt(2 * (1 - c4)), rel=0.02)


def test_a_running_mean_uses_what_there_is() -> None:
    scores = np.array([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0])[:, None]
    assert running_mean(scores, 5)[:, 0].tolist() == pytest.approx([0, 0.5, 1, 1.5, 2, 3, 4])
    assert running_mean(scores, 1).tolist() == scores.tolist()
    assert running_mean(scores, 100)[-1, 0] == pytest.approx(3.0)


def test_an_arrival_is_the_first_and_may_never_come() -> None:
    scores = np.array([0.0, 1.0, 5.0, 3.0])[:, None]
    both = np.stack([scores, -scores], 1)  # (times, 2, 1)
    assert first_reach(both, 3.0).tolist() == [[3.0], [math.inf]]
    assert first_reach(both, 0.0).tolist() == [[1.0], [1.0]]


SCORES = {
    ("a", "base"): [1.0, 10.0, 100.0],
    ("a", "better"): [2.0, 11.0, 101.5],
    ("b", "base"): [0.0, 0.0, 0.0],
    ("b", "better"): [1.0, -1.0, 0.1],
    ("b", "worse"): [-1.0, -1.1, -0.9],
    ("c", "better"): [1.0, 2.0],
}


def test_splits_are_paired() -> None:
    more, error = gain(SCORES, "a", "better", "base")
    assert more == pytest.approx(3.5 / 3)
    assert error == pytest.approx(1 / 6)  # the splits themselves differ by a hundred times as much
    assert wins(SCORES, "better", "base") == ["a"]
    assert wins(SCORES, "worse", "base") == []


def test_one_split_proves_nothing() -> None:
    assert wins({("a", "base"): [0.0], ("a", "better"): [9.0]}, "better", "base") == []
