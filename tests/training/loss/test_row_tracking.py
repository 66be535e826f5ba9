"""Which uses of a weight ``per_example`` can follow, and what it says of those that it cannot."""

import itertools
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from pyro import poutine
from scipy import stats
from torch import Tensor, nn
from torch.func import vmap

from pyro_dropout import ELBO, AutoDropout, AutoMeanField, BayesianNet, PyroDropoutError, ShapeError, per_example

N = 40


def weight_model(use: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A Pyro model with square matrices W and V and a bias b, in which a wrong orientation is not a wrong shape."""

    def model(x: Tensor, y: Tensor | None = None) -> Tensor:
        w = pyro.sample("W", dist.Normal(0.0, 1.0).expand([2, 2]).to_event(2))
        v = pyro.sample("V", dist.Normal(0.0, 1.0).expand([2, 2]).to_event(2))
        b = pyro.sample("b", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        f = use(x, w, v, b)
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(f, 1.0).to_event(1), obs=y)
        return f

    return model


FOLLOWED: dict[str, Callable[..., Tensor]] = {
    "x @ W": lambda x, w, v, b: x @ w,
    "matmul": lambda x, w, v, b: torch.matmul(x, w),
    "mm": lambda x, w, v, b: x.mm(w),
    "x @ W.T": lambda x, w, v, b: x @ w.T,
    "x @ W.T.T": lambda x, w, v, b: x @ w.T.mT,
    "linear": lambda x, w, v, b: F.linear(x, w),
    "linear with W.T": lambda x, w, v, b: F.linear(x, w.T),
    "linear with W.t()": lambda x, w, v, b: F.linear(x, w.t()),
    "two positions": lambda x, w, v, b: (torch.stack([x, x], 1) @ w)[:, 1],
}


@pytest.mark.parametrize("row_dim", [0, 1])
@pytest.mark.parametrize("use", FOLLOWED)
def test_each_point_has_masked_weights(use: str, row_dim: int) -> None:
    """Every output is that of one of the four masked matrices; all four appear (all but once in 10⁴ runs)."""
    model = weight_model(FOLLOWED[use])
    guide, x = AutoDropout(model, keep=0.5, row_dim=row_dim), torch.randn(N, 2)
    guide(x, x)
    with per_example():
        f = poutine.replay(model, trace=poutine.trace(guide).get_trace(x, x))(x, x)
    q = guide.posterior("W")
    hits = []
    for kept in itertools.product((0.0, 1.0), repeat=2):
        weight = q.loc * q.per_row(torch.tensor(kept))
        hits.append(torch.isclose(f, FOLLOWED[use](x, weight, None, None), atol=1e-6).all(-1))
    assert torch.stack(hits).any(0).all()
    assert torch.stack(hits).any(1).all()


BIASES: dict[str, Callable[..., Tensor]] = {
    "x @ W + b": lambda x, w, v, b: x @ w + b,
    "b + x @ W": lambda x, w, v, b: b + x @ w,
    "add": lambda x, w, v, b: torch.add(x @ w, b),
    "linear": lambda x, w, v, b: F.linear(x, w, b),
    "of fixed weights": lambda x, w, v, b: F.linear(x, torch.eye(2), b) + 0 * (x @ w),
}


@pytest.mark.parametrize("use", BIASES)
def test_each_point_has_a_bias_of_its_own(use: str) -> None:
    model, x = weight_model(BIASES[use]), torch.zeros(N, 2)
    guide = AutoMeanField(model)
    guide(x, x)
    with per_example():
        f = poutine.replay(model, trace=poutine.trace(guide).get_trace(x, x))(x, x)
    assert len(f.unique(dim=0)) == N


def _written(x: Tensor, w: Tensor) -> Tensor:
    room = torch.zeros(2, 2)
    room[:] = w
    return x @ room


UNFOLLOWED: dict[str, Callable[..., Tensor]] = {
    "elementwise": lambda x, w, v, b: x * w[0],
    "scaled": lambda x, w, v, b: x @ (2 * w),
    "summed": lambda x, w, v, b: x + w.sum(),
    "from the left": lambda x, w, v, b: (w @ x.T).T,
    "einsum": lambda x, w, v, b: torch.einsum("nq,qk->nk", x, w),
    "in a list": lambda x, w, v, b: x @ torch.cat([w[:1], torch.zeros(1, 2)]),
    "in parts": lambda x, w, v, b: x[:, :1] @ w.chunk(2)[0],
    "written into another": lambda x, w, v, b: _written(x, w),
    "added in place": lambda x, w, v, b: x.clone().add_(w.mean()),
    "times another weight": lambda x, w, v, b: x @ (w @ v),
    "as the input of a layer": lambda x, w, v, b: x + F.linear(w, v).sum(),
    "before a layer that is followed": lambda x, w, v, b: (x * w[0]) @ v,
    "as a scaled bias": lambda x, w, v, b: F.linear(x, v, 2 * b),
    "subtracted": lambda x, w, v, b: x @ v - b,
    "for one point": lambda x, w, v, b: torch.stack([row @ w for row in x]),
    "as the likelihood's parameter": lambda x, w, v, b: b,
}


@pytest.mark.parametrize("use", UNFOLLOWED)
def test_what_cannot_be_followed_is_an_error(use: str) -> None:
    """Never a silent approximation: the message names the site and the operation, and what to do."""
    model, x = weight_model(UNFOLLOWED[use]), torch.randn(2, 2)
    guide = AutoMeanField(model)
    assert ELBO(per_example=False).loss(model, guide, x, x) > 0
    with pytest.raises(
        PyroDropoutError, match=r"cannot follow site '[WVb]' to 'y': it went through .*per_example=False"
    ):
        ELBO().loss(model, guide, x, x)


def test_a_prior_that_depends_on_a_weight_is_an_error() -> None:
    def model(x: Tensor, y: Tensor | None = None) -> None:
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([2, 2]).to_event(2))
        v = pyro.sample("v", dist.Normal(w.mean(), 1.0).expand([2, 2]).to_event(2))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(x @ w @ v, 1.0).to_event(1), obs=y)

    guide, x = AutoMeanField(model), torch.randn(3, 2)
    with pytest.raises(PyroDropoutError, match="cannot follow site 'w' to 'v'"):
        ELBO().loss(model, guide, x, x)


# --- a layer that is used more than once ------------------------------------------------------------------------------


class Again(nn.Module):
    """One layer, applied twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.layer(x)))


def test_noise_of_a_layer_used_twice_needs_a_word() -> None:
    """With the word, outputs have the distribution of whole draws (p > 1e-6: fails one correct run in a million)."""
    model = BayesianNet(Again())
    guide, x = AutoMeanField(model, init_scale=0.7), torch.randn(1, 2)
    with pytest.raises(PyroDropoutError, match=r"'layer.weight' is used twice.*per_example=False"):
        ELBO().loss(model, guide, x, x)
    guide(x)

    def one(_: Tensor) -> Tensor:
        with per_example(reused=True):
            return model.evaluate(guide(x), x)

    with torch.no_grad():
        mine = vmap(one, randomness="different")(torch.empty(4_000))
        whole = model.evaluate(guide.sample_weights(4_000), x)
    direction = torch.tensor([1.0, -0.5])
    assert stats.ks_2samp((mine @ direction).flatten(), (whole @ direction).flatten()).pvalue > 1e-6


def test_masks_are_kept_from_use_to_use() -> None:
    """Without noise nothing has to be said: with W = I, a layer applied twice drops what it dropped before."""
    model = BayesianNet(Again(), likelihood=None)
    guide = AutoDropout(model, keep=0.5, init=lambda name, shape: torch.eye(2) if len(shape) == 2 else torch.zeros(2))
    x = torch.ones(N, 2)
    with per_example():
        f = model.evaluate(guide(x), x)
    assert set(f.flatten().tolist()) == {0.0, torch.tanh(torch.tensor(1.0)).item()}
    assert 0.25 < (f > 0).float().mean() < 0.75  # one in four for masks of their own; N = 80 rows are within 4σ of half


# --- data points first ------------------------------------------------------------------------------------------------


class Reshaped(nn.Module):
    def __init__(self, turn: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.turn, self.back = nn.Linear(2, 2), turn, back

    def forward(self, x: Tensor) -> Tensor:
        return self.back(self.layer(self.turn(x)))


@pytest.mark.parametrize("make", [AutoDropout, AutoMeanField])
@pytest.mark.parametrize(
    ("turn", "back"),
    [
        (lambda x: x.transpose(0, 1), lambda h: h.mean(0)),
        (lambda x: x.flatten(0, 1), lambda h: h.unflatten(0, (3, 4)).mean(1)),
        (lambda x: x[:1], lambda h: h.mean(1).expand(3, 2)),
    ],
    ids=["positions first", "positions in the batch", "one point"],
)
def test_a_layer_that_meets_other_points_is_an_error(turn: Any, back: Any, make: Callable[..., Any]) -> None:
    model = BayesianNet(Reshaped(turn, back))
    with pytest.raises(ShapeError, match=r"drawn for 3 data points, .*first dimension is (4|12|1)\. Inputs must have"):
        ELBO().loss(model, make(model), torch.randn(3, 4, 2), torch.zeros(3, 2))


# --- some of the sites ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sites", [["V"], lambda name: name == "V"], ids=["names", "function"])
def test_sites_can_be_chosen(sites: Any) -> None:
    """With V alone drawn for each point, equal inputs meet one W."""
    model, x = weight_model(lambda x, w, v, b: x @ w), torch.ones(N, 2)
    guide = AutoMeanField(model)
    guide(x, x)
    for chosen, different in ((sites, 1), (None, N)):
        with per_example(chosen):
            f = poutine.replay(model, trace=poutine.trace(guide).get_trace(x, x))(x, x)
        assert len(f.unique(dim=0)) == different


def test_rows_across_a_kernel_are_refused() -> None:
    model = BayesianNet(nn.Sequential(nn.Conv1d(2, 2, 3), nn.Flatten()))
    guide, x = AutoDropout(model, row_dim={"0.weight": 2}), torch.randn(3, 2, 5)
    assert ELBO(per_example=False).loss(model, guide, x, torch.zeros(3, 6)) > 0
    with pytest.raises(PyroDropoutError, match="has rows along dimension 2, which is neither its layer's input"):
        ELBO().loss(model, guide, x, torch.zeros(3, 6))
