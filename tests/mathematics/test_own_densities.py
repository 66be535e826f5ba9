"""Classes below a known distribution with a density of their own: no closed form of the parent is taken for theirs."""

import math
from typing import Any, ClassVar

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoNormal
from torch import Tensor, nn

import pyro_dropout as pd
from pyro_dropout.errors import PyroDropoutError
from pyro_dropout.mathematics.shapes import keeps_density


class Skewed(dist.Normal):
    """The skew normal distribution: 2 N(w) Φ(4 w)."""

    def log_prob(self, value: Tensor) -> Tensor:
        found: Tensor = (
            super().log_prob(value) + math.log(2) + torch.special.log_ndtr(4 * (value - self.loc) / self.scale)
        )
        return found


class Censored(dist.Normal):
    """A normal number, or zero where it is negative."""

    def log_prob(self, value: Tensor) -> Tensor:
        return torch.where(value <= 0, torch.special.log_ndtr(-self.loc / self.scale), super().log_prob(value))


class CensoredWithTails(Censored):
    def cdf(self, value: Tensor) -> Tensor:
        return torch.where(value < 0, 0.0, super().cdf(value))


class Tobit(pd.generative.Likelihood):
    def __init__(self, kind: type[Censored]) -> None:
        super().__init__()
        self.kind = kind

    def distribution(self, f: Tensor) -> dist.TorchDistribution:
        return self.kind(f, torch.ones_like(f)).to_event(1)


def test_what_keeps_its_density() -> None:
    class Wider(dist.Normal):
        pass

    class Own(dist.TorchDistribution):
        arg_constraints: ClassVar[dict[str, Any]] = {}

        def log_prob(self, value: Tensor) -> Tensor:
            return value

    one = torch.ones(2)
    for known in (
        dist.Normal(0.0, one),
        Wider(0.0, one),
        Own(),
        dist.Gamma(one, one),
        dist.Normal(0.0, one).to_event(1),
    ):
        assert keeps_density(known)
    assert not keeps_density(Skewed(0.0, one).to_event(1))
    assert not keeps_density(dist.Gamma(one, one), torch.distributions.Normal)


@pytest.mark.parametrize("make", [pd.AutoMeanField, pd.AutoFullRank, AutoNormal, pd.AutoLowRank])
def test_the_divergence_from_a_skewed_prior_is_sampled(make: Any) -> None:
    """E_q[log q - log p] at q = N(0.5, 0.3²) for each of six weights; 400 draws, 5 standard errors."""

    def model() -> None:
        pyro.sample("w", Skewed(0.0, 1.0).expand([3, 2]).to_event(2))

    guide = make(model, init_loc_fn=lambda site: torch.full((3, 2), 0.5), init_scale=0.3)
    guide()
    draws = [pd.ELBO(kl="exact", per_example=False).parts(model, guide)["kl"].item() for _ in range(400)]
    found = torch.tensor(draws)
    w = 0.5 + 0.3 * torch.special.ndtri((torch.arange(20_000) + 0.5) / 20_000)
    each = dist.Normal(0.5, 0.3).log_prob(w) - Skewed(0.0, 1.0).log_prob(w)
    assert abs(found.mean() - 6 * each.mean()) < 5 * found.std() / 20


def test_each_point_cannot_have_a_draw_under_a_prior_that_is_not_gaussian() -> None:
    def model(x: Tensor) -> None:
        w = pyro.sample("w", Skewed(0.0, 1.0).expand([1, 2]).to_event(2))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(x @ w.T, 1.0).to_event(1), obs=x[:, :1])

    with pytest.raises(pd.errors.NotFollowedError, match="its prior is Independent, not Gaussian"):
        pd.ELBO().loss(model, pd.AutoMeanField(model), torch.randn(5, 2))


def test_a_censored_normal_is_not_judged_as_a_normal() -> None:
    x, y = torch.randn(6, 2), torch.randn(6, 1).clamp_min(0)
    for kind in (Censored, CensoredWithTails):
        model = pd.BayesianNet(nn.Linear(2, 1), likelihood=Tobit(kind))
        answer = pd.predict(model, pd.AutoMeanField(model), x, samples=50, seed=0, shared=True)
        with pytest.raises(PyroDropoutError, match=r"method='mixture'\) is for Gaussian likelihoods"):
            pd.crps(answer, y)
        if kind is Censored:
            with pytest.raises(PyroDropoutError, match=r"Censored has no distribution function.* Define cdf"):
                answer.interval(0.9)
        else:
            below = torch.special.ndtr(1.0 - answer.samples).mean(0)
            torch.testing.assert_close(answer.probability_above(1.0), 1 - below)
            assert bool((answer.interval(0.5)[0] >= -1e-6).all())
