"""A model in raw units against the same model of standardised data, and against scipy's densities."""

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy import special, stats
from torch import Tensor, nn

import pyro_dropout as pd

TAU = 4.0


def raw_data(dtype: torch.dtype, outputs: int = 1) -> tuple[Tensor, Tensor]:
    x = 1900 + 30 * torch.randn(40, 2, dtype=dtype)
    return x, 300 + 20 * torch.randn(40, outputs, dtype=dtype) * torch.arange(1, outputs + 1)


def pair(likelihood: Any, x: Tensor, y: Tensor, out: int) -> tuple[Any, Any, Any]:
    net = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, out)).to(x.dtype)
    plain = pd.BayesianNet(net, likelihood=likelihood)
    return plain, pd.Standardised(plain, x, y), pd.AutoDropout(plain, keep=0.8)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("outputs", [1, 3])
def test_predictions_are_in_the_units_of_y(dtype: torch.dtype, shared: bool, outputs: int) -> None:
    x, y = raw_data(dtype, outputs)
    plain, model, guide = pair(pd.Gaussian(TAU), x, y, outputs)
    mean, std = y.mean(0), y.std(0)
    options: Any = {"samples": 30, "seed": 3, "shared": shared}
    raw = pd.predict(model, guide, x, **options)
    inner = pd.predict(plain, guide, (x - x.mean(0)) / x.std(0), **options)
    close: Any = {"rtol": 1e-4, "atol": 1e-3} if dtype == torch.float32 else {"rtol": 1e-9, "atol": 1e-9}
    torch.testing.assert_close(raw.mean, inner.mean * std + mean, **close)
    torch.testing.assert_close(raw.epistemic, inner.epistemic * std**2, **close)
    torch.testing.assert_close(raw.aleatoric, (std**2 / TAU).expand_as(raw.mean), **close)
    torch.testing.assert_close(raw.interval(0.9)[0], inner.interval(0.9)[0] * std + mean, **close)
    f, targets = raw.samples.double().numpy(), y.double().numpy()
    noise = (std.double() / TAU**0.5).numpy()
    exact = special.logsumexp(stats.norm.logpdf(targets, f, noise).sum(-1), axis=0) - np.log(30)
    np.testing.assert_allclose(raw.log_prob(y).double().numpy(), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("dims", "dim"), [((3, 2), -1), ((2, 3), 0)])
def test_sequences_and_maps_of_numbers_are_in_the_units_of_y(dims: tuple[int, int], dim: int) -> None:
    """Means and log precisions lie along one of two dimensions, and every position has units of its own."""
    x, y = raw_data(torch.float64, 3)
    net = nn.Sequential(nn.Linear(2, 6), nn.Unflatten(1, dims)).double()
    plain = pd.BayesianNet(net, likelihood=pd.HeteroscedasticGaussian(dims, dim))
    model, guide = pd.Standardised(plain, x, y), pd.AutoDropout(plain, keep=0.8)
    raw = pd.predict(model, guide, x, samples=20, seed=3, shared=True)
    inner = pd.predict(plain, guide, model.standard_x(x), samples=20, seed=3, shared=True)
    for found, wanted in (
        (raw.mean, inner.mean.reshape(y.shape) * y.std(0) + y.mean(0)),
        (raw.variance, inner.variance.reshape(y.shape) * y.var(0)),
    ):
        torch.testing.assert_close(found.reshape(y.shape), wanted)
    shift = y.std(0).log().sum()
    torch.testing.assert_close(raw.log_prob(y) + shift, inner.log_prob(model.standard_y(y)))


def test_training_on_raw_data_is_training_on_standardised_data() -> None:
    x, y = raw_data(torch.float64)
    losses = []
    for raw in (True, False):
        torch.manual_seed(0)
        plain, model, guide = pair(pd.Gaussian(TAU, learn=True), x, y, 1)
        pyro.clear_param_store()
        data = (x, y) if raw else ((x - x.mean(0)) / x.std(0), (y - y.mean(0)) / y.std(0))
        history = pd.fit(
            model if raw else plain, guide, *data, steps=20, lr=0.01, compile=False, progress=False, seed=1
        )
        losses.append(history.losses)
        if raw:  # the precision that was learned is that of raw targets
            assert model.likelihood.tau.item() == pytest.approx(plain.likelihood.tau.item() / y.var().item(), rel=1e-6)
    torch.testing.assert_close(*losses, rtol=1e-9, atol=1e-9)


def test_constant_columns_are_not_divided_by_zero() -> None:
    x = torch.cat([torch.randn(10, 1), torch.full((10, 1), 7.0)], 1)
    _, model, guide = pair(pd.Gaussian(TAU), x, torch.full((10, 1), 3.0), 1)
    assert torch.isfinite(pd.predict(model, guide, x, samples=3).mean).all()


# --- a likelihood of the user's own -----------------------------------------------------------------------------------


class Undeclared(pd.generative.Likelihood):
    """Real-valued targets, and not a word on what becomes of them."""

    def distribution(self, f: Tensor) -> Any:
        return dist.StudentT(5.0, f, 0.5).to_event(1)


class Student(Undeclared):
    """Targets with heavy tails, whose noise has a width of its own."""

    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        self.register_buffer("scale", scale)

    def distribution(self, f: Tensor) -> Any:
        return dist.StudentT(5.0, f, self.scale.to(f)).to_event(1)

    def standardised_targets(self) -> bool:
        return True

    def raw_outputs(self, f: Tensor, mean: Tensor, std: Tensor) -> Tensor:
        return f * std + mean

    def raw_likelihood(self, std: Tensor) -> pd.generative.Likelihood:
        return Student(self.scale * std)


class Wider(pd.Gaussian):
    """A Gaussian that is no longer one; what Gaussian says of standardised targets is not true of it."""

    def distribution(self, f: Tensor) -> Any:
        return dist.StudentT(3.0, f, self.tau.to(f) ** -0.5).to_event(1)


@pytest.mark.parametrize("outputs", [1, 3])
def test_a_likelihood_of_ones_own_is_in_the_units_of_y(dtype: torch.dtype, outputs: int) -> None:
    x, y = raw_data(dtype, outputs)
    width = 0.2 + torch.arange(outputs, dtype=dtype)
    plain, model, guide = pair(Student(width), x, y, outputs)
    torch.testing.assert_close(model.standard_y(y), (y - y.mean(0)) / y.std(0))
    pd.fit(model, guide, x, y, steps=3, compile=False, progress=False)
    raw = pd.predict(model, guide, x, samples=30, seed=3, shared=True)
    inner = pd.predict(plain, guide, (x - x.mean(0)) / x.std(0), samples=30, seed=3, shared=True)
    torch.testing.assert_close(raw.samples, inner.samples * y.std(0) + y.mean(0), rtol=1e-5, atol=1e-3)
    density = stats.t.logpdf(
        y.double().numpy(), 5.0, raw.samples.double().numpy(), (width * y.std(0)).double().numpy()
    ).sum(-1)
    np.testing.assert_allclose(
        raw.log_prob(y).double().numpy(), special.logsumexp(density, axis=0) - np.log(30), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("kind", [Undeclared, Wider])
def test_a_likelihood_that_does_not_say_is_refused(kind: type) -> None:
    plain = pd.BayesianNet(nn.Linear(2, 1), likelihood=kind())
    x, y = raw_data(torch.float32)
    words = f"likelihood {kind.__name__} does not say .*standardised_targets.*raw_outputs.*raw_likelihood"
    with pytest.raises(pd.errors.PyroDropoutError, match=words):
        pd.Standardised(plain, x, y)
    for ask in (lambda: Undeclared().raw_outputs(y, y, y), lambda: Undeclared().raw_likelihood(y)):
        with pytest.raises(pd.errors.PyroDropoutError, match="likelihood Undeclared does not say"):
            ask()
