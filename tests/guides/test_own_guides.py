"""A guide of one's own: any distribution of Pyro's will do for q(w), and what will not is said when it is built."""

from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO
from torch import Tensor, nn
from torch.distributions import kl_divergence

import pyro_dropout as pd
from pyro_dropout.guides.base import GuideSite, SiteGuide, trained
from pyro_dropout.protocols import SiteDistribution


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


class AutoPlain(AutoLaplace):
    """Pyro's own Normal."""

    family = dist.Normal


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


def test_a_plain_normal_is_all_that_a_guide_asks_for() -> None:
    model = pd.BayesianNet(nn.Linear(2, 1), pd.Prior(), pd.Gaussian(4.0))
    guide = AutoPlain(model, init_scale=0.5)
    q = guide.posterior("weight")
    assert isinstance(q, SiteDistribution)
    assert type(q.base_dist) is dist.Normal
    assert guide().keys() == guide.mean().keys() == guide.median().keys() == {"weight", "bias"}
    # The same family as AutoMeanField: the same KL, by another formula.
    other = pd.AutoMeanField(model, init_scale=0.5)
    prior = dist.Normal(torch.zeros(1, 2), 1.0).to_event(2)
    assert torch.allclose(kl_divergence(q, prior), kl_divergence(other.posterior("weight"), prior))
    x = torch.randn(20, 2)
    for loss in (Trace_ELBO(), TraceMeanField_ELBO(), pd.ELBO()):
        before = guide.mean()["weight"]
        assert SVI(model, guide, pyro.optim.Adam({"lr": 0.1}), loss).step(x, x[:, :1]) > 0
        assert not torch.equal(guide.mean()["weight"], before)


@pytest.mark.deep
@pytest.mark.parametrize("kind", [AutoLaplace, AutoPlain])
def test_draws_in_place_are_refused_in_a_fleet_and_trained_one_by_one_in_comparisons(kind: Any) -> None:
    def build(seed: int) -> tuple[Any, Any]:
        model = pd.BayesianNet(nn.Linear(2, 1))
        return model, kind(model)

    x = torch.randn(20, 2)
    message = rf"the model or its {kind.__name__} does.*Write rsample with .*or train without a fleet"
    with pytest.raises(pd.errors.PyroDropoutError, match=message):
        pd.Fleet(build, {"seed": [0, 1]}).fit(x, x[:, :1], steps=2, compile=False, progress=False)
    quick: Any = {"steps": 3, "samples": 20, "seeds": 2, "compile": False, "progress": False}
    data = (x, x[:, :1])
    found = pd.compare(build(0)[0], {"own": kind, "mean field": pd.AutoMeanField}, data, data, **quick)
    assert [row.note for row in found.rows] == ["", ""]
    assert len(found.rows[0].scores["elbo"].values) == 2


def test_a_weight_in_a_plate_is_refused_by_name() -> None:
    def in_a_plate() -> None:
        with pyro.plate("groups", 3):
            pyro.sample("w", dist.Normal(torch.zeros(1, 2), 1.0).to_event(2), infer={"kind": "weight"})

    with pytest.raises(pd.errors.PyroDropoutError, match="'w' is marked as a weight and is in a plate"):
        pd.AutoDropout(in_a_plate)()


def of_torch(loc: Tensor, scale: Tensor) -> Any:
    return torch.distributions.Independent(torch.distributions.Normal(loc, scale), 2)


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (dist.Laplace, r"'weight'.*Write \.to_event\(2\)"),
        (lambda loc, scale: dist.Normal(torch.zeros(7), 1.0).to_event(1), r"'weight' a distribution of shape \(1, 2\)"),
        (lambda loc, scale: loc, "must give a distribution of Pyro for 'weight'; .* of type torch"),
        (of_torch, "must give a distribution of Pyro for 'weight'; .* of type torch"),
        (lambda loc, scale: dist.Poisson(scale).to_event(2), "whose draws have no gradient"),
    ],
)
def test_what_will_not_do_is_said_when_the_guide_is_built(make: Any, words: str) -> None:
    class Wrong(AutoLaplace):
        def weight_distribution(self, site: GuideSite, state: Any) -> Any:
            return make(state.loc, state.log_scale.exp())

    with pytest.raises(pd.errors.PyroDropoutError, match=words):
        Wrong(pd.BayesianNet(nn.Linear(2, 1)))
