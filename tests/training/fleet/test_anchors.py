"""Anchored replicas of a fleet: each solves the problem of the ensemble's member with the same seed."""

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor, nn

import pyro_dropout as pd
from pyro_dropout.generative.model_call import ModelCall
from pyro_dropout.training.ensemble.anchoring import perturbation

QUIET: dict[str, Any] = {"compile": False, "progress": False}


def data(points: int = 24) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(9)
    x = torch.randn(points, 2, generator=generator, dtype=torch.float64)
    return x, x.prod(1, keepdim=True) + 0.1 * torch.randn(points, 1, generator=generator, dtype=torch.float64)


def line(tau: float = 4.0, length: float = 1.0, learn: bool = False) -> Any:
    model = pd.BayesianNet(nn.Linear(2, 1, bias=False).double(), pd.Prior(length), pd.Gaussian(tau, learn=learn))
    return model, pd.AutoDropout(model, keep=1.0)


@pytest.mark.deep
def test_a_replica_ends_where_the_ensembles_member_does() -> None:
    """A network from the same start, step by step the same."""
    x, y = data()
    net = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    model = pd.BayesianNet(net, pd.Prior(0.7), pd.Gaussian(20.0))
    ensemble = pd.Ensemble(model, members=3, seed=1)
    starts = ensemble.draws_at(torch.arange(3))

    def build(member: int) -> Any:
        own = pd.BayesianNet(nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1)).double(), pd.Prior(0.7))
        own.likelihood = pd.Gaussian(20.0)
        for name, value in starts.items():
            own.net.get_parameter(name).data = value[member].clone()
        return own, pd.AutoDropout(own, keep=1.0)

    fleet = pd.Fleet(build, {"member": [0, 1, 2]})
    fleet.fit(x, y, steps=50, lr=0.02, anchors=ensemble.seeds, **QUIET)
    pd.fit(model, ensemble, x, y, steps=50, lr=0.02, **QUIET)
    ends = ensemble.draws_at(torch.arange(3))
    for member, (_, guide) in enumerate(fleet):
        for name, value in guide.mean().items():
            torch.testing.assert_close(value, ends[name][member], rtol=1e-5, atol=1e-6)
    assert (ends["0.weight"] - starts["0.weight"]).abs().min() > 1e-3


@pytest.mark.parametrize("batch", [None, 6])
@pytest.mark.thinned(2)
def test_every_replica_has_its_own_rows_prior_and_noise(batch: int | None) -> None:
    """The optimum of a linear model in closed form: (τXᵀX + l²)⁻¹ (τXᵀ(y + ε) + l² w⁰), X the replica's rows."""
    x, y = data()
    taus, lengths, seeds = [1.0, 9.0, 9.0], [2.0, 0.5, 0.5], [5, 6, 7]
    rows = torch.stack([torch.arange(12), torch.arange(12, 24), torch.arange(0, 24, 2)])
    fleet = pd.Fleet(line, {"tau": taus, "length": lengths})
    decay = {"lr": 0.1, "schedule": lambda done: (1.1 - done / 400) ** 3}
    fleet.fit(x, y, indices=rows, steps=500, batch_size=batch, anchors=seeds, seed=0, **decay, **QUIET)
    drawn = perturbation(fleet[0][1], seeds, ModelCall(fleet[0][0], (x, y, 24)), 24)
    for k, (_, guide) in enumerate(fleet):
        own, noise = x[rows[k]], drawn["noise"]["y"][k][rows[k]] / taus[k] ** 0.5
        anchor = drawn["anchors"]["weight"][k].T / lengths[k]
        matrix = taus[k] * own.T @ own + lengths[k] ** 2 * torch.eye(2, dtype=x.dtype)
        best = torch.linalg.solve(matrix, taus[k] * own.T @ (y[rows[k]] + noise) + lengths[k] ** 2 * anchor)
        # The noise of other rows would move the optimum by 0.07 or more; mini-batches leave an error of 0.0005.
        torch.testing.assert_close(guide.mean()["weight"].T, best, rtol=0, atol=2e-3)


class Positive(nn.Module):
    """A network whose only weight is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.likelihood = pd.Gaussian(1.0)

    def sample_sites(self) -> dict[str, Tensor]:
        return {"z": pyro.sample("z", dist.LogNormal(torch.zeros((), dtype=torch.float64), 1.0))}

    def forward(self, x: Tensor, y: Tensor | None = None, num_data: int | None = None) -> None:
        z = self.sample_sites()["z"]
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(z * x[:, :1], 1.0).to_event(1), obs=y)


def positive() -> Any:
    model = Positive()
    return model, pd.AutoDropout(model, keep=1.0)


def flips() -> Any:
    model = pd.BayesianNet(nn.Linear(2, 1).double(), likelihood=pd.Bernoulli())
    return model, pd.AutoDropout(model)


@pytest.mark.filterwarnings("ignore:AutoDropout finds no weight")
@pytest.mark.parametrize(
    ("build", "words"),
    [(flips, "needs a Gaussian likelihood"), (positive, "site 'z' has a prior that is not Gaussian")],
)
def test_what_cannot_be_anchored_is_refused(build: Any, words: str) -> None:
    x, y = data(6)
    fleet = pd.Fleet(lambda replica: build(), {"replica": [0, 1]})
    with pytest.raises(pd.errors.PyroDropoutError, match=words):
        fleet.fit(x, (y > 0).double(), steps=1, anchors=[1, 2], **QUIET)
