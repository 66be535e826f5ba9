"""A Laplace approximation as a guide among others: fleets, estimators, comparisons, ArviZ, the command line."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import pyro_dropout as pd

QUIET: dict[str, Any] = {"compile": False, "progress": False}
pytestmark = pytest.mark.filterwarnings("ignore:the point of this Laplace")


def problem(seed: int = 0) -> tuple[pd.BayesianNet, Tensor, Tensor]:
    torch.manual_seed(seed)
    x = torch.randn(40, 2)
    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
    return pd.BayesianNet(net, likelihood=pd.Gaussian(tau=20.0)), x, torch.sin(x[:, :1])


def test_a_guide_is_points_until_it_is_finished() -> None:
    model, x, y = problem()
    guide = pd.guides.AutoLaplace(model, "kron")
    assert "a point so far" in repr(guide)
    assert not guide.finished
    draws = guide.sample_weights(2)
    assert all(torch.equal(value[0], guide.mean()[name]) for name, value in draws.items())
    pd.fit(model, guide, x, y, steps=3, **QUIET)
    assert guide.finished
    assert "blocks: Kronecker" in repr(guide)
    large = pd.BayesianNet(nn.Sequential(nn.Linear(60, 70), nn.Linear(70, 1)))
    assert (pd.guides.AutoLaplace(model).structure, pd.guides.AutoLaplace(large).structure) == ("full", "last")


def test_replicas_of_a_fleet_are_finished_on_their_own_rows() -> None:
    _, x, y = problem()

    def build(seed: int) -> tuple[Any, Any]:
        model = problem(seed)[0]
        return model, pd.guides.AutoLaplace(model)

    fleet = pd.Fleet(build, {"seed": [0, 1]})
    rows = torch.stack([torch.arange(30), torch.arange(10, 40)])
    for _ in range(2):  # the second time from points again
        fleet.fit(x, y, indices=rows, steps=3, seed=0, **QUIET)
    for k, (model, guide) in enumerate(fleet):
        again = pd.laplace(model, guide, x[rows[k]], y[rows[k]])
        for ours, theirs in zip(guide.curvature.buffers(), again.curvature.buffers(), strict=True):
            torch.testing.assert_close(ours, theirs)
        assert guide.curvature.num_data == 30


def test_what_kron_cannot_describe_is_refused_before_training() -> None:
    net = nn.GRU(2, 3)
    model = pd.BayesianNet(nn.Sequential(net), output=0)
    guide = pd.guides.AutoLaplace(model, "kron")
    with pytest.raises(pd.errors.PyroDropoutError, match="GRU '0'"):
        pd.fit(model, guide, torch.zeros(2, 2), torch.zeros(2, 3), steps=10**9, **QUIET)


def test_a_cold_posterior_has_its_maximum_elsewhere() -> None:
    model, x, y = problem()
    guide = pd.guides.AutoLaplace(model)
    with pytest.raises(pd.errors.PyroDropoutError, match=r"temperature=0\.5"):
        pd.fit(model, guide, x, y, steps=3, loss=pd.ELBO(temperature=0.5), **QUIET)
    pd.fit(model, guide, x, y, steps=3, batch_size=9, loss=pd.ELBO(temperature=pd.training.warm_up(2)), **QUIET)
    assert guide.curvature.num_data == 40


def test_an_estimator_has_the_curvature_of_its_refit() -> None:
    x = np.random.default_rng(0).normal(size=(40, 2))
    regressor = pd.DropoutRegressor((5,), guide="laplace", max_steps=60, samples=20, random_state=0, compile=False)
    regressor.fit(x, np.sin(x[:, 0]))
    _, guide = regressor.model_and_guide()
    assert guide.finished
    assert guide.curvature.num_data == 40
    _, spread = regressor.predict(x, return_std=True)
    assert (spread > regressor.tau_**-0.5).all()
    answer = pd.predict(*regressor.model_and_guide(), torch.as_tensor(x), method="linearised")
    np.testing.assert_allclose(spread, answer.std.squeeze(-1).numpy(), rtol=1e-6)


def _finished() -> tuple[pd.BayesianNet, pd.guides.AutoLaplace, torch.Tensor, torch.Tensor]:
    x = torch.randn(40, 3)
    y = x.sum(1, keepdim=True)
    model = pd.BayesianNet(torch.nn.Linear(3, 1), likelihood=pd.Gaussian(tau=4.0))
    return model, pd.laplace(model, {"weight": torch.ones(1, 3), "bias": torch.zeros(1)}, x, y), x, y


@pytest.mark.parametrize("fault", ["shape", "columns", "nan"])
def test_a_training_that_does_not_begin_leaves_the_curvature(fault: str) -> None:
    model, guide, x, y = _finished()
    before = pd.predict(model, guide, x, method="linearised").epistemic
    data = {"shape": (x, y[:, 0]), "columns": (x[:, :2], y), "nan": (x.where(x < 1, torch.nan), y)}[fault]
    with pytest.raises((pd.errors.PyroDropoutError, RuntimeError)):
        pd.fit(model, guide, *data, steps=5, compile=False, progress=False)
    assert guide.finished
    assert pd.predict(model, guide, x, method="linearised").epistemic.equal(before)


@pytest.mark.parametrize("method", ["mc", "linearised"])
def test_a_prediction_without_curvature_says_so(method: Any) -> None:
    model, guide, x, _ = _finished()
    unfinished = pd.guides.AutoLaplace(model)
    with pytest.warns(UserWarning, match="AutoLaplace has no curvature yet") as told:
        assert not pd.predict(model, unfinished, x, method=method, samples=3).epistemic.any()
    assert told[0].filename == __file__
    pd.predict(model, unfinished, x, method="standard")  # asks for no uncertainty, and does not warn
    assert pd.predict(model, guide, x, method=method).epistemic.all()


@pytest.mark.parametrize("standardised", [False, True])
def test_a_noise_that_was_trained_since_is_noticed(standardised: bool) -> None:
    x = torch.randn(40, 3)
    y = x.sum(1, keepdim=True)
    net = pd.BayesianNet(nn.Linear(3, 1), likelihood=pd.Gaussian(tau=4.0, learn=True))
    model: Any = pd.Standardised(net, x, y) if standardised else net
    guide = pd.laplace(model, model, x, y)
    pd.predict(model, guide, x, method="linearised")
    pd.fit(model, pd.AutoDropout(model, keep=0.5), x, y, steps=20, lr=0.1, **QUIET)
    with pytest.warns(UserWarning, match=r"measured with tau .*4\.0"):
        pd.predict(model, guide, x, method="linearised")


def test_a_file_without_room_leaves_the_curvature(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory may not be there; the guide would be points then, without a word."""
    _, guide, _, _ = _finished()
    kept = guide.state_dict()
    monkeypatch.setattr("pyro_dropout.guides.laplace.groups_of", lambda *_: torch.empty(2**60))
    with pytest.raises(RuntimeError):
        guide.load_state_dict(kept)
    assert guide.finished
