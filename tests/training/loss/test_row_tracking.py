"""Which uses of a weight ``per_example`` follows; of all others it says so, and nothing of the user's is written on."""

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

from pyro_dropout import ELBO, AutoDropout, AutoMeanField, BayesianNet, per_example
from pyro_dropout.errors import NotFollowedError, PyroDropoutError, ShapeError
from tests.networks.agreement import masked, per_point
from tests.networks.layers import Output, Parts

N = 5


def program(use: Callable[..., Any]) -> Callable[..., Any]:
    """A model with square matrices w and v, in which a wrong orientation is not a wrong shape, and a bias b.

    ``use`` says what y is normal about, or observes by itself.
    """

    def model(x: Tensor, y: Tensor) -> Any:
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([2, 2]).to_event(2))
        v = pyro.sample("v", dist.Normal(0.0, 1.0).expand([2, 2]).to_event(2))
        b = pyro.sample("b", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        f = use(x, w, v, b)
        if isinstance(f, Tensor):
            with pyro.plate("data", len(f)):
                pyro.sample("y", dist.Normal(f, 1.0).to_event(1), obs=y[: len(f)])
        return f

    return model


def outputs(model: Any, guide: Any, x: Tensor) -> Tensor:
    guide(x, x)
    return per_point(model, guide, x, x)


# --- what is followed -------------------------------------------------------------------------------------------------

MASKED: dict[str, Callable[..., Tensor]] = {
    "x @ w": lambda x, w, v, b: x @ w,
    "mm": lambda x, w, v, b: x.mm(w),
    "x @ w.T": lambda x, w, v, b: x @ w.T,
    "x @ w.T.T": lambda x, w, v, b: x @ w.T.mT,
    "linear": lambda x, w, v, b: F.linear(x, w),
    "linear with w.t()": lambda x, w, v, b: F.linear(x, w.t()),
    "two positions": lambda x, w, v, b: (torch.stack([x, x], 1) @ w)[:, 1],
}


@pytest.mark.parametrize("row_dim", [0, 1])
@pytest.mark.parametrize("use", MASKED)
def test_each_point_has_masked_weights(use: str, row_dim: int) -> None:
    """Every output is that of one of the four masked matrices; all four appear (all but once in 10⁴ runs)."""
    model, x = program(MASKED[use]), torch.randn(40, 2)
    guide = AutoDropout(model, keep=0.5, row_dim=row_dim)
    f = outputs(model, guide, x)
    q = guide.posterior("w")
    each = [MASKED[use](x, weight, None, None) for weight in masked(q)]
    hits = torch.stack([torch.isclose(f, one, atol=1e-6).all(-1) for one in each])
    assert len(hits) == 4
    assert hits.any(0).all()
    assert hits.any(1).all()


@pytest.mark.parametrize(
    "use",
    [
        lambda x, w, v, b: x @ w + b,
        lambda x, w, v, b: torch.add(b, x @ w),
        lambda x, w, v, b: F.linear(x, torch.eye(2), b) + 0 * (x @ w),
    ],
)
def test_each_point_has_a_bias_of_its_own(use: Callable[..., Tensor]) -> None:
    model, x = program(use), torch.zeros(40, 2)
    assert len(outputs(model, AutoMeanField(model), x).unique(dim=0)) == 40


def _some(x: Tensor, w: Tensor, v: Tensor, b: Tensor) -> None:
    f, seen = x @ w, torch.tensor([True, False, True, True, False])
    pyro.sample("y", dist.Normal(f[seen], F.softplus(f[seen])).to_event(2), obs=x[seen])


def _groups(x: Tensor, w: Tensor, v: Tensor, b: Tensor) -> None:
    group = torch.tensor([0, 1, 1, 0, 1, 1, 0, 0])
    level = F.linear(torch.ones(2, 2), w)  # one row for each group
    with pyro.plate("data", 8):
        pyro.sample("y", dist.Normal(level[group].sum(-1), 1.0), obs=torch.zeros(8))


def _built_up(x: Tensor, w: Tensor, v: Tensor, b: Tensor) -> Tensor:
    room = torch.zeros(len(x), 2)
    room[:, 0] = (x @ w)[:, 1]
    room[:, 1] = (x @ w)[..., 0]
    return room


FOLLOWED: dict[str, Callable[..., Any]] = {
    "in place": _built_up,
    "reshaped": lambda x, w, v, b: (x @ w).T.reshape(2, -1).T,
    "the larger of two": lambda x, w, v, b: torch.max(x @ w, x),
    "each turned by itself": lambda x, w, v, b: torch.stack([f.roll(1, 0) for f in (x[:2] @ w).unbind()]),
    "a check of values": lambda x, w, v, b: x @ w if torch.isfinite(x @ w).all() else x,
    "given back untouched": lambda x, w, v, b: x.type_as(w).expand_as(x) @ w.contiguous().to(x) + w.new_zeros(2),
}


@pytest.mark.parametrize("use", FOLLOWED)
def test_what_each_point_is_made_of_alone_is_followed(use: str) -> None:
    model, x = program(FOLLOWED[use]), torch.randn(N, 2)
    guide = AutoDropout(model, keep=0.5)  # without noise, so that a layer may be used twice
    assert ELBO().loss(model, guide, x, x) == pytest.approx(0, abs=1e6)


# --- draws that would get lost ----------------------------------------------------------------------------------------


def _written(x: Tensor, w: Tensor, v: Tensor, b: Tensor) -> Tensor:
    room = torch.zeros(2, 2)
    room[:] = w
    return x @ room


def _scaled_by(x: Tensor, w: Tensor, v: Tensor, b: Tensor) -> None:
    with poutine.scale(scale=w.exp().sum()):
        pyro.sample("y", dist.Normal(x, 1.0).to_event(2), obs=x)


def _observed(x: Tensor, w: Tensor, v: Tensor, b: Tensor) -> None:
    pyro.sample("y", dist.Normal(x, 1.0).to_event(2), obs=x + w.sum())


def _transformed(x: Tensor, w: Tensor, v: Tensor, b: Tensor) -> None:
    shift = dist.transforms.AffineTransform(w.sum(), 1.0)
    pyro.sample("y", dist.TransformedDistribution(dist.Normal(x, 1.0), [shift]).to_event(2), obs=x)


def _process(x: Tensor, w: Tensor, v: Tensor, b: Tensor) -> None:
    phi = torch.relu(x @ w)
    pyro.sample("y", dist.MultivariateNormal(torch.zeros(len(x)), phi @ phi.T + torch.eye(len(x))), obs=x[:, 0])


def _choice(x: Tensor, w: Tensor, v: Tensor, b: Tensor) -> None:
    pyro.sample("y", dist.Categorical(logits=(x @ w)[:, 0]), obs=torch.tensor(1))


FIRST, SECOND = torch.tensor([0, 1, 2, 3, 4]), torch.tensor([1, 2, 3, 4, 0])
LOST: dict[str, Callable[..., Any]] = {
    "elementwise": lambda x, w, v, b: x * w[0],
    "scaled": lambda x, w, v, b: x @ (2 * w),
    "from the left": lambda x, w, v, b: (w @ x.T).T,
    "einsum": lambda x, w, v, b: torch.einsum("nq,qk->nk", x, w),
    "in a list": lambda x, w, v, b: x @ torch.cat([w[:1], torch.zeros(1, 2)]),
    "written into another": _written,
    "times another weight": lambda x, w, v, b: x @ (w @ v),
    "before a layer that is followed": lambda x, w, v, b: (x * w[0]) @ v,
    "as a scaled bias": lambda x, w, v, b: F.linear(x, v, 2 * b),
    "subtracted": lambda x, w, v, b: x @ v - b,
    "for one point": lambda x, w, v, b: torch.stack([row @ w for row in x]),
    "as the likelihood's parameter": lambda x, w, v, b: b.expand(len(x), 2),
    "a scale": _scaled_by,
    "an observed value": _observed,
    "a transform": _transformed,
    "a sum over points": lambda x, w, v, b: pyro.factor("y", -(x @ w).square().sum()),
    "a Gaussian process": _process,
    "a choice among points": _choice,
    "control flow": lambda x, w, v, b: x if w.sum() > 0 else -x,
    "a number": lambda x, w, v, b: x + w.sum().item(),
    "numbers": lambda x, w, v, b: x + torch.tensor(w.tolist()).sum(),
    "numpy": lambda x, w, v, b: x + float(w.detach().numpy().sum()),
    "some points": _some,
    "groups": _groups,
    "the draw of one point for all": lambda x, w, v, b: x + (x @ w)[0],
    "pairs": lambda x, w, v, b: (x @ w)[FIRST] - (x @ w)[SECOND],
}


@pytest.mark.parametrize("use", LOST)
def test_no_way_is_left_on_which_a_draw_gets_lost(use: str) -> None:
    """Never a silent approximation: the message names the site, and what to do."""
    model, x = program(LOST[use]), torch.randn(N, 2)
    guide = AutoMeanField(model)
    assert ELBO(per_example=False).loss(model, guide, x, x) == pytest.approx(0, abs=1e6)
    with pytest.raises(NotFollowedError, match=r"'[wvb]'.*per_example=False") as caught:
        ELBO().loss(model, guide, x, x)
    assert caught.value.site in ("w", "v", "b")


def test_a_prior_that_depends_on_a_weight_is_an_error() -> None:
    def model(x: Tensor, y: Tensor | None = None) -> None:
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([2, 2]).to_event(2))
        v = pyro.sample("v", dist.Normal(w.mean(), 1.0).expand([2, 2]).to_event(2))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(x @ w @ v, 1.0).to_event(1), obs=y)

    guide, x = AutoMeanField(model), torch.randn(3, 2)
    with pytest.raises(PyroDropoutError, match=r"'w' .* reaches 'v'"):
        ELBO().loss(model, guide, x, x)


def _in_part(x: Tensor, w: Tensor, v: Tensor, b: Tensor) -> Tensor:
    x[0].add_(w.sum())
    return x @ torch.eye(2)


def _through_data(x: Tensor, w: Tensor, v: Tensor, b: Tensor) -> Tensor:
    x.data = x + w.sum()
    return x


TOUCHING: dict[str, Callable[..., Tensor]] = {
    "type_as": lambda x, w, v, b: x.type_as(w) * w[0],
    "contiguous": lambda x, w, v, b: x.contiguous() @ (2 * w),
    "add_": lambda x, w, v, b: x.add_(w.sum()),
    "+=": lambda x, w, v, b: x.__iadd__(w.sum()),
    "setitem": lambda x, w, v, b: x.__setitem__((slice(None), 0), w[0, 0]) or x,
    "a view": _in_part,
    "inplace=True": lambda x, w, v, b: F.relu(x.mul_(w.sum()), inplace=True),
    "out=": lambda x, w, v, b: torch.add(x, w.sum(), out=x),
    "data": _through_data,
    "foreach": lambda x, w, v, b: (torch._foreach_add_([x], [w.sum()]), x)[1],
}


@pytest.mark.parametrize("use", TOUCHING)
@pytest.mark.thinned(3)
def test_nothing_is_left_on_what_the_user_gave(use: str) -> None:
    """After a refusal the data have no attribute that they had not before, and other models train on them."""
    x, y = torch.randn(N, 2), torch.randn(N, 2)
    model, good = program(TOUCHING[use]), program(lambda x, w, v, b: x @ w + b)
    with pytest.raises(NotFollowedError, match=r"'w' .* reaches 'y'"):
        ELBO().loss(model, AutoMeanField(model), x, y)
    assert vars(x) == vars(y) == {}
    assert pyro.infer.SVI(good, AutoMeanField(good), pyro.optim.Adam({"lr": 0.01}), ELBO()).step(x, y) > 0


# --- a layer that is used more than once ------------------------------------------------------------------------------


def test_noise_of_a_layer_used_twice_needs_a_word() -> None:
    """With the word, outputs have the distribution of whole draws (p > 1e-6: fails one correct run in a million)."""
    model = BayesianNet(Parts(lambda net, x: net.layer(torch.tanh(net.layer(x))), layer=nn.Linear(2, 2)))
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


# --- data points first ------------------------------------------------------------------------------------------------


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
    model = BayesianNet(Output(nn.Linear(2, 2), lambda layer, x: back(layer(turn(x)))))
    with pytest.raises(ShapeError, match=r"drawn for 3 data points, .*first dimension is (4|12|1)\. Inputs must have"):
        ELBO().loss(model, make(model), torch.randn(3, 4, 2), torch.zeros(3, 2))


def test_rows_across_a_kernel_are_refused() -> None:
    model = BayesianNet(nn.Sequential(nn.Conv1d(2, 2, 3), nn.Flatten()))
    guide, x = AutoDropout(model, row_dim={"0.weight": 2}), torch.randn(3, 2, 5)
    assert ELBO(per_example=False).loss(model, guide, x, torch.zeros(3, 6)) > 0
    with pytest.raises(PyroDropoutError, match="has rows along dimension 2, which is neither its layer's input"):
        ELBO().loss(model, guide, x, torch.zeros(3, 6))
