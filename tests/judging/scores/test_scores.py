"""Calibration, ranked probability and Brier's score, of numbers and of classes: against loops, integrals and scipy."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats

import pyro_dropout as pd
from pyro_dropout.prediction import prediction as prediction_module
from tests.oracles.both_types import digits, dtypes
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


def written_out(sure: list[float], right: list[bool], bins: int) -> tuple[list[int], float]:
    """The table and the error, one point and one bin at a time."""
    count, total = [], 0.0
    for k in range(bins):
        own = [i for i, c in enumerate(sure) if k / bins < c <= (k + 1) / bins]
        count.append(len(own))
        if own:
            accuracy, confidence = sum(right[i] for i in own) / len(own), sum(sure[i] for i in own) / len(own)
            total += len(own) / len(sure) * abs(accuracy - confidence)
    return count, total


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    points=st.integers(1, 40),
    classes=st.integers(2, 5),
    bins=st.integers(1, 20),
    dtype=dtypes,
)
def test_the_table_is_what_a_loop_finds(seed: int, points: int, classes: int, bins: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    answer = made(2 * torch.randn(3, points, classes, dtype=dtype, generator=generator), pd.Categorical())
    y = torch.randint(classes, (points,), generator=generator)
    probs = answer.probs.tolist()
    right = [max(range(classes), key=p.__getitem__) == label for p, label in zip(probs, y.tolist(), strict=True)]
    count, error = written_out([max(p) for p in probs], right, bins)
    table = pd.judging.reliability(answer, y, bins)
    assert table.count.tolist() == count
    assert table.ece == pytest.approx(error, abs=digits(dtype, 1e-12, 1e-6)) == pd.ece(answer, y, bins)
    assert torch.equal(table.accuracy.isnan(), table.count == 0)
    brier = [
        sum((p - (c == label)) ** 2 for c, p in enumerate(ps)) for ps, label in zip(probs, y.tolist(), strict=True)
    ]
    assert pd.judging.brier(answer, y).tolist() == pytest.approx(brier)


def by_integral(loc: np.ndarray, scale: np.ndarray, y: float) -> float:
    """∫ (F(z) - 1[y ≤ z])² dz of a mixture, cut at y and wherever F bends."""
    ends = sorted({y, *(loc - 12 * scale), *(loc + 12 * scale), *loc})

    def square(z: float) -> float:
        return float((stats.norm.cdf(z, loc, scale).mean() - (y <= z)) ** 2)

    return math.fsum(
        integrate.quad(square, a, b, epsabs=1e-12, epsrel=1e-10, limit=200)[0] for a, b in itertools.pairwise(ends)
    )


@pytest.mark.parametrize("draws", [3, 60])
@pytest.mark.parametrize("tau", [0.5, 900.0])
@pytest.mark.thinned(2)
def test_the_mixture_s_score_is_the_integral(dtype: torch.dtype, draws: int, tau: float) -> None:
    """Few draws go by pairs and many by the grid, in wide noise at least; a score is exact by either."""
    f, y = torch.randn(draws, 3, 1, dtype=dtype), torch.tensor([[0.1], [-2.5], [8.0]], dtype=dtype)
    found = pd.crps(made(f, pd.Gaussian(tau)), y)
    assert found.dtype == dtype
    assert found.shape == (3, 1)
    for n in range(3):
        exact = by_integral(f[:, n, 0].double().numpy(), np.full(draws, tau**-0.5), y[n].item())
        assert found[n].item() == pytest.approx(exact, rel=1e-6 if dtype == torch.float32 else 1e-9)


def test_the_estimate_is_the_formula_of_its_draws(dtype: torch.dtype) -> None:
    f, y = torch.randn(8, 4, 2, dtype=dtype).exp() + 2, torch.full((4, 2), 3.0, dtype=dtype)
    answer, state = made(f.log(), pd.Poisson()), torch.get_rng_state()
    found = pd.crps(answer, y, "sample", seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(found, pd.crps(answer, y, "sample", seed=3))
    with torch.random.fork_rng([]):
        torch.manual_seed(3)
        drawn = torch.distributions.Poisson(answer.samples.exp()).sample().double()
    pairs = (drawn.unsqueeze(1) - drawn).abs().sum((0, 1)) / (8 * 7)
    exact = (drawn - y).abs().mean(0) - pairs / 2
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-6)
