"""Forecasts that go on from themselves: one function a draw, and the mixture that they make."""

import math

import pytest
import torch
from experiments.free_running import FreeRun, free_run
from scipy.stats import norm

import pyro_dropout as pd


def walker(keep: float) -> tuple[pd.BayesianNet, pd.AutoDropout]:
    """The next value is w times the last one; with dropout w is 0 or its mean over keep."""
    model = pd.BayesianNet(torch.nn.Linear(1, 1, bias=False))
    guide = pd.AutoDropout(model, keep=keep)
    with torch.no_grad():
        guide.states["weight"].loc.fill_(2.0)
    return model, guide


def test_a_draw_of_the_weights_holds_to_the_end() -> None:
    model, guide = walker(keep=0.5)
    torch.manual_seed(0)
    f = free_run(model, guide, torch.ones(1, 1), 4, tau=1e16, samples=400).f[:, 0]
    alive = f[:, 0] != 0
    torch.testing.assert_close(f[alive], torch.tensor([2.0, 4.0, 8.0, 16.0]).expand(int(alive.sum()), 4))
    assert f[~alive].abs().max() < 1e-6
    assert 140 < int(alive.sum()) < 260  # 400 coins: six standard deviations of 10


def test_noise_goes_on_into_the_next_step() -> None:
    """f₂ = 2 y₁ with y₁ ~ N(2, 1/τ): its standard deviation is 2/√τ."""
    model, guide = walker(keep=1.0)
    torch.manual_seed(0)
    f = free_run(model, guide, torch.ones(1, 1), 2, tau=4.0, samples=4000).f[:, 0]
    assert f[:, 0].unique().tolist() == [2.0]
    assert f[:, 1].mean().item() == pytest.approx(4.0, abs=0.08)  # five standard errors of 0.016
    assert f[:, 1].std().item() == pytest.approx(1.0, rel=0.06)


def test_the_mixture_is_that_of_scipy(dtype: torch.dtype) -> None:
    f, y = torch.tensor([[[0.0, 1.0]], [[2.0, -1.0]]], dtype=dtype), torch.tensor([[0.5, 0.3]], dtype=dtype)
    expected = [math.log(norm.pdf(b, f[:, 0, n], 0.5).mean()) for n, b in enumerate((0.5, 0.3))]
    assert FreeRun(f, 4.0).log_prob(y)[0].tolist() == pytest.approx(expected, rel=1e-5)


def test_what_cannot_be_run_is_refused() -> None:
    model, guide = walker(keep=0.5)
    wide = pd.BayesianNet(torch.nn.Linear(1, 2))
    with pytest.raises(pd.ShapeError, match="one next value for each window"):
        free_run(wide, pd.AutoDropout(wide), torch.ones(3, 1), 2, tau=1.0, samples=2)
    for change, message in (({"tau": 0.0}, "tau"), ({"samples": 0}, "samples"), ({"steps": 0}, "steps")):
        with pytest.raises(pd.PyroDropoutError, match=message):
            free_run(model, guide, torch.ones(3, 1), **({"steps": 2, "tau": 1.0, "samples": 2} | change))
    with pytest.raises(pd.ShapeError, match=r"y must have shape \(N, steps\) = \(1, 2\); got \(1, 3\)"):
        FreeRun(torch.zeros(5, 1, 2), 1.0).log_prob(torch.zeros(1, 3))
