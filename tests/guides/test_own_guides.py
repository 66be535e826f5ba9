"""A guide of one's own: any distribution of Pyro's will do for q(w), and what will not is said when it is built."""

from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO
from torch import Tensor, nn

import pyro_dropout as pd
from pyro_dropout.guides.base import GuideSite, SiteGuide, trained


class AutoLaplace(SiteGuide):
    """q(w) of heavier tails than a Gaussian's."""

    family: Callable[..., Any] = dist.Laplace

    def __init__(self, model: Any, **options: Any) -> None:
        super().__init__(model, bias="gaussian", **options)
        self._start()

    def parameters_of(self, site: GuideSite) -> dict[str, Tensor]:
        return {"loc": trained(site.start), "log_scale": trained(self.log_width(site))}

    def weight_distribution(self, site: GuideSite, state: Any) -> Any:
        return type(self).family(state.loc, state.log_scale.exp()).to_event(state.loc.dim())


class AutoStudent(AutoLaplace):
    """Pyro's StudentT has no inverse of its distribution function."""

    family = staticmethod(lambda loc, scale: dist.StudentT(5.0, loc, scale))


@pytest.mark.deep
@pytest.mark.parametrize("kind", [AutoLaplace, AutoStudent])
@pytest.mark.parametrize("loss", [Trace_ELBO, TraceMeanField_ELBO, pd.ELBO, lambda: pd.ELBO(per_example=False)])
def test_any_distribution_serves(kind: Any, loss: Any) -> None:
    torch.manual_seed(0)
    x = torch.randn(40, 2)
    y = x @ torch.tensor([[1.0], [-2.0]])
    model = pd.BayesianNet(nn.Linear(2, 1), likelihood=pd.Gaussian(100.0))
    guide = kind(model)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.05}), loss())
    for _ in range(150):
        svi.step(x, y)
    expected = torch.tensor([[1.0, -2.0]])
    assert torch.allclose(guide.median()["weight"], expected, atol=0.15)
    assert torch.allclose(guide.mean()["weight"], expected, atol=0.15)
    low, high = guide.quantiles([0.05, 0.95])["weight"]
    draws = guide.sample_weights(4000)["weight"]
    held = ((draws > low) & (draws < high)).double().mean()
    assert held.item() == pytest.approx(0.9, abs=0.02)  # nine standard errors
    assert pd.predict(model, guide, x[:3], samples=50, shared=True, seed=0).mean.shape == (3, 1)
    assert pd.khat(model, guide, x, y, samples=100, seed=0) < 10


class Unfinished(AutoLaplace):
    def weight_distribution(self, site: GuideSite, state: Any) -> Any:
        return dist.Laplace(state.loc, state.log_scale.exp())  # without to_event


class OfAnotherShape(AutoLaplace):
    def weight_distribution(self, site: GuideSite, state: Any) -> Any:
        return dist.Normal(torch.zeros(7), 1.0).to_event(1)


class NotADistribution(AutoLaplace):
    def weight_distribution(self, site: GuideSite, state: Any) -> Any:
        return state.loc


class WithoutGradients(AutoLaplace):
    def weight_distribution(self, site: GuideSite, state: Any) -> Any:
        return dist.Poisson(state.log_scale.exp()).to_event(state.loc.dim())


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Unfinished, r"'weight'.*Write \.to_event\(2\)"),
        (OfAnotherShape, r"'weight' a distribution of shape \(1, 2\)"),
        (NotADistribution, "must give a distribution of pyro.distributions for 'weight'"),
        (WithoutGradients, "whose draws have no gradient"),
    ],
)
def test_what_will_not_do_is_said_when_the_guide_is_built(kind: Any, words: str) -> None:
    with pytest.raises(pd.PyroDropoutError, match=words):
        kind(pd.BayesianNet(nn.Linear(2, 1)))
