"""Coverage, PIT, the interval score and percentiles against formulas of scipy and the paper's worked example."""

import numpy as np
import pytest
import torch
from scipy import stats

import pyro_dropout as pd
from pyro_dropout.prediction import prediction as prediction_module
from tests.oracles.made_predictions import made

F64 = torch.float64


def test_pit_is_the_mean_of_normal_distribution_functions(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    f, y = torch.randn(7, 5, 4, dtype=dtype), torch.randn(5, 2, dtype=dtype)
    for likelihood, outputs in ((pd.HeteroscedasticGaussian(), f), (pd.Gaussian(4.0), f[..., :2])):
        loc = outputs[..., :2].double().numpy()
        scale = np.exp(-0.5 * f[..., 2:].double().numpy()) if outputs is f else 0.5
        exact = stats.norm.cdf(y.double().numpy(), loc, scale).mean(0)
        for piece in (2**22, 1):  # all points at once, and one by one
            monkeypatch.setattr(prediction_module, "_PIECE", piece)
            found = pd.judging.pit(made(outputs, likelihood), y)
            assert found.dtype == dtype
            np.testing.assert_allclose(found.double().numpy(), exact, atol=1e-6 if dtype == torch.float32 else 1e-12)


def test_coverage_counts_targets_inside_the_interval(dtype: torch.dtype) -> None:
    answer = made(torch.randn(9, 200, 2, dtype=dtype), pd.Gaussian(4.0))
    y = 2 * torch.randn(200, 2, dtype=dtype)
    levels = [0.1, 0.5, 0.8, 0.95]
    curve = pd.judging.coverage_curve(answer, y, levels)
    for k, level in enumerate(levels):
        low, high = answer.interval(level)
        inside = ((low <= y) & (y <= high)).double().mean().item()
        assert pd.coverage(answer, y, level) == pytest.approx(inside) == curve.coverage[k].item()
        assert curve.width[k].item() == pytest.approx((high - low).double().mean().item(), rel=1e-6)
    assert curve.count == 400
    assert curve.error == pytest.approx((curve.coverage - torch.tensor(levels, dtype=F64)).abs().mean().item())
    assert pd.judging.coverage_curve(answer, y, torch.tensor(levels)).coverage.tolist() == curve.coverage.tolist()


def test_the_interval_score_is_width_and_penalty(dtype: torch.dtype) -> None:
    low, high = torch.tensor([[0.0], [-1.0]], dtype=dtype), torch.tensor([[2.0], [3.0]], dtype=dtype)
    y = torch.tensor([[2.5], [-4.0]], dtype=dtype)
    expected = torch.tensor([[2 + 40 * 0.5], [4 + 40 * 3]], dtype=dtype)
    torch.testing.assert_close(pd.judging.interval_score(low, high, y), expected)


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
