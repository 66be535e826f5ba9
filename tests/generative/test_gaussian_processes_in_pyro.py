"""The models of §3.1 and §4.5 in Pyro's hands: SVI, Predictive, types, sites, batches, draws for each point."""

import copy
from typing import Any

import pyro
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Predictive, Trace_ELBO
from pyro.infer.autoguide import AutoDelta, AutoNormal
from pyro.optim import Adam
from torch import nn

from pyro_dropout.errors import PyroDropoutError
from pyro_dropout.generative.gaussian_processes import DeepGP, FiniteRankGP
from pyro_dropout.generative.likelihoods import Categorical, Gaussian
from pyro_dropout.mathematics.distributions import BernoulliMixture
from pyro_dropout.mathematics.per_data_point import PerDataPoint
from tests.oracles.deep_gps import POINTS, WIDTHS


@pytest.mark.parametrize("space", ["weight", "function"])
@pytest.mark.parametrize("shared", [False, True])
def test_particles_have_the_loss_of_one(space: Any, shared: bool) -> None:
    y = torch.randn(5, 2)
    model = DeepGP(2, WIDTHS, 2, space=space, shared_covariance=shared, output_bias=True, mean=nn.Linear(2, 2))
    guide = AutoDelta(model)  # every particle is the same
    one = Trace_ELBO().loss(model, guide, POINTS, y, 50 if space == "weight" else 5)
    many = Trace_ELBO(num_particles=4, vectorize_particles=True)
    assert many.loss(model, guide, POINTS, y, 50 if space == "weight" else 5) == pytest.approx(one, rel=1e-5)


@pytest.mark.parametrize("space", ["weight", "function"])
@pytest.mark.parametrize("likelihood", [Gaussian(4.0), Categorical()])
def test_parallel_prediction_is_the_sequential_one(space: Any, likelihood: Any) -> None:
    model = DeepGP(2, WIDTHS, 3, space=space, output_bias=True, likelihood=likelihood)
    guide = AutoNormal(model)
    guide(POINTS, torch.zeros(5).long() if isinstance(likelihood, Categorical) else torch.zeros(5, 3))
    sites = ["_RETURN", "y", "W1", "b2"]
    from_guide = [
        Predictive(model, guide=guide, num_samples=4, parallel=parallel, return_sites=sites)(POINTS)
        for parallel in (True, False)
    ]
    assert {k: v.shape for k, v in from_guide[0].items()} == {k: v.shape for k, v in from_guide[1].items()}
    assert from_guide[0]["_RETURN"].shape == (4, 5, 3)
    samples = Predictive(guide, num_samples=4)(POINTS)
    assert samples["W1"].shape == (4, 6, 2), "without a place for the plate: the guide has none"
    alone = Predictive(model, samples, return_sites=["_RETURN"])(POINTS)["_RETURN"]
    for given in (samples, {name: value.unsqueeze(1) for name, value in samples.items()}):
        together = Predictive(model, given, return_sites=["_RETURN"], parallel=True)(POINTS)["_RETURN"]
        torch.testing.assert_close(together, alone)


def test_a_mean_function_is_added_and_trained() -> None:
    plain = FiniteRankGP(2, 6, 1, mean=lambda x: 100 + x[:, :1])
    trace = poutine.trace(plain).get_trace(POINTS)
    without = {name: trace.nodes[name]["value"] for name in ("W1", "b1", "W2")}
    f = poutine.condition(FiniteRankGP(2, 6, 1), without)(POINTS)
    torch.testing.assert_close(trace.nodes["_RETURN"]["value"], f + 100 + POINTS[:, :1])
    model = FiniteRankGP(2, 6, 1, mean=nn.Linear(2, 1), likelihood=Gaussian(10.0))
    svi = SVI(model, AutoNormal(model), Adam({"lr": 0.05}), Trace_ELBO())
    start = model.mean.bias.item()
    for _ in range(50):
        svi.step(POINTS, 3 * POINTS[:, :1] - 20)
    assert model.mean.bias.item() < start - 0.5, "the mean does not move"
    twin = copy.deepcopy(model)
    names = {name for name in pyro.get_param_store() if "mean" in name}
    poutine.trace(twin).get_trace(POINTS)
    new = {name for name in pyro.get_param_store() if "mean" in name} - names
    assert len(new) == 2, "a copy must not share parameters with the original"


@pytest.mark.parametrize("particles", [1, 3])
def test_draws_for_each_data_point_are_repeated_points(particles: int) -> None:
    # With keep=1 and scale=0 every draw is the mean, so the stand-ins can be used as they are.
    model = DeepGP(2, [6, 4], 3, output_bias=True)
    plain, marked = {}, {}
    for site, shape in model.sites.items():
        plain[site] = torch.randn(shape)
        value = plain[site] if particles == 1 else plain[site].expand(particles, 1, *shape)
        marked[site] = value.clone() if site == "W1" and particles == 1 else value
    for site in ("W1", "W2", "W3"):
        recipe = PerDataPoint(site, BernoulliMixture(plain[site], keep=1.0))
        marked[site] = recipe.mark(marked[site].clone())
    expected = poutine.condition(model, plain)(POINTS)
    with poutine.trace() as tape:
        f = poutine.condition(model, marked)(POINTS)
    torch.testing.assert_close(
        f, expected.expand(particles, 5, 3).squeeze(0) if particles == 1 else expected.expand(3, 5, 3)
    )
    assert tape.trace.nodes["y"]["value"].shape == f.shape
    if particles > 1:
        marked["b1"] = torch.randn(particles, 1, 6)
        with pytest.raises(PyroDropoutError, match="'b1' has shared draws"):
            poutine.condition(model, marked)(POINTS)
    with pytest.raises(PyroDropoutError, match="function space has one W1"):
        poutine.condition(DeepGP(2, [6, 4], 3, space="function"), {"W1": marked["W1"]})(POINTS)
