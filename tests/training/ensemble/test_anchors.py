"""Anchored points start at their anchors, and the anchors are those of their seeds whenever they are drawn."""

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor, nn

import pyro_dropout as pd
from pyro_dropout.generative.model_call import ModelCall
from pyro_dropout.training.ensemble.anchoring import moved, perturbation


def scaled(x: Tensor, y: Tensor | None = None) -> None:
    scale = pyro.sample("scale", dist.Gamma(2.0, 3.0))
    slope = pyro.sample("slope", dist.MultivariateNormal(torch.ones(2), torch.tensor([[2.0, 0.5], [0.5, 1.0]])))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(x @ slope, scale), obs=y)


def test_points_of_a_network_start_at_their_anchors() -> None:
    model = pd.BayesianNet(nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)), pd.Prior(0.5))
    ensemble = pd.Ensemble(model, members=5, start="anchor")
    x = torch.randn(6, 2)
    drawn = perturbation(ensemble.template, ensemble.seeds.tolist(), ModelCall(model, (x, x[:, :1], 6)), 6)["anchors"]
    for name, scale in pd.Prior(0.5).scales(model.net).items():
        assert torch.equal(ensemble.stacked()[f"states.{name.replace('.', '/')}.loc"], drawn[name])
        assert 0.6 < (drawn[name] / scale).square().mean().sqrt() < 1.5, "draws of the prior"
    apart = pd.Ensemble(model, members=5, seed=0).stacked()["states.0/weight.loc"]
    assert apart.abs().max() <= 2**-0.5  # torch's own initialisation, not a draw from N(0, 4)


def test_priors_of_any_kind_have_the_same_anchors_each_time() -> None:
    x = torch.randn(8, 2)
    torch.manual_seed(0)
    ensemble = pd.Ensemble(scaled, members=3, start="anchor")
    ensemble.meet(ModelCall(scaled, (x, x[:, 0])))
    seen = []
    for other in (1, 2):  # the state of torch's generator must not matter
        torch.manual_seed(other)
        seen.append(
            perturbation(ensemble.template, ensemble.seeds.tolist(), ModelCall(scaled, (x, x[:, 0])), 8)["anchors"]
        )
    assert all(torch.equal(seen[0][name], seen[1][name]) for name in ("scale", "slope"))
    own = ensemble.stacked()
    fn = dist.MultivariateNormal(torch.ones(2), torch.tensor([[2.0, 0.5], [0.5, 1.0]]))
    torch.testing.assert_close(own["states.slope.loc"][1], moved(fn, seen[0]["slope"][1]).mean)
    # Gamma's draws: start = log of a draw, so its exponential has Gamma's mean over many members
    many = pd.Ensemble(scaled, members=1000, start="anchor", seed=3)
    many.meet(ModelCall(scaled, (x, x[:, 0])))
    scales = many.stacked()["states.scale.loc"].exp()
    assert abs(scales.mean() - 2 / 3) < 4 * (2**0.5 / 3) / 1000**0.5
