"""Log, log-odds and count targets: in the units of y, and with the Jacobian."""

import math

import numpy as np
import pytest
import torch
from scipy import integrate, special, stats
from torch import nn

import pyro_dropout as pd
from pyro_dropout.mathematics.negative_binomial import NegativeBinomial
from pyro_dropout.mathematics.normal import LogitNormal, LogNormal

F64 = torch.float64


@pytest.mark.parametrize(("made", "link"), [(LogNormal, np.exp), (LogitNormal, special.expit)])
def test_moments_are_integrals(made: type, link: np.ufunc) -> None:
    loc, scale = torch.tensor([-2.0, 0.3, 1.0]), torch.tensor([0.2, 1.5, 3.0 if made is LogitNormal else 1.0])
    found = made(loc, scale)
    for k in range(3):
        normal = stats.norm(loc[k].item(), scale[k].item())

        def moment(power: int) -> float:
            return float(integrate.quad(lambda z: link(z) ** power * normal.pdf(z), -40, 40, points=[normal.mean()])[0])  # noqa: B023

        assert found.mean[k].item() == pytest.approx(moment(1), rel=1e-6)
        assert found.variance[k].item() == pytest.approx(moment(2) - moment(1) ** 2, rel=1e-5)


@pytest.mark.parametrize("log_r", [-30.0, 0.0, 3.4, 3.5, 10.0, 15.0, 40.0, 100.0])
@pytest.mark.parametrize("mean", [0.05, 4.0, 200.0])
@pytest.mark.thinned(3)
def test_counts_keep_their_digits_up_to_poissons(dtype: torch.dtype, mean: float, log_r: float) -> None:
    p = NegativeBinomial(torch.tensor(math.log(mean), dtype=dtype), torch.tensor(log_r, dtype=dtype))
    y = torch.tensor([0.0, 1.0, 7.0, 250.0], dtype=dtype)
    r = math.exp(log_r)
    oracle = stats.poisson(mean) if log_r > 20 else stats.nbinom(r, r / (r + mean))  # scipy too has no digits there
    torch.testing.assert_close(p.log_prob(y).double(), torch.tensor(oracle.logpmf(y)), rtol=3e-5, atol=3e-4)
    np.testing.assert_allclose(p.log_tails(y)[0], oracle.logcdf(y), rtol=1e-5, atol=2e-4)


def test_counts_far_from_the_data_are_numbers() -> None:
    logs = torch.tensor([-200.0, -90.0, 0.0, 90.0, 200.0], requires_grad=True)
    for log_mean in (-100.0, 0.0, 80.0, 95.0, 500.0):
        p = NegativeBinomial(torch.tensor(log_mean), logs)
        found = p.log_prob(torch.tensor([[0.0], [1e6]]))
        assert found.isfinite().all()
        slope = torch.autograd.grad(found.sum(), logs)[0]
        assert slope.square().isfinite().all()  # as the moments of an optimiser hold it
        assert (p.sample(torch.Size([100])) >= 0).all()
    assert (
        NegativeBinomial(torch.tensor(50.0), torch.tensor(-50.0)).sample(torch.Size([100])).sum() == 0
    )  # P(0) > 1-1e-19
    model = pd.BayesianNet(nn.Linear(1, 2), likelihood=pd.Counts(by_input=True))
    x = 300 * torch.linspace(-1, 1, 8).unsqueeze(-1)
    guide = pd.AutoMeanField(model)
    assert pd.fit(model, guide, x, x.abs().round(), steps=2, compile=False, progress=False).losses.isfinite().all()
    found = NegativeBinomial(torch.tensor(300.0).log(), torch.tensor(40.0)).log_prob(torch.tensor(310.0))
    assert found.item() == pytest.approx(stats.poisson(300).logpmf(310), rel=1e-3)  # in float32


@pytest.mark.parametrize("mean", [0.02, 1.0, 30.0, 5e4])
@pytest.mark.parametrize("r", [0.1, 2.0, 500.0])
def test_tails_of_counts_are_those_of_scipy(mean: float, r: float) -> None:
    p = NegativeBinomial(torch.tensor(math.log(mean), dtype=F64), torch.tensor(math.log(r), dtype=F64))
    wide = math.sqrt(mean + mean**2 / r)
    y = torch.tensor([-1.0, 0.0, 1.0, 1.5, round(mean), round(mean + 3 * wide), round(mean + 30 * wide)], dtype=F64)
    below, above = p.log_tails(y)
    oracle = stats.nbinom(r, r / (r + mean))
    np.testing.assert_allclose(below.exp(), oracle.cdf(y), rtol=1e-6, atol=1e-300)
    np.testing.assert_allclose(above.exp(), oracle.sf(np.ceil(y.numpy()) - 1), rtol=1e-6, atol=1e-300)


@pytest.mark.parametrize("noise", ["constant", "by-input"])
@pytest.mark.parametrize("link", ["log", "logit"])
def test_a_standardised_model_answers_in_units_of_y(link: str, noise: str) -> None:
    """The same network by hand: log-likelihoods differ by the Jacobian, and quantiles are those of the link."""
    x = torch.linspace(-1, 1, 40, dtype=F64).unsqueeze(-1)
    z = 5 + 2 * x + 0.1 * torch.sin(50 * x)
    y = z.exp() if link == "log" else torch.sigmoid(z - 5)
    z = z if link == "log" else z - 5
    inner = pd.Gaussian(4.0) if noise == "constant" else pd.HeteroscedasticGaussian()
    net = nn.Linear(1, 1 if noise == "constant" else 2)
    model = pd.Standardised(pd.BayesianNet(net, likelihood=pd.Transformed(inner, link)).double(), x, y)
    by_hand = pd.Standardised(pd.BayesianNet(net, likelihood=inner).double(), x, z)
    guide = pd.AutoMeanField(model.model).double()
    found, oracle = (pd.predict(each, guide, x, samples=20, shared=True, seed=3) for each in (model, by_hand))
    jacobian = -z if link == "log" else -torch.log(y * (1 - y))
    torch.testing.assert_close(found.log_prob(y), oracle.log_prob(z) + jacobian[:, 0])
    assert bool((found.mean > 0).all())
    assert bool((found.variance > 0).all())


def test_a_zero_price_is_refused_before_training() -> None:
    x = torch.linspace(-1, 1, 8).unsqueeze(-1)
    y = x.exp()
    model = pd.Standardised(pd.BayesianNet(nn.Linear(1, 1), likelihood=pd.Transformed(pd.Gaussian(), "log")), x, y)
    y = torch.where(x > 0.9, 0.0, y)
    with pytest.raises(pd.errors.RangeError, match="y must be positive to have a logarithm"):
        pd.fit(model, pd.AutoMeanField(model.model), x, y, steps=2, compile=False, progress=False)
    with pytest.raises(pd.errors.RangeError, match="y must be positive to have a logarithm"):
        pd.predict(model, pd.AutoMeanField(model.model), x, samples=2).log_prob(y)
