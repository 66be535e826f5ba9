"""What every likelihood promises: one contract for all of them, and for one that a stranger wrote."""

import math
from typing import Any

import pytest
import torch
from pyro import poutine
from torch import Tensor, nn

import pyro_dropout as pd
from pyro_dropout.generative.likelihoods.moments import is_class
from pyro_dropout.prediction.tails import is_whole
from pyro_dropout.registry import likelihoods
from tests.contracts.likelihoods import LIKELIHOODS, N

QUIET: dict[str, Any] = {"compile": False, "progress": False}


def density(likelihood: pd.generative.Likelihood, f: Tensor, y: Tensor, num_data: int | None = None) -> Tensor:
    trace = poutine.trace(likelihood).get_trace(f, y, num_data)
    trace.compute_log_prob()
    return trace.nodes["y"]["log_prob"]


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_a_mini_batch_counts_for_the_whole_data(name: str) -> None:
    case = LIKELIHOODS[name]
    likelihood, f, y = case.make(), torch.randn(N, case.outputs), case.targets()
    assert torch.allclose(density(likelihood, f, y, 15), density(likelihood, f, y) * 15 / N)
    assert torch.equal(density(likelihood, f, y, N), density(likelihood, f, y))


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_sample_dimensions_go_through(name: str) -> None:
    case = LIKELIHOODS[name]
    likelihood, f, y = case.make(), torch.randn(4, N, case.outputs), case.targets()
    each = [likelihood.distribution(one).log_prob(likelihood.checked(one, y)) for one in f]
    assert torch.allclose(likelihood.distribution(f).log_prob(likelihood.checked(f, y)), torch.stack(each))


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_targets_are_drawn_in_the_shape_they_are_observed_in(name: str) -> None:
    case = LIKELIHOODS[name]
    trace = poutine.trace(case.make()).get_trace(torch.randn(N, case.outputs))
    assert trace.nodes["y"]["value"].shape == case.targets().shape


def problem(name: str) -> tuple[pd.BayesianNet, Tensor, Tensor]:
    case = LIKELIHOODS[name]
    model = pd.BayesianNet(nn.Linear(2, case.outputs), likelihood=case.make())
    return model, torch.randn(N, 2), case.targets()


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_it_is_trained_predicted_and_judged(name: str) -> None:
    model, x, y = problem(name)
    guide = pd.AutoMeanField(model)
    assert torch.isfinite(pd.fit(model, guide, x, y, steps=3, **QUIET).losses).all()
    answer = pd.predict(model, guide, x, samples=30, seed=0)
    p = model.likelihood.distribution(answer.samples)
    each = p.log_prob(model.likelihood.checked(answer.samples[0], y))
    torch.testing.assert_close(answer.log_prob(y), torch.logsumexp(each, 0) - math.log(30))
    if is_class(answer.target_distribution):
        assert bool(((answer.probs >= 0) & (answer.probs <= 1)).all())
        with pytest.raises(pd.errors.PyroDropoutError, match=r"is for numbers; .*ece or brier"):
            pd.coverage(answer, y)
        return
    torch.testing.assert_close(answer.mean, p.mean.mean(0).to(answer.mean))
    low, high = answer.interval(0.8)
    inside = ((low <= y) & (y <= high)).double().mean().item()
    assert pd.coverage(answer, y, 0.8) == pytest.approx(inside)
    if not is_whole(answer.target_distribution):
        torch.testing.assert_close(pd.judging.pit(answer, low), torch.full_like(low, 0.1), rtol=1e-3, atol=0)


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_gaussian_outputs_are_those_of_draws(name: str) -> None:
    """Formulas, or quasi-random points: 2,000 draws of a narrow Gaussian at 6 standard errors."""
    model, x, y = problem(name)
    guide = pd.AutoMeanField(model, init_scale=0.1)
    answer = pd.predict(model, guide, x, method="linearised", samples=2000, seed=0)
    p = model.likelihood.distribution(answer.samples)
    density = p.log_prob(model.likelihood.checked(answer.samples[0], y)).double().exp()
    error = density.std(0) / math.sqrt(len(density))
    assert bool(((answer.log_prob(y).exp() - density.mean(0)).abs() <= 6 * error + 1e-3 * density.mean(0)).all())


@pytest.mark.filterwarnings("ignore")  # chains are far too short to agree
@pytest.mark.parametrize("name", LIKELIHOODS)
def test_a_reference_and_a_curvature_are_found_or_refused_by_name(name: str) -> None:
    model, x, y = problem(name)
    sampled = pd.nuts(model, x, y, samples=4, warmup=4, chains=1, max_tree_depth=3, seed=0, **QUIET)
    assert torch.isfinite(pd.predict(model, sampled, x, samples=4).log_prob(y)).all()
    f = torch.zeros(N, LIKELIHOODS[name].outputs)
    if name == "counts by input":
        with pytest.raises(pd.errors.PyroDropoutError, match="no curvature in closed form"):
            model.likelihood.curvature_root(f, y)
    else:
        assert torch.isfinite(model.likelihood.curvature_root(f, y)).all()


def test_every_likelihood_is_registered_and_under_contract() -> None:
    own = {kind for kind in pd.generative.Likelihood.__subclasses__() if kind.__module__.startswith("pyro_dropout.")}
    registered = {entry.likelihood for entry in likelihoods().values()}
    assert own <= registered <= {type(case.make()) for case in LIKELIHOODS.values()}
