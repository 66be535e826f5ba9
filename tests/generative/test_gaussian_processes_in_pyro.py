"""The models of §3.1 and §4.5 in Pyro's hands: SVI, Predictive, types, sites, batches, draws for each point."""

from typing import Any

import pytest
import torch
from pyro import poutine
from pyro.infer import Predictive, Trace_ELBO
from pyro.infer.autoguide import AutoDelta, AutoNormal

from pyro_dropout.errors import PyroDropoutError
from pyro_dropout.generative.gaussian_processes import DeepGP
from pyro_dropout.generative.likelihoods import Categorical, Gaussian
from pyro_dropout.mathematics.distributions import BernoulliMixture
from pyro_dropout.mathematics.per_data_point import PerDataPoint
from tests.oracles.deep_gps import POINTS, WIDTHS


@pytest.mark.parametrize("space", ["weight", "function"])
def test_particles_have_the_loss_of_one(space: Any) -> None:
    y = torch.randn(5, 2)
    model = DeepGP(2, WIDTHS, 2, space=space)
    guide = AutoDelta(model)  # every particle is the same
    one = Trace_ELBO().loss(model, guide, POINTS, y, 50 if space == "weight" else 5)
    many = Trace_ELBO(num_particles=4, vectorize_particles=True)
    assert many.loss(model, guide, POINTS, y, 50 if space == "weight" else 5) == pytest.approx(one, rel=1e-5)


@pytest.mark.parametrize("space", ["weight", "function"])
@pytest.mark.parametrize("likelihood", [Gaussian(4.0), Categorical()])
def test_parallel_prediction_is_the_sequential_one(space: Any, likelihood: Any) -> None:
    model = DeepGP(2, WIDTHS, 3, space=space, likelihood=likelihood)
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


@pytest.mark.parametrize("particles", [1, 3])
def test_draws_for_each_data_point_are_repeated_points(particles: int) -> None:
    # With keep=1 and scale=0 every draw is the mean, so the stand-ins can be used as they are.
    model = DeepGP(2, [6, 4], 3)
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
