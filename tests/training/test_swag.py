"""SWAG: the guide has the moments of the trajectory, and what has no trajectory is refused."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pyro_dropout as pd
from pyro_dropout.training.batches import Batches

F64 = torch.float64
QUIET: Any = {"compile": False, "progress": False, "seed": 0}


def line(points: int = 40) -> tuple[pd.BayesianNet, dict[str, Tensor], Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(points, 2, dtype=F64)
    y = x @ torch.tensor([[1.0], [-2.0]], dtype=F64) + torch.randn(points, 1, dtype=F64)
    model = pd.BayesianNet(nn.Linear(2, 1, bias=False).double(), likelihood=pd.Gaussian(tau=1.0))
    exact = pd.references.conjugate(model, x, y).mean()
    return model, exact, x, y


def covariance(guide: Any) -> Tensor:
    root = guide.covariance_root({"weight": torch.eye(2, dtype=F64).reshape(2, 1, 2)})
    return root @ root.mT


def test_the_guide_has_the_moments_of_the_trajectory() -> None:
    model, exact, x, y = line()
    rank, rate, batch = 6, 1e-3, 10
    guide = pd.swag(model, exact, x, y, rank=rank, steps=40, lr=rate, batch_size=batch, every=4, **QUIET)
    assert (guide.per, guide.rank, guide.model) == ("net", rank, model)
    # the same steps by hand, with momentum
    torch.manual_seed(0)
    rows = Batches(batch, torch.arange(len(x)))
    w, velocity, seen = exact["weight"].clone(), 0.0, []
    for step in range(40):
        index = rows.take(1)[0]
        slope = -(len(x) / batch) * (y[index] - x[index] @ w.T).T @ x[index] + w
        velocity = 0.9 * velocity + slope
        w = w - rate * velocity
        if (step + 1) % 4 == 0:
            seen.append(w.flatten())
    track = torch.stack(seen)
    last = track[-rank:] - track.mean(0)
    wanted = 0.5 * torch.diag(track.var(0)) + last.T @ last / (2 * (rank - 1))
    assert torch.allclose(guide.mean()["weight"].flatten(), track.mean(0), atol=1e-12)
    assert torch.allclose(covariance(guide), wanted, rtol=1e-8)


def test_ordinary_parameters_end_at_their_mean() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 4), nn.LayerNorm(4), nn.Linear(4, 1))
    model = pd.BayesianNet(net)
    x = torch.randn(20, 2)
    start = net[1].weight.detach().clone()
    pd.swag(model, pd.AutoMeanField(model), x, x[:, :1], rank=2, steps=20, lr=1e-3, batch_size=5, **QUIET)
    last = net[1].weight.detach().clone()
    assert not torch.equal(start, last)
    assert net[1].weight.requires_grad


def test_what_has_no_trajectory_is_refused() -> None:
    model, exact, x, y = line()
    how: Any = {"rank": 3, "steps": 30, "lr": 1e-3, "batch_size": 10, **QUIET}
    for change, words in (
        ({"batch_size": 40}, "fewer|less than the 40 points"),
        ({"steps": 11}, r"steps must be at least 12: 3 deviations need as many weights, one every 4 steps; got 11"),
        ({"rank": 1}, "rank must be a whole number of at least 2"),
        ({"lr": 0.0}, "lr must be positive"),
        ({"lr": 1e-30}, "SGD has not moved 'weight'"),
        ({"every": 0}, "every must be"),
    ):
        with pytest.raises(pd.errors.PyroDropoutError, match=words):
            pd.swag(model, exact, x, y, **{**how, **change})
    with pytest.raises(pd.errors.DivergedError):
        pd.swag(model, exact, x, y, **{**how, "lr": 1e3, "steps": 400})
    with pytest.raises(pd.errors.PyroDropoutError, match=r"swag is for a BayesianNet.* got <lambda>"):
        pd.swag(lambda x, y: None, exact, x, y, **how)  # type: ignore[arg-type, return-value]
    deep: Any = pd.paper.DeepGP(2, [3], 1)
    for verb, more in ((pd.swag, how), (pd.laplace, {})):
        with pytest.raises(pd.errors.PyroDropoutError, match="a BayesianNet, or one inside Standardised; got DeepGP"):
            verb(deep, exact, x, y, **more)
    normal = pd.BayesianNet(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).double())
    start = pd.AutoMeanField(normal)
    with pytest.raises(pd.errors.PyroDropoutError, match="statistics of '1' move"):
        pd.swag(normal, start, x, y, **how)
    pd.swag(normal.eval(), start, x, y, **how)
    learned = pd.BayesianNet(model.net, pd.Prior(learn=True, tempered=False))
    with pytest.raises(pd.errors.PyroDropoutError, match="cannot be learned"):
        pd.swag(learned, exact, x, y, **how)
