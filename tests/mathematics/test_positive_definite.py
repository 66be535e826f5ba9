"""The log determinant by sweeps against torch's, and its gradient against finite differences."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pyro_dropout.mathematics.gaussian_rows import _swept, log_det
from tests.oracles.both_types import digits, dtypes

F64 = torch.float64


def matrix(size: int, seed: int, spread: float = 1.0, dtype: torch.dtype = F64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(2 * size, size, generator=generator, dtype=dtype) * spread
    return torch.eye(size, dtype=dtype) + a.mT @ a


@given(size=st.integers(1, 12), seed=st.integers(0, 10**6), spread=st.floats(0.0, 100.0), dtype=dtypes)
def test_sweeps_give_determinant_and_inverse(size: int, seed: int, spread: float, dtype: torch.dtype) -> None:
    g = matrix(size, seed, spread, dtype)
    exact, whole = torch.logdet(g.double()), g.double()
    value, inverse = _swept(g)
    # What a solver may lose: one rounding a column, as many times as the condition says.
    lost = size * torch.finfo(dtype).eps * torch.linalg.cond(whole).item()
    slack = digits(dtype, 1e-9, lost)
    torch.testing.assert_close(value.double(), exact, rtol=slack, atol=slack)
    torch.testing.assert_close(
        inverse.double() @ whole, torch.eye(size, dtype=F64), rtol=0, atol=digits(dtype, 1e-6, lost)
    )
    torch.testing.assert_close(log_det(g).double(), exact, rtol=slack, atol=slack)


@pytest.mark.parametrize("batch", [(), (3,), (2, 2)])
def test_the_gradient_is_the_inverse(batch: tuple[int, ...]) -> None:
    a = torch.randn(*batch, 8, 4, dtype=F64)
    g = (torch.eye(4, dtype=F64) + a.mT @ a).requires_grad_()
    assert torch.autograd.gradcheck(lambda m: log_det((m + m.mT) / 2), g)


def test_a_matrix_that_is_not_positive_definite_spoils_no_other() -> None:
    """torch raises an error for all of them, or leaves numbers that are half computed."""
    good = matrix(3, 0)
    several = torch.stack([good, torch.zeros(3, 3, dtype=F64), -good, torch.full((3, 3), torch.inf, dtype=F64)])
    found = log_det(several)
    torch.testing.assert_close(found[0], torch.logdet(good))
    assert found[1:3].isnan().all()
    assert not found[3].isfinite()
