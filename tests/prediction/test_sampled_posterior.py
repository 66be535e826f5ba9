"""Draws that are kept: each once, in an order that a seed repeats; chains that agree and chains that do not."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import nn

import pyro_dropout as pd
from tests.oracles.both_types import dtypes


def posterior(
    chains: int = 3, draws: int = 10, dtype: torch.dtype = torch.float32, **options: Any
) -> pd.prediction.SampledPosterior:
    number = torch.arange(chains * draws, dtype=dtype).reshape(chains, draws)
    return pd.prediction.SampledPosterior({"weight": number[..., None, None], "bias": number[..., None]}, **options)


@given(st.integers(1, 4), st.integers(1, 9), st.integers(1, 60), dtypes)
def test_no_draw_comes_twice_before_all_came_once(chains: int, draws: int, n: int, dtype: torch.dtype) -> None:
    total = chains * draws
    found = posterior(chains, draws, dtype).sample_weights(n)
    assert found["weight"].dtype == found["bias"].dtype == dtype
    assert torch.equal(found["weight"].flatten(), found["bias"].flatten())  # one draw has all sites
    counts = found["bias"].flatten().long().bincount(minlength=total)
    assert counts.sum() == n
    assert counts.max() - counts.min() <= 1


@pytest.mark.thinned(2)
def test_predict_takes_each_draw_once_whatever_the_blocks(dtype: torch.dtype) -> None:
    model = pd.BayesianNet(nn.Linear(1, 1).to(dtype), likelihood=pd.Gaussian(tau=4.0))
    weights = {"weight": torch.randn(4, 50, 1, 1, dtype=dtype), "bias": torch.randn(4, 50, 1, dtype=dtype)}
    drawn = pd.prediction.SampledPosterior(weights)
    x = torch.randn(7, 1, dtype=dtype)
    f = (x.T * weights["weight"].reshape(200, 1) + weights["bias"].reshape(200, 1)).double()
    for chunk in (None, 7, 20, 100):
        for shared in (False, True):
            answer = pd.predict(model, drawn, x, samples=200, chunk=chunk, shared=shared)
            assert torch.allclose(answer.mean[:, 0].double(), f.mean(0), atol=1e-5)
            assert torch.allclose(answer.epistemic[:, 0].double(), f.var(0, correction=0), atol=1e-5)
            assert torch.allclose(answer.samples[..., 0].double().sort(0).values, f.sort(0).values, atol=1e-5)


def rank_rhat(values: Any) -> float:
    """R-hat of Vehtari et al. (2021), written out: the larger of bulk and folded."""

    def split_rhat(v: Any) -> float:
        half = v.shape[1] // 2
        v = np.concatenate([v[:, :half], v[:, -half:]])
        scores = stats.norm.ppf((stats.rankdata(v).reshape(v.shape) - 0.375) / (v.size + 0.25))
        between, within = half * scores.mean(1).var(ddof=1), scores.var(1, ddof=1).mean()
        return math.sqrt(((half - 1) / half * within + between / half) / within)

    return max(split_rhat(values), split_rhat(np.abs(values - np.median(values))))


def test_rhat_is_that_of_the_paper() -> None:
    drawn = posterior(4, 100)
    values = torch.randn(4, 100, 2, 3, dtype=torch.float64)
    values[0, :, 1, 2] += 2.0  # one chain is elsewhere
    values[1, :, 0, 0] *= 5.0  # one is wider, which only folded ranks see
    found = drawn.rhat_of(values)
    exact = [[rank_rhat(values[..., i, j].numpy()) for j in range(3)] for i in range(2)]
    np.testing.assert_allclose(found, exact, rtol=1e-9)
    assert found[1, 2] > 1.1
    assert found[0, 0] > 1.1
    assert drawn.rhat_of(values[..., 0, 1]).shape == ()
    assert drawn.rhat_of(torch.ones(4, 100)) == 1.0
