"""What a few draws are worth, beside what theory says of normal ones."""

import math

import pytest
import torch
from experiments.few_draws import few_draws

import pyro_dropout as pd


@pytest.mark.parametrize("count", [2, 10])
def test_normal_draws_err_as_theory_says(count: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    found = few_draws(3 + 2 * torch.randn(4000, 300, generator=generator, dtype=dtype), count)
    # E[s]/σ of n draws is c4; E[(s/σ - 1)²] = 2(1 - c4)
    c4 = math.sqrt(2 / (count - 1)) * math.gamma(count / 2) / math.gamma((count - 1) / 2)
    assert found.mean == pytest.approx(math.sqrt(1 / count), rel=0.02)
    assert found.std == pytest.approx(math.sqrt(2 * (1 - c4)), rel=0.02)


def test_groups_are_whole() -> None:
    f = torch.tensor([0.0, 2.0, 0.0, 2.0, 100.0])[:, None]  # the last draw fills no group of two
    found = few_draws(f, 2)
    assert found.mean == pytest.approx(abs(1 - f.mean().item()) / f.std().item())


def test_too_few_are_refused() -> None:
    with pytest.raises(pd.RangeError, match="count must be 2 or more"):
        few_draws(torch.randn(10, 3), 1)
    with pytest.raises(pd.ShapeError, match=r"T = 20 draws or more; got \(19, 3\)"):
        few_draws(torch.randn(19, 3), 10)
