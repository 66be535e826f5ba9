"""The standard error of a mean, beside scipy's and beside the spread of means."""

import pytest
import torch
from experiments.standard_error import standard_error
from scipy.stats import sem

import pyro_dropout as pd


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_it_is_scipy_s(dim: int, dtype: torch.dtype) -> None:
    values = torch.randn(7, 4, dtype=dtype)
    torch.testing.assert_close(standard_error(values, dim), torch.tensor(sem(values.numpy(), axis=dim), dtype=dtype))


def test_it_is_the_spread_of_means() -> None:
    values = torch.randn(20_000, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    spread = standard_error(values, 1).square().mean().sqrt()
    assert spread.item() == pytest.approx(values.mean(1).std().item(), rel=0.03)  # both are known to half a per cent


@pytest.mark.parametrize("values", [torch.tensor(1.0), torch.ones(1), torch.ones(1, 5)])
def test_one_value_has_none(values: torch.Tensor) -> None:
    with pytest.raises(pd.ShapeError, match="two numbers or more"):
        standard_error(values)
