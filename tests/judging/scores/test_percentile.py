"""Percentiles of uncertainties against scipy's fits and the paper's worked example."""

import torch

import pyro_dropout as pd


def test_the_paper_s_example(dtype: torch.dtype) -> None:
    """A standard deviation of 5: in the top percentile among 0.2 to 2, in the lowest among 10 to 15."""
    five = torch.tensor([[5.0]], dtype=dtype)
    calm = pd.judging.UncertaintyPercentile(torch.linspace(0.2, 2.0, 500, dtype=dtype)).percentile(five)
    noisy = pd.judging.UncertaintyPercentile(torch.linspace(10.0, 15.0, 500, dtype=dtype)).percentile(five)
    assert calm.shape == (1, 1)
    assert calm.dtype == dtype
    assert calm.item() > 99
    assert noisy.item() < 1


def test_rescaled_uncertainties_may_leave_the_unit_interval(dtype: torch.dtype) -> None:
    std = torch.tensor([[1.0, 2.0], [3.0, 0.5]], dtype=dtype)
    found = pd.judging.rescale(std, torch.tensor([2.0, 1.0, 1.5], dtype=dtype))
    assert found.dtype == dtype
    assert torch.equal(found, torch.tensor([[0.0, 1.0], [2.0, -0.5]], dtype=dtype))
