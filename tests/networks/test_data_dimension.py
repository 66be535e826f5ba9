"""A draw for each data point needs the data's dimension, which a size alone does not tell: N may equal another one."""

import warnings
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pyro_dropout as pd
from pyro_dropout.errors import NotFollowedError
from tests.networks.agreement import per_point
from tests.networks.layers import Output

N = 5


class RelativeBias(nn.Module):
    """Swin's: a layer maps a table of relative positions, a buffer, to the bias of the attention."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, N)
        self.register_buffer("table", torch.randn(N, 2))

    def forward(self, x: Tensor) -> Tensor:
        return (self.net(self.table) @ x.unsqueeze(-1)).squeeze(-1)


def summed_positions(net: Any, x: Tensor) -> Tensor:
    """A table of positions, looked up and summed: one number for all data points."""
    return x[:, :1] + torch.einsum("td->d", net(torch.zeros(N, dtype=torch.long)))


def state_of_zeros(net: Any, x: Tensor) -> Tensor:
    """A state that does not depend on the values of x, but has a row for each data point."""
    h = torch.zeros(len(x), 3)
    for t in range(x.shape[1]):
        h = torch.tanh(net(h) + x[:, t : t + 1])
    return h


WRONG: dict[str, Callable[[], nn.Module]] = {
    "positions": lambda: Output(nn.Embedding(1, 1), summed_positions),
    "relative bias": RelativeBias,
}


def hide_queries(name: str, module: nn.Module) -> bool:
    return isinstance(module, nn.BatchNorm1d)


def pair(net: nn.Module) -> tuple[pd.BayesianNet, pd.AutoDropout]:
    model = pd.BayesianNet(net, pd.Prior(hide=hide_queries))
    return model, pd.AutoDropout(model, keep=0.5, bias="dropout")


@pytest.mark.parametrize("name", WRONG)
def test_a_dimension_of_the_same_size_is_not_the_data(name: str) -> None:
    model, guide = pair(WRONG[name]())
    with pytest.raises(NotFollowedError, match=r"'net\.(weight|bias)'.*not.* data points"):
        per_point(model, guide, torch.randn(N, N))


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.thinned(3)
def test_training_and_predictions_share_the_draw_then(name: str) -> None:
    model, guide = pair(WRONG[name]())
    x = torch.randn(N, N)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        pd.fit(model, guide, x, torch.zeros(len(x), model(x).shape[1]), steps=1, compile=False, progress=False)
    assert "all points share each draw" in str(told[0].message)
    with pytest.raises(pd.errors.PyroDropoutError, match=r"Write predict\(\.\.\., shared=True\)"):
        pd.predict(model, guide, x, samples=2)


def test_rows_of_the_data_need_not_depend_on_its_values() -> None:
    model, guide = pair(Output(nn.Linear(3, 3), state_of_zeros))
    x = torch.ones(N, 4)
    assert len(per_point(model, guide, x).unique(dim=0)) > 1


def test_the_trial_leaves_no_trace() -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    x = torch.randn(N, 4)
    results, states = [], []
    pd.ELBO().differentiable_loss(*pair(net), x, x[:, :1]).backward()  # the statistics are as the gradient needs them
    model, guide = pair(net)
    for _ in range(2):  # the second time there is no trial
        net[1].reset_running_stats()
        torch.manual_seed(0)
        results.append(per_point(model, guide, x))
        states.append(torch.cat([net[1].running_mean, torch.rand(1)]))
    assert torch.equal(*results)
    assert torch.equal(*states)


def test_a_network_for_one_number_of_points_is_refused() -> None:
    model, guide = pair(Output(nn.Linear(N, 1), lambda net, x: net(x.reshape(N, N))))
    with pytest.raises(NotFollowedError, match="runs with 5 data points but not with 3"):
        per_point(model, guide, torch.randn(N, N))


def test_in_a_pyro_model_too() -> None:
    def model(x: Tensor, y: Tensor) -> None:
        weight = pyro.sample("weight", dist.Normal(0.0, 1.0).expand([2, 3]).to_event(2))
        bias = F.linear(torch.ones(N, 3), weight)  # a table of positions
        with pyro.plate("data", len(x), dim=-1):
            pyro.sample("y", dist.Normal(torch.einsum("nt,td->n", x, bias), 1.0), obs=y)

    guide = pd.AutoDropout(model, keep=0.5)
    x, y = torch.randn(N, N), torch.randn(N)
    guide(x, y)
    with pytest.raises(NotFollowedError, match=r"'weight' .* reaches"):
        pd.ELBO().loss(model, guide, x, y)
