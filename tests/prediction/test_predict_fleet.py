"""A fleet's predictions against those of its replicas, one by one."""

from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

import pyro_dropout as pd
from pyro_dropout.prediction.predict_fleet import _ForwardPass
from tests.training.fleet.test_fleet import build, data


def fleet() -> pd.Fleet:
    return pd.Fleet(build, {"seed": [0, 1, 2], "keep": [0.6, 0.8, 0.9], "tau": [1.0, 4.0, 16.0]})


def test_each_replica_predicts_what_it_predicts_alone() -> None:
    """T = 20,000 draws each: means within 6 standard errors of each other, 36 numbers: fails below 1e-7."""
    x, y = data(12)
    index = torch.stack([torch.randperm(12)[:6] for _ in range(3)])
    ships = fleet()
    answer = pd.prediction.predict_fleet(ships, x, y, indices=index, samples=20_000, seed=0)
    assert answer.mean.shape == (3, 6, 1)
    scores = answer.scores()
    for k, (model, guide) in enumerate(ships):
        alone = pd.predict(model, guide, x[index[k]], samples=20_000, seed=1)
        error = (2 * alone.epistemic / 20_000).sqrt()
        assert ((answer.mean[k] - alone.mean).abs() < 6 * error).all()
        torch.testing.assert_close(answer.epistemic[k], alone.epistemic, rtol=0.1, atol=0)
        torch.testing.assert_close(answer.aleatoric[k], alone.aleatoric)
        torch.testing.assert_close(answer.log_prob()[k], alone.log_prob(y[index[k]]), rtol=0.05, atol=0.05)
        own = (answer.mean[k] - y[index[k]]).square().mean().sqrt()
        torch.testing.assert_close(scores["rmse"][k], own)
    torch.testing.assert_close(scores["log_likelihood"], answer.log_prob().mean(1))
    assert torch.equal(answer.log_prob(y[index]), answer.log_prob())
    with pytest.raises(pd.errors.ShapeError, match="targets for each of 3 replicas"):
        answer.log_prob(y)


@pytest.mark.deep
def test_blocks_of_any_size_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """With keep=1 nothing is random, so all ways to cut the work give one answer; memory that runs out only cuts."""
    x, y = data(12)
    ships = pd.Fleet(build, {"seed": [0, 1, 2], "keep": [1.0] * 3})
    whole = pd.prediction.predict_fleet(ships, x, y, samples=8)
    for chunk in (1, 13, 50, 200):
        parts = pd.prediction.predict_fleet(ships, x, y, samples=8, chunk=chunk)
        torch.testing.assert_close(parts.mean, whole.mean)
        torch.testing.assert_close(parts.log_prob(), whole.log_prob())
    run, failed = _ForwardPass.run, []

    def short_of_memory(task: Any, replicas: slice, count: int) -> Any:
        if count * (replicas.stop - replicas.start) > 2:
            failed.append(count)
            raise torch.OutOfMemoryError("not enough")
        return run(task, replicas, count)

    monkeypatch.setattr(_ForwardPass, "run", short_of_memory)
    torch.testing.assert_close(pd.prediction.predict_fleet(ships, x, y, samples=8).mean, whole.mean)
    assert failed


def test_intervals_and_covariances_have_the_noise_of_their_own_replica() -> None:
    """Each replica has another τ: its interval is that of its own mixture of normals, by scipy."""
    x, _ = data(12)
    answer = pd.prediction.predict_fleet(fleet(), x, samples=30, seed=0, keep_samples=True)
    low, high = answer.interval(0.8)
    f = answer.samples.double()
    assert low.shape == high.shape == (3, 12, 1)
    for e, scale in enumerate((1.0, 0.5, 0.25)):
        for end, level in ((low, 0.1), (high, 0.9)):
            below = torch.from_numpy(stats.norm.cdf(end[e].double(), f[:, e], scale)).mean(0)
            torch.testing.assert_close(below, torch.full_like(below, level), atol=1e-5, rtol=0)
    torch.testing.assert_close(answer.covariance[..., 0, 0], answer.variance[..., 0])
    assert answer.covariance.shape == (3, 12, 1, 1)

    def make(seed: int) -> Any:
        torch.manual_seed(seed)
        model = pd.BayesianNet(nn.Linear(2, 2), likelihood=pd.Gaussian(4.0 + seed))
        return model, pd.AutoDropout(model, keep=0.7)

    both = pd.prediction.predict_fleet(pd.Fleet(make, {"seed": [0, 1]}), x, samples=40, seed=0, keep_samples=True)
    for e in range(2):
        for n in range(12):
            exact = np.cov(both.samples[:, e, n].double().numpy().T, bias=True) + np.eye(2) / (4 + e)
            np.testing.assert_allclose(both.covariance[e, n].double().numpy(), exact, atol=1e-5)


def test_a_posterior_that_is_drawn_once_for_all_points_is_refused_with_a_way_out() -> None:
    x = torch.linspace(-1, 1, 12).unsqueeze(-1)

    def build(seed: int) -> Any:
        torch.manual_seed(seed)
        model = pd.BayesianNet(nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1)), likelihood=pd.Gaussian(9.0))
        return model, pd.AutoFullRank(model)

    fleet = pd.Fleet(build, {"seed": [0, 1]})
    with pytest.raises(pd.errors.PyroDropoutError, match=r"shared=True\) .* for each pair of a fleet"):
        pd.prediction.predict_fleet(fleet, x, samples=5)
    for pair in fleet:
        assert pd.predict(*pair, x, shared=True, samples=5).mean.shape == (12, 1)
