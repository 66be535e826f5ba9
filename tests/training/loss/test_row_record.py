"""The record of ``per_example``: nothing of the user's is written on, and no draw gets lost without a word."""

from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from pyro import poutine
from torch import Tensor

from pyro_dropout import ELBO, AutoDropout, AutoMeanField, per_example
from pyro_dropout.mathematics.errors import NotFollowedError

N = 5


def program(use: Callable[..., Any]) -> Callable[..., None]:
    """A model with a matrix and a bias, in which ``use`` says what y is normal about."""

    def model(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([2, 2]).to_event(2))
        b = pyro.sample("b", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        f = use(x, w, b)
        if isinstance(f, Tensor):
            with pyro.plate("data", len(f)):
                pyro.sample("y", dist.Normal(f, 1.0).to_event(1), obs=y[: len(f)])

    return model


def loss(use: Callable[..., Any], x: Tensor, y: Tensor) -> float:
    model = program(use)
    return ELBO().loss(model, AutoMeanField(model), x, y)


GOOD: Callable[..., Tensor] = lambda x, w, b: x @ w + b  # noqa: E731


def _in_part(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    x[0].add_(w.sum())
    return x @ torch.eye(2)


def _through_data(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    x.data = x + w.sum()
    return x


TOUCHING: dict[str, Callable[..., Tensor]] = {
    "type_as": lambda x, w, b: x.type_as(w) * w[0],
    "to": lambda x, w, b: x.to(w) + w.sum(),
    "contiguous": lambda x, w, b: x.contiguous() @ (2 * w),
    "clamp of nothing": lambda x, w, b: torch.atleast_2d(x) * w.sum(),
    "add_": lambda x, w, b: x.add_(w.sum()),
    "+=": lambda x, w, b: x.__iadd__(w.sum()),
    "setitem": lambda x, w, b: x.__setitem__((slice(None), 0), w[0, 0]) or x,
    "a view": _in_part,
    "inplace=True": lambda x, w, b: F.relu(x.mul_(w.sum()), inplace=True),
    "out=": lambda x, w, b: torch.add(x, w.sum(), out=x),
    "data": _through_data,
    "foreach": lambda x, w, b: (torch._foreach_add_([x], [w.sum()]), x)[1],
}


@pytest.mark.parametrize("use", TOUCHING)
def test_nothing_is_left_on_what_the_user_gave(use: str) -> None:
    """After a refusal the data have no attribute that they had not before, and other models train on them."""
    x, y = torch.randn(N, 2), torch.randn(N, 2)
    with pytest.raises(NotFollowedError, match="cannot follow site 'w' to 'y'"):
        loss(TOUCHING[use], x, y)
    assert vars(x) == {}
    assert vars(y) == {}
    model = program(GOOD)
    svi = pyro.infer.SVI(model, AutoMeanField(model), pyro.optim.Adam({"lr": 0.01}), ELBO())
    assert svi.step(x, y) > 0


@pytest.mark.parametrize(
    "use",
    [
        lambda x, w, b: x.type_as(w) @ w + b,
        lambda x, w, b: x.to(w) @ w,
        lambda x, w, b: x.expand_as(x) @ w + torch.zeros_like(w).sum(),
        lambda x, w, b: x @ w.contiguous().to(x),
        lambda x, w, b: (x + w.new_zeros(2)) @ w + b,
    ],
)
def test_what_is_given_back_untouched_is_untouched(use: Callable[..., Tensor]) -> None:
    assert loss(use, torch.randn(N, 2), torch.randn(N, 2)) > 0


def test_a_context_can_be_used_again_and_not_within_itself() -> None:
    x, y = torch.randn(N, 2), torch.randn(N, 2)
    model, context = program(GOOD), per_example()
    guide = AutoMeanField(model)
    guide(x, y)
    for _ in range(2):
        with context:
            poutine.replay(model, trace=poutine.trace(guide).get_trace(x, y))(x, y)
    with context, pytest.raises(ValueError, match="twice"), context:
        pass
    assert len(torch.overrides._get_current_function_mode_stack()) == 0


# --- draws that would get lost ----------------------------------------------------------------------------------------

CENTRE = torch.tensor([0.3, -0.2])


def _scaled_by(x: Tensor, w: Tensor, b: Tensor) -> None:
    with poutine.scale(scale=w.exp().sum()):
        pyro.sample("y", dist.Normal(x, 1.0).to_event(2), obs=x)


def _observed(x: Tensor, w: Tensor, b: Tensor) -> None:
    pyro.sample("y", dist.Normal(x, 1.0).to_event(2), obs=x + w.sum())


def _transformed(x: Tensor, w: Tensor, b: Tensor) -> None:
    shift = dist.transforms.AffineTransform(w.sum(), 1.0)
    pyro.sample("y", dist.TransformedDistribution(dist.Normal(x, 1.0), [shift]).to_event(2), obs=x)


def _total(x: Tensor, w: Tensor, b: Tensor) -> None:
    pyro.sample("y", dist.Normal((x @ w).sum(), 1.0), obs=torch.tensor(1.0))


def _joint(x: Tensor, w: Tensor, b: Tensor) -> None:
    pyro.sample("y", dist.MultivariateNormal((x @ w)[:, 0], torch.eye(len(x))), obs=torch.zeros(len(x)))


def _process(x: Tensor, w: Tensor, b: Tensor) -> None:
    phi = torch.relu(x @ w)
    pyro.sample("y", dist.MultivariateNormal(torch.zeros(len(x)), phi @ phi.T + torch.eye(len(x))), obs=x[:, 0])


def _choice(x: Tensor, w: Tensor, b: Tensor) -> None:
    pyro.sample("y", dist.Categorical(logits=(x @ w)[:, 0]), obs=torch.tensor(2))


def _factor(x: Tensor, w: Tensor, b: Tensor) -> None:
    pyro.factor("y", -(x @ w).square().sum())


def _branch(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return x if w.sum() > 0 else -x


FIRST, SECOND = torch.tensor([0, 1, 2, 3, 4]), torch.tensor([1, 2, 3, 4, 0])
LOST: dict[str, Callable[..., Any]] = {
    "a scale": _scaled_by,
    "an observed value": _observed,
    "a transform": _transformed,
    "a sum over points": _total,
    "a joint normal": _joint,
    "a Gaussian process": _process,
    "a choice among points": _choice,
    "a factor": _factor,
    "control flow": _branch,
    "a number": lambda x, w, b: x + w.sum().item(),
    "numbers": lambda x, w, b: x + torch.tensor(w.tolist()).sum(),
    "numpy": lambda x, w, b: x + float(w.detach().numpy().sum()),
    "less the mean": lambda x, w, b: x @ w - (x @ w).mean(0),
    "less the mean of as many": lambda x, w, b: x[:2] @ w - (x[:2] @ w).mean(dim=0),
    "the largest": lambda x, w, b: x @ w / torch.amax(x @ w, 0),
    "in order of size": lambda x, w, b: torch.sort(input=x @ w, dim=0)[0],
    "pairs": lambda x, w, b: (x @ w)[FIRST] - (x @ w)[SECOND],
    "the one before": lambda x, w, b: x @ w + (x @ w).flip(0),
    "softmax over points": lambda x, w, b: torch.softmax(x @ w, 0),
    "products of points": lambda x, w, b: x @ (x @ w).T @ x,
}


@pytest.mark.parametrize("use", LOST)
def test_no_way_is_left_on_which_a_draw_gets_lost(use: str) -> None:
    model, x = program(LOST[use]), torch.randn(N, 2)
    guide = AutoMeanField(model)
    assert ELBO(per_example=False).loss(model, guide, x, x) == pytest.approx(0, abs=1e6)
    with pytest.raises(NotFollowedError, match=r"'[wb]'.*per_example=False") as caught:
        ELBO().loss(model, guide, x, x)
    assert caught.value.site in ("w", "b")


def _some(x: Tensor, w: Tensor, b: Tensor) -> None:
    f, seen = x @ w, torch.tensor([True, False, True, True, False])
    pyro.sample("y", dist.Normal(f[seen], torch.nn.functional.softplus(f[seen])).to_event(2), obs=x[seen])


def _groups(x: Tensor, w: Tensor, b: Tensor) -> None:
    group = torch.tensor([0, 1, 1, 0, 1, 1, 0, 0])
    level = F.linear(torch.ones(2, 2), w)  # one row for each group
    with pyro.plate("data", 8):
        pyro.sample("y", dist.Normal(level[group].sum(-1), 1.0), obs=torch.zeros(8))


def _built_up(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    room = torch.zeros(len(x), 2)
    room[:, 0] = (x @ w)[:, 1]
    room[:, 1] = (x @ w)[..., 0]
    return room


FOLLOWED: dict[str, Callable[..., Any]] = {
    "columns": lambda x, w, b: torch.stack([(x @ w)[:, 0], (x @ w)[:, 1]], -1),
    "parts": lambda x, w, b: torch.cat((x @ w).chunk(2, -1), -1),
    "some points": _some,
    "groups": _groups,
    "in place": _built_up,
    "reshaped": lambda x, w, b: (x @ w).T.reshape(2, -1).T,
    "the draw of one point for all": lambda x, w, b: x + (x @ w)[0],
    "the mean of two layers": lambda x, w, b: torch.stack([x @ w, torch.relu(x @ w)]).mean(0),
    "the larger of two": lambda x, w, b: torch.max(x @ w, x),
    "less each own mean": lambda x, w, b: x @ w - (x @ w).mean(-1, keepdim=True),
    "softmax of each": lambda x, w, b: torch.softmax(x @ w, -1),
    "a check of values": lambda x, w, b: x @ w if torch.isfinite(x @ w).all() else x,
}


@pytest.mark.parametrize("use", FOLLOWED)
def test_what_each_point_is_made_of_alone_is_followed(use: str) -> None:
    model, x = program(FOLLOWED[use]), torch.randn(N, 2)
    guide = AutoDropout(model, keep=0.5)  # without noise, so that a layer may be used twice
    assert ELBO().loss(model, guide, x, x) == pytest.approx(0, abs=1e6)
