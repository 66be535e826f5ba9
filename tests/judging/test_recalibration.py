"""Noise and temperature set right on a validation set, against scipy's search and closed forms."""

import numpy as np
import pytest
import torch
from scipy import optimize, special, stats

import pyro_dropout as pd
from tests.oracles.made_predictions import drawn_targets, made, regression

F64 = torch.float64


def test_tau_is_the_most_probable_one(dtype: torch.dtype) -> None:
    f, y = torch.randn(12, 40, 2, dtype=dtype), torch.randn(40, 2, dtype=dtype)
    answer = made(f, pd.Gaussian(100.0))

    def loss(log_tau: float) -> float:
        each = stats.norm.logpdf(y.double().numpy(), f.double().numpy(), np.exp(-0.5 * log_tau)).sum(-1)
        return -float(special.logsumexp(each, axis=0).mean())

    grid = np.linspace(-6, 6, 241)
    start = grid[np.argmin([loss(t) for t in grid])]
    best = optimize.minimize_scalar(loss, bracket=(start - 0.1, start, start + 0.1), tol=1e-10)
    tau = pd.refit_tau(answer, y)
    assert tau == pytest.approx(float(np.exp(best.x)), rel=1e-5)
    refit = pd.with_tau(answer, tau)
    for other in (0.9 * tau, 1.1 * tau, 100.0):
        assert pd.with_tau(answer, other).log_prob(y).mean() < refit.log_prob(y).mean()
    assert refit.log_prob(y).double().mean().item() == pytest.approx(-best.fun - np.log(12), abs=1e-5)


def test_one_draw_has_the_mean_square_as_its_noise(dtype: torch.dtype) -> None:
    f, y = torch.randn(1, 30, 3, dtype=dtype), torch.randn(30, 3, dtype=dtype)
    exact = 1 / (f[0].double() - y.double()).square().mean().item()
    assert pd.refit_tau(made(f, pd.Gaussian()), y) == pytest.approx(exact, rel=1e-6)


def test_the_true_noise_is_found() -> None:
    """2,000 targets tell τ to 5.7 %, as 60 repetitions showed; 33 % is 5.8 of that: fails below 1e-7."""
    answer = regression(2000)
    y = drawn_targets(answer)
    tau = pd.refit_tau(pd.with_tau(answer, 50.0), y)
    assert tau == pytest.approx(4.0, rel=0.33)
    assert pd.ece(pd.with_tau(answer, 50.0), y) > pd.ece(pd.with_tau(answer, tau), y)


def test_another_tau_changes_the_noise_alone_and_nothing_that_was_given(dtype: torch.dtype) -> None:
    answer = regression(5, dtype=dtype)
    before = answer.variance.clone(), answer.samples.clone()
    found = pd.with_tau(answer, 0.5)
    assert found.mean.dtype == dtype
    assert torch.equal(found.mean, answer.mean)
    assert torch.equal(found.epistemic, answer.epistemic)
    assert torch.allclose(found.aleatoric, torch.full_like(found.mean, 2.0))
    assert found.samples is answer.samples
    assert torch.equal(answer.variance, before[0])
    assert torch.equal(answer.samples, before[1])


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
    assert pd.refit_temperature(answer, y) == pytest.approx(float(np.exp(best.x)), rel=1e-4)


def test_the_true_temperature_is_found() -> None:
    """5,000 classes tell the temperature to 1.8 %, as 60 repetitions showed; 15 % is 8 of that: fails below 1e-12.

    The calibration error of the true probabilities was 0.016 with standard deviation 0.003: 0.04 is 7 of that away.
    """
    logits = 2 * torch.randn(1, 5000, 4, dtype=F64)
    y = torch.distributions.Categorical(logits=logits[0]).sample()
    bold = made(3 * logits, pd.Categorical())
    temperature = pd.refit_temperature(bold, y)
    assert temperature == pytest.approx(3.0, rel=0.15)
    assert pd.ece(pd.tempered(bold, temperature), y) < 0.04 < pd.ece(bold, y)
    coins = made(3 * logits[..., :2], pd.Bernoulli())
    came = torch.distributions.Bernoulli(logits=logits[0, :, :2]).sample()
    assert pd.refit_temperature(coins, came) == pytest.approx(3.0, rel=0.15)


def test_tempered_probabilities_are_means_of_softmaxes(dtype: torch.dtype) -> None:
    f = torch.randn(4, 6, 3, dtype=dtype)
    answer = made(f, pd.Categorical())
    before = answer.probs.clone()
    found = pd.tempered(answer, temperature=2.5)
    torch.testing.assert_close(found.probs, (f / 2.5).softmax(-1).mean(0))
    votes = torch.stack([(f.argmax(-1) == c).sum(0) for c in range(3)]).amax(0)
    torch.testing.assert_close(found.variation_ratio, 1 - votes.to(dtype) / 4)
    assert torch.equal(answer.probs, before)
    assert torch.equal(answer.samples, f)
    assert torch.equal(pd.tempered(answer, 1.0).probs, answer.probs)


@pytest.mark.usefixtures("unchecked_shapes")
def test_bad_input() -> None:
    numbers, classes = regression(3), made(torch.randn(2, 3, 2), pd.Categorical())
    y = torch.zeros(3, dtype=torch.long)
    with pytest.raises(
        pd.PyroDropoutError, match=r"refit_tau is for the likelihood Gaussian\(tau\).*refit_temperature"
    ):
        pd.refit_tau(classes, y)
    with pytest.raises(pd.PyroDropoutError, match="of HeteroscedasticGaussian"):
        pd.with_tau(made(torch.zeros(2, 3, 2), pd.HeteroscedasticGaussian()), 1.0)
    with pytest.raises(pd.RangeError, match="tau must be positive"):
        pd.with_tau(numbers, 0.0)
    with pytest.raises(pd.PyroDropoutError, match="met exactly"):
        pd.refit_tau(numbers, numbers.samples[0])
    for tempering in (lambda p: pd.refit_temperature(p, torch.zeros(3, 1)), lambda p: pd.tempered(p, 2.0)):
        with pytest.raises(pd.PyroDropoutError, match="is for classes"):
            tempering(numbers)
    with pytest.raises(pd.RangeError, match="temperature must be positive"):
        pd.tempered(classes, -1.0)
    sure = made(torch.tensor([[[5.0, 0.0]] * 3] * 2), pd.Categorical())
    with pytest.raises(pd.PyroDropoutError, match="Sharper draws only help"):
        pd.refit_temperature(sure, y)
    with pytest.raises(pd.PyroDropoutError, match="or the opposite"):
        pd.refit_temperature(sure, y + 1)
    with pytest.raises(pd.PyroDropoutError, match="no temperature changes them"):
        pd.refit_temperature(made(torch.zeros(2, 3, 2), pd.Categorical()), y)
