"""Tails, quantiles and probabilities above a threshold, for every kind of likelihood, against scipy."""

import math
from typing import Any

import numpy as np
import pyro.distributions as dist
import pytest
import scipy.stats
import torch
from scipy.optimize import brentq
from torch import Tensor

import pyro_dropout as pd
from pyro_dropout.mathematics.mixtures import mixture_tail_quantile
from pyro_dropout.protocols import Distribution
from tests.oracles.made_predictions import made

F64 = torch.float64


class Share(dist.TransformedDistribution):
    """Normal after its logit; the moments are placeholders, which tails and quantiles do not need."""

    @property
    def mean(self) -> Tensor:
        return torch.full(self.batch_shape, math.nan, dtype=F64)

    variance = mean


class Own(pd.Gaussian):
    """A likelihood with a distribution that a test names."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def distribution(self, f: Tensor) -> Distribution:
        squashed = [torch.distributions.AffineTransform(0.3, 2.0), torch.distributions.SigmoidTransform()]
        return {
            "positive": lambda: dist.LogNormal(f, 0.5).to_event(1),
            "share": lambda: Share(dist.Normal(f, 0.5), squashed).to_event(1),
            "laplace": lambda: dist.Laplace(f, 0.5).to_event(1),
            "skewed": lambda: dist.Gamma(f.exp() + 0.1, 2.0).to_event(1),
            "bounded": lambda: dist.Uniform(f - 1.5, f + 1.0).to_event(1),
            "no moments": lambda: dist.Cauchy(f, torch.full_like(f, 0.5)).to_event(1),
        }[self.kind]()


LIKELIHOODS = {kind: Own(kind) for kind in ("positive", "share", "laplace", "skewed", "bounded", "no moments")} | {
    "normal": pd.Gaussian(4.0),
    "counts": pd.Poisson(),
}


def oracle(kind: str, f: np.ndarray) -> "scipy.stats.rv_frozen":
    return {
        "normal": lambda: scipy.stats.norm(f, 0.5),
        "positive": lambda: scipy.stats.lognorm(0.5, scale=np.exp(f)),
        "share": lambda: scipy.stats.norm(2 * f + 0.3, 1.0),  # of its logit
        "laplace": lambda: scipy.stats.laplace(f, 0.5),
        "skewed": lambda: scipy.stats.gamma(np.exp(f) + 0.1, scale=0.5),
        "bounded": lambda: scipy.stats.uniform(f - 1.5, 2.5),
        "no moments": lambda: scipy.stats.cauchy(f, 0.5),
        "counts": lambda: scipy.stats.poisson(np.exp(f)),
    }[kind]()


def seen(kind: str, y: float) -> float:
    """The value at which the oracle's distribution is asked."""
    return math.log(y / (1 - y)) if kind == "share" else y


@pytest.mark.parametrize("kind", LIKELIHOODS)
def test_the_probability_above_a_threshold_is_that_of_scipy(kind: str) -> None:
    f = torch.randn(7, 4, 1, dtype=F64)
    prediction = made(f, LIKELIHOODS[kind])
    for threshold in (0.2, 0.5, 0.9, *((1.0, 3.0) if kind != "share" else ())):
        wanted = oracle(kind, f.numpy()).sf(seen(kind, threshold)).mean(0)
        np.testing.assert_allclose(prediction.probability_above(threshold).numpy(), wanted, rtol=1e-9)
    if kind != "laplace":
        assert bool((made(f, Own("positive")).probability_above(-2.0) == 1).all())


@pytest.mark.parametrize("kind", LIKELIHOODS)
@pytest.mark.parametrize("level", [0.003, 0.3, 0.8, 0.9999])
@pytest.mark.thinned(2)
def test_quantiles_are_those_of_the_mixture(kind: str, level: float) -> None:
    f = torch.randn(7, 3, 1, dtype=F64)
    found = made(f, LIKELIHOODS[kind]).quantile(level)
    for k in range(3):
        law = oracle(kind, f[:, k, 0].numpy())
        if kind == "counts":
            wanted = next(n for n in range(1000) if law.cdf(n).mean() >= level)
        else:
            wanted = brentq(lambda z, law=law: law.cdf(z).mean() - level, -1e4, 1e4, xtol=1e-13)
        assert seen(kind, found[k].item()) == pytest.approx(wanted, rel=1e-7, abs=1e-7)


@pytest.mark.parametrize("kind", LIKELIHOODS)
def test_an_interval_holds_its_level(kind: str) -> None:
    f = torch.randn(7, 5, 1, dtype=F64)
    prediction = made(f, LIKELIHOODS[kind])
    low, high = prediction.interval(0.9)
    below, above = prediction.log_tails(low)[0].exp(), prediction.log_tails(high)[1].exp()
    if kind == "counts":  # the least and the greatest with enough in their tails, and one further there is less
        assert bool(((below >= 0.05) & (above >= 0.05)).all())
        assert bool((prediction.log_tails(low - 1)[0].exp() < 0.05).all())
        assert bool((prediction.log_tails(high + 1)[1].exp() < 0.05).all())
    else:
        torch.testing.assert_close(
            torch.stack([below, above]), torch.full((2, 5, 1), 0.05, dtype=F64), rtol=1e-6, atol=0
        )


def test_far_tails_are_those_of_scipy_and_their_quantiles_lead_back() -> None:
    loc, scale = torch.randn(6, 5, dtype=F64), torch.rand(6, 5, dtype=F64) + 0.2

    def log_cdf(z: Any) -> np.ndarray:
        each = scipy.stats.norm.logcdf((np.asarray(z) - loc.numpy()) / scale.numpy())
        return np.logaddexp.reduce(each, 0) - math.log(6)

    for z in (-0.5, -4.0, -50.0, -3000.0):
        asked = np.minimum(log_cdf(z), math.log(0.5))
        found = mixture_tail_quantile(loc, scale, torch.from_numpy(asked))
        np.testing.assert_allclose(log_cdf(found), asked, rtol=1e-9)


def test_where_nothing_is_too_far_the_ends_are_those_of_the_support() -> None:
    for kind, ends in (("normal", (-math.inf, math.inf)), ("positive", (0.0, math.inf)), ("counts", (0.0, math.inf))):
        low, high = made(torch.zeros(2, 1, 1), LIKELIHOODS[kind]).tail_ends(torch.tensor(-math.inf))
        assert (low.item(), high.item()) == ends
    f = torch.tensor([0.0, 2.0]).reshape(2, 1, 1)
    low, high = made(f, LIKELIHOODS["bounded"]).tail_ends(torch.tensor(-math.inf))
    assert (low.item(), high.item()) == (-1.5, 3.0)  # of both draws together


def test_a_distribution_without_a_distribution_function_is_refused_by_name() -> None:
    class Odd(pd.Gaussian):
        def distribution(self, f: Tensor) -> Distribution:
            return dist.VonMises(f, 1.0).to_event(1)

    with pytest.raises(pd.errors.PyroDropoutError, match=r"VonMises has no distribution function.*Define cdf"):
        made(torch.zeros(2, 1, 1), Odd()).probability_above(0.0)
