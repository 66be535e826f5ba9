"""Networks with inputs other than one tensor of numbers, and with outputs other than one tensor, through every door."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pyro_dropout as pd
from tests.networks.layers import Output

QUIET: dict[str, Any] = {"compile": False, "progress": False}
N = 12


class TwoInputs(nn.Module):
    """Adds a table of words, given by number, to a linear function of other inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.numbers = nn.Embedding(5, 3), nn.Linear(2, 3)
        self.out = nn.Linear(3, 1)

    def forward(self, ids: Tensor, numbers: Tensor, flip: bool = False) -> dict[str, Tensor | None]:
        f = self.out(torch.tanh(self.words(ids).mean(1) + self.numbers(numbers)))
        return {"loss": None, "logits": -f if flip else f}


@pytest.fixture
def data() -> tuple[dict[str, Any], Tensor]:
    x = {"ids": torch.arange(N * 2).reshape(N, 2) % 5, "numbers": torch.randn(N, 2)}
    return x, x["numbers"][:, :1] + 0.1 * torch.randn(N, 1)


def made(**options: Any) -> pd.BayesianNet:
    return pd.BayesianNet(TwoInputs(), likelihood=pd.Gaussian(tau=4.0), output="logits", **options)


def as_one_tensor(model: pd.BayesianNet) -> pd.BayesianNet:
    """The same network with everything in the columns of one tensor: the oracle."""
    net = Output(model.net, lambda net, x: net(x[:, :2].long(), x[:, 2:])["logits"])
    return pd.BayesianNet(net, likelihood=model.likelihood)


@pytest.mark.parametrize("form", ["dict", "tuple"])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.deep
def test_several_inputs_train_and_predict_as_one_tensor_does(data: Any, form: str, shared: bool) -> None:
    x, y = data
    flat = torch.cat([x["ids"].float(), x["numbers"]], 1)
    torch.manual_seed(3)
    model = made()
    other = as_one_tensor(made())
    other.load_state_dict(
        {k.replace("net.", "net.net.").replace("scale/", "scale/net/"): v for k, v in model.state_dict().items()}
    )
    options = {"steps": 20, "batch_size": 5, "lr": 0.01, "seed": 1, **QUIET}
    given = x if form == "dict" else tuple(x.values())
    guide, oracle = pd.AutoDropout(model, keep=0.8), pd.AutoDropout(other, keep=0.8)
    history, wanted = pd.fit(model, guide, given, y, **options), pd.fit(other, oracle, flat, y, **options)
    torch.testing.assert_close(history.losses, wanted.losses)
    asked = {"samples": 40, "seed": 2, "shared": shared, "chunk": 7}
    answer, expected = pd.predict(model, guide, given, **asked), pd.predict(other, oracle, flat, **asked)
    torch.testing.assert_close(answer.mean, expected.mean)
    torch.testing.assert_close(answer.log_prob(y), expected.log_prob(y))


# --- outputs ----------------------------------------------------------------------------------------------------------


@dataclass
class Result:
    """What the networks of some libraries return."""

    logits: Tensor
    hidden: Tensor


@pytest.mark.parametrize(
    ("wrap", "output"),
    [(Result, "logits"), (lambda f, h: {"f": f, "h": h}, "f"), (lambda f, h: (h, f), 1), (lambda f, h: [h, f], -1)],
)
def test_an_output_is_picked_by_key_attribute_or_index(wrap: Any, output: Any) -> None:
    layer, x = nn.Linear(2, 1), torch.randn(4, 2)
    net = Output(layer, lambda net, x: wrap(net(x), x))
    model = pd.BayesianNet(net, output=output)
    torch.testing.assert_close(model.evaluate({}, x), layer(x))
    with pytest.raises(pd.errors.ShapeError, match="say which of them are its outputs"):
        pd.BayesianNet(net).evaluate({}, x)
    with pytest.raises(pd.errors.ShapeError, match="net has no output 'missing'"):
        pd.BayesianNet(net, output="missing").evaluate({}, x)


def test_an_index_never_picks_a_row_of_one_tensor() -> None:
    with pytest.raises(pd.errors.ShapeError, match="net returns one tensor"):
        pd.BayesianNet(nn.Linear(2, 2), output=0).evaluate({}, torch.randn(4, 2))


# --- all points at once -----------------------------------------------------------------------------------------------


def graph() -> nn.Module:
    """A layer in which each node sees its neighbours: h = A (x W), A a ring."""
    ring = (torch.eye(N) + torch.eye(N).roll(1, 0)) / 2
    return Output(
        nn.ModuleList([nn.Linear(2, 6), nn.Linear(6, 1)]), lambda net, x: net[1](torch.tanh(ring @ net[0](x)))
    )


def test_a_graph_network_predicts_all_its_points_at_once() -> None:
    x = torch.randn(N, 2)
    y = x.roll(1, 0)[:, :1]
    model = pd.BayesianNet(graph(), likelihood=pd.Gaussian(tau=10.0), whole_batch=True)
    guide = pd.AutoDropout(model, keep=0.9)
    pd.fit(model, guide, x, y, steps=20, lr=0.03, validation=(x, y), check_every=10, **QUIET)
    answer = pd.predict(model, guide, x, samples=30, seed=0, chunk=5)
    torch.manual_seed(0)
    with torch.no_grad():
        wanted = model.evaluate(guide.sample_weights(30), x)
    assert answer.samples.shape == wanted.shape
    torch.testing.assert_close(answer.mean.mean(), wanted.mean(), atol=0.1, rtol=0)  # 30 draws, far below their spread
    with pytest.raises(pd.errors.PyroDropoutError, match="batch_size must be left out"):
        pd.fit(model, guide, x, y, steps=1, batch_size=3, **QUIET)
    with pytest.raises(pd.errors.PyroDropoutError, match="takes all its points at once"):
        pd.fit(model, guide, x, y, steps=1, loss=pd.ELBO(), **QUIET)


def batch_alone() -> nn.Module:
    """A network that normalises with its batch in evaluation mode too."""
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3, track_running_stats=False), nn.Linear(3, 1))


def mixed() -> nn.Module:
    """A network that subtracts the mean of its batch: it runs on any points, and differs with them."""
    return Output(nn.Linear(2, 1), lambda net, x: net(x - x.mean(0)))


@pytest.mark.parametrize(
    ("net", "says"),
    [
        (batch_alone, "not on one of them|changes with"),
        (graph, "but not on one of them"),
        (mixed, "changes with the point beside it"),
    ],
)
def test_a_network_that_mixes_points_is_noticed(net: Callable[[], nn.Module], says: str) -> None:
    x = torch.randn(N, 2)
    model = pd.BayesianNet(net())
    guide = pd.AutoDropout(model)
    guide(x, torch.zeros(N, 1))
    with pytest.raises(pd.errors.PyroDropoutError, match=says):
        pd.predict(model, guide, x, samples=3)


def test_edges_belong_to_all_nodes_of_a_graph() -> None:
    class Edges(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            h = self.layer(x)
            return h.index_add(0, edges[1], h[edges[0]])

    x, edges = torch.randn(N, 2), torch.stack([torch.arange(N - 1), torch.arange(1, N)])
    model = pd.BayesianNet(Edges(), whole_batch=True)
    guide = pd.AutoDropout(model, keep=0.9)
    pd.fit(model, guide, (x, edges), torch.zeros(N, 1), steps=2, **QUIET)
    assert pd.predict(model, guide, (x, edges), samples=7).mean.shape == (N, 1)
    with pytest.raises(pd.errors.ShapeError, match=r"x\[1\] must have a row for each of 12 data points"):
        pd.BayesianNet(Edges())((x, edges))
