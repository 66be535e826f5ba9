"""Noise and temperature set right on a validation set, against scipy's search and closed forms."""

import numpy as np
import pytest
import torch
from scipy import optimize, special, stats

import pyro_dropout as pd
from tests.oracles.made_predictions import made, regression


def test_tau_is_the_most_probable_one(dtype: torch.dtype) -> None:
    f, y = torch.randn(12, 40, 2, dtype=dtype), torch.randn(40, 2, dtype=dtype)
    answer = made(f, pd.Gaussian(100.0))

    def loss(log_tau: float) -> float:
        each = stats.norm.logpdf(y.double().numpy(), f.double().numpy(), np.exp(-0.5 * log_tau)).sum(-1)
        return -float(special.logsumexp(each, axis=0).mean())

    grid = np.linspace(-6, 6, 241)
    start = grid[np.argmin([loss(t) for t in grid])]
    best = optimize.minimize_scalar(loss, bracket=(start - 0.1, start, start + 0.1), tol=1e-10)
    tau = pd.judging.refit_tau(answer, y)
    assert tau == pytest.approx(float(np.exp(best.x)), rel=1e-5)
    refit = pd.judging.with_tau(answer, tau)
    for other in (0.9 * tau, 1.1 * tau, 100.0):
        assert pd.judging.with_tau(answer, other).log_prob(y).mean() < refit.log_prob(y).mean()
    assert refit.log_prob(y).double().mean().item() == pytest.approx(-best.fun - np.log(12), abs=1e-5)


def test_another_tau_changes_the_noise_alone_and_nothing_that_was_given(dtype: torch.dtype) -> None:
    answer = regression(5, dtype=dtype)
    before = answer.variance.clone(), answer.samples.clone()
    found = pd.judging.with_tau(answer, 0.5)
    assert found.mean.dtype == dtype
    assert torch.equal(found.mean, answer.mean)
    assert torch.equal(found.epistemic, answer.epistemic)
    assert torch.allclose(found.aleatoric, torch.full_like(found.mean, 2.0))
    assert found.samples is answer.samples
    assert torch.equal(answer.variance, before[0])
    assert torch.equal(answer.samples, before[1])


@pytest.mark.filterwarnings("ignore:no temperature calibrates")  # the draws are noise
@pytest.mark.parametrize("scale", [0.01, 1.0, 300.0])
def test_the_temperature_is_the_most_probable_one(dtype: torch.dtype, scale: float) -> None:
    f, y = scale * torch.randn(5, 60, 3, dtype=dtype), torch.randint(3, (60,))
    y[:40] = f[:, :40].mean(0).argmax(-1)
    answer = made(f, pd.Categorical())

    def loss(log_temperature: float) -> float:
        logits = f.double().numpy() / np.exp(log_temperature)
        each = special.log_softmax(logits, -1)[:, np.arange(60), y.numpy()]
        return -float(special.logsumexp(each, axis=0).mean())

    grid = np.log(scale) + np.linspace(-4, 4, 161)
    start = grid[np.argmin([loss(t) for t in grid])]
    best = optimize.minimize_scalar(loss, bracket=(start - 0.1, start, start + 0.1), tol=1e-10)
    assert pd.judging.refit_temperature(answer, y) == pytest.approx(float(np.exp(best.x)), rel=1e-4)


def test_a_temperature_that_calibrates_nothing_is_told() -> None:
    # Logits 3 for the right class, with noise of 5 between draws: each draw is sure, and their mean is not.
    y = torch.arange(200) % 4
    f = 3 * torch.nn.functional.one_hot(y, 4) + 5 * torch.randn(400, 200, 4)
    with pytest.warns(UserWarning, match="no temperature calibrates this prediction.*narrow the posterior"):
        pd.judging.refit_temperature(made(f, pd.Categorical()), y)


def test_a_likelihood_that_rises_without_end_has_a_temperature_that_loses_nothing() -> None:
    # The draws agree, and are right by a little: the sharper the better, to no end.
    y = torch.arange(200) % 4
    answer = made(0.1 * torch.nn.functional.one_hot(y, 4).float().expand(50, -1, -1), pd.Categorical())
    with pytest.warns(UserWarning, match="sharper draws always help"):
        found = pd.judging.refit_temperature(answer, y)
    sharper, at, softer = (pd.judging.tempered(answer, found * k).log_prob(y).mean() for k in (0.1, 1.0, 1.3))
    assert -0.001 < at - sharper <= 0
    assert softer - sharper < -0.001


def test_draws_that_are_votes_are_told_of_earlier() -> None:
    # Nine draws in ten vote for the right class, but at nine points, where all are wrong by a little.
    y = torch.arange(900) % 3
    right = torch.nn.functional.one_hot(y, 3).float().expand(100, -1, -1).clone()
    right[:10] = right[:10].roll(1, -1)
    right[:, :9] = torch.tensor([1.0, 0.99, 0.0]).repeat(9, 1).gather(1, (y[:9, None] - torch.arange(3) + 1) % 3)
    with pytest.warns(UserWarning, match="no temperature calibrates this prediction"):
        pd.judging.refit_temperature(made(8 * right, pd.Categorical()), y)


def test_a_likelihood_that_is_flat_towards_zero_is_told() -> None:
    # At 188 points 19 draws of 20 are right by one, and at 12 one is. The best temperature makes of 0.95 the 0.94 of
    # the classes: 200 KL(0.94 ‖ 0.95) = 0.2 nats in all over draws that are votes.
    y = torch.arange(200) % 2
    right = torch.nn.functional.one_hot(y, 2).float()
    draws = right.expand(20, -1, -1).clone()
    draws[0, 12:], draws[1:, :12] = 1 - draws[0, 12:], 1 - draws[1:, :12]
    with pytest.warns(UserWarning, match=r"hardly say.* all temperatures below 0\.\d+ .* within 2 nats"):
        found = pd.judging.refit_temperature(made(draws, pd.Categorical()), y)
    assert pd.judging.tempered(made(draws, pd.Categorical()), found).probs[50, y[50]] == pytest.approx(0.94, abs=1e-4)
