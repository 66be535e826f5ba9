"""``ELBO(per_example="auto")``: a draw for each data point where the model allows it, and a shared one where not.

Where it is refused, everything after is as if it had not been tried: the same numbers as with ``per_example=False``.
"""

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from pyro.optim import Adam
from torch import Tensor, nn

import pyro_dropout as pd
from pyro_dropout.errors import NotFollowedError
from tests.networks.layers import Parts

pytestmark = pytest.mark.usefixtures("unchecked_shapes")
EFFECTS = torch.tensor([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
ERRORS = torch.tensor([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])


def plated_schools(y: Tensor) -> None:
    mu = pyro.sample("mu", dist.Normal(0.0, 10.0))
    tau = pyro.sample("tau", dist.HalfCauchy(10.0))
    with pyro.plate("schools", 8):
        theta = pyro.sample("theta", dist.Normal(mu, tau))
        pyro.sample("y", dist.Normal(theta, ERRORS), obs=y)


@contextmanager
def one_warning(words: str) -> Iterator[None]:
    """Within the context there is one warning, and this is what it says."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    assert [str(each.message) for each in caught if "all points share each draw" not in str(each.message)] == []
    assert len(caught) == 1
    assert re.search(words, str(caught[0].message)), str(caught[0].message)


def test_sites_in_plates_are_drawn_once_and_need_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        svi = SVI(plated_schools, pd.AutoMeanField(plated_schools), Adam({"lr": 0.05}), pd.ELBO(per_example="auto"))
        for _ in range(5):
            svi.step(EFFECTS)


# --- all that is refused ----------------------------------------------------------------------------------------------


def weights_model(use: Callable[..., Tensor], prior: Any = None) -> Callable[..., None]:
    def model(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", (prior or dist.Normal(torch.zeros(2, 2), 1.0)).to_event(2))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(use(x, w), 1.0).to_event(1), obs=y)

    return model


def matrix(x: Tensor, w: Tensor) -> Tensor:
    return x @ w


def scalar_beside(x: Tensor, y: Tensor) -> None:
    s = pyro.sample("s", dist.Normal(0.0, 1.0))
    w = pyro.sample("w", dist.Normal(torch.zeros(2, 2), 1.0).to_event(2))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(x @ w + s, 1.0).to_event(1), obs=y)


def twice() -> nn.Module:
    return Parts(lambda net, x: net.layer(net.norm(net.layer(x))), layer=nn.Linear(2, 2), norm=nn.BatchNorm1d(2))


Pair = tuple[Any, Any]


def pair(model: Any, guide: Callable[[Any], Any] = pd.AutoMeanField) -> Pair:
    return model, guide(model)


REFUSED: dict[str, tuple[Callable[[], Pair], str]] = {
    "not a layer": (lambda: pair(weights_model(lambda x, w: x @ (2 * w))), "'w' .* reaches 'y' through"),
    "a prior that is not Gaussian": (
        lambda: pair(weights_model(matrix, dist.Laplace(torch.zeros(2, 2), 1.0))),
        "'w' .* its prior is Independent, not Gaussian",
    ),
    "noise shared with a scalar": (
        lambda: pair(scalar_beside, lambda model: pd.AutoLowRank(model, rank=2, per="net")),
        "'s' .* drawn once for all of them, and shares its noise",
    ),
    "used twice": (lambda: pair(pd.BayesianNet(twice())), r"'layer.weight' .* is used twice"),
}
X, Y = torch.randn(6, 2, generator=torch.Generator().manual_seed(0)), torch.ones(6, 2)


def state(model: Any) -> list[Tensor]:
    buffers = list(model.buffers()) if isinstance(model, nn.Module) else []
    store = pyro.get_param_store()
    return [*(buffer.clone() for buffer in buffers), *(store[name].detach().clone() for name in sorted(store.keys()))]


def asked(elbo: pd.ELBO, *args: Any) -> list[Tensor]:
    """What a loss is asked for, one after another."""
    return [
        torch.as_tensor(elbo.loss(*args)),
        torch.as_tensor(elbo.loss_and_grads(*args)),
        elbo.differentiable_loss(*args).detach(),
        *elbo.parts(*args).values(),
        *elbo.by_site(*args).values(),
    ]


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_leaves_no_mark(case: str) -> None:
    """From the same seed all numbers are those of shared draws, from the first call on, buffers included."""
    make, words = REFUSED[case]
    found = []
    for per_example in ("auto", False):
        pyro.clear_param_store()
        pyro.set_rng_seed(5)
        model, guide = make()
        elbo = pd.ELBO(per_example=per_example, num_particles=3)  # type: ignore[arg-type]
        with one_warning(words) if per_example == "auto" else warnings.catch_warnings():
            values = asked(elbo, model, guide, X, Y)
        found.append([*values, *state(model), torch.rand(3)])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    with pytest.raises(NotFollowedError):
        pd.ELBO().loss(model, guide, X, Y)


def test_a_refusal_may_come_later() -> None:
    """A model that treats small batches in another way: from then on draws are shared, and said so once."""

    def use(x: Tensor, w: Tensor) -> Tensor:
        return x @ w if len(x) > 3 else x @ (1 * w)

    model, guide = pair(weights_model(use))
    elbo = pd.ELBO(per_example="auto")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        elbo.loss(model, guide, X, Y)
    pyro.set_rng_seed(1)
    with one_warning("'w' cannot be drawn"):
        mine = elbo.loss(model, guide, X[:2], Y[:2])
    pyro.set_rng_seed(1)
    assert mine == pd.ELBO(per_example=False).loss(model, guide, X[:2], Y[:2])


def test_a_loss_is_asked_anew_for_another_guide() -> None:
    elbo, (model, refused) = pd.ELBO(per_example="auto"), REFUSED["noise shared with a scalar"][0]()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        elbo.loss(model, pd.AutoMeanField(model), X, Y)
    with one_warning("'s' cannot be drawn"):
        elbo.loss(model, refused, X, Y)


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_is_that_of_a_model_and_its_guide(case: str) -> None:
    """A loss that was refused with one pair has the draws of ``per_example=True`` with another."""
    elbo, found = pd.ELBO(per_example="auto"), []
    with one_warning(REFUSED[case][1]):
        first = REFUSED[case][0]()
        elbo.loss(*first, X, Y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        elbo.loss(*first, X, Y)  # told once
        for loss in (elbo, pd.ELBO()):
            pyro.clear_param_store()
            pyro.set_rng_seed(2)
            model = pd.BayesianNet(nn.Linear(2, 2))
            found.append(loss.loss(model, pd.AutoMeanField(model), X, Y))
    assert found[0] == found[1]


def test_the_methods_of_an_object_are_one_model_and_one_guide() -> None:
    """A bound method is another object each time."""

    class Owner:
        def __init__(self) -> None:
            self.own = pd.AutoMeanField(self.model)

        def model(self, x: Tensor, y: Tensor) -> None:
            REFUSED["not a layer"][0]()[0](x, y)

        def guide(self, x: Tensor, y: Tensor) -> Any:
            return self.own(x, y)

    owner, elbo = Owner(), pd.ELBO(per_example="auto")
    with one_warning("'w' cannot be drawn"):
        for _ in range(3):
            elbo.loss(owner.model, owner.guide, X, Y)


class OfItsData(nn.Module):
    """A guide that makes its parameters in its first run, one for each data point."""

    def forward(self, x: Tensor) -> None:
        if not hasattr(self, "loc"):
            self.loc = nn.Parameter(torch.zeros(len(x)))
        pyro.module("of its data", self)
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(self.loc, 1.0))


@pytest.mark.parametrize("per_example", [True, "auto"])
def test_looking_at_other_data_comes_after_the_first_run(per_example: Any) -> None:
    def model(x: Tensor) -> None:
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("y", dist.Normal(z, 1.0), obs=x[:, 0])

    pyro.clear_param_store()
    assert pd.ELBO(per_example=per_example).loss(model, OfItsData(), X) > 0


@pytest.mark.parametrize("make", [pd.AutoMeanField, pd.AutoDropout])
def test_where_nothing_is_refused_it_is_true(make: Any) -> None:
    found = []
    for per_example in ("auto", True):
        pyro.clear_param_store()
        pyro.set_rng_seed(3)
        net = nn.Sequential(nn.Linear(2, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2))
        model = pd.BayesianNet(net)
        guide = make(model)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            svi = SVI(model, guide, Adam({"lr": 0.05}), pd.ELBO(per_example=per_example, num_particles=2))  # type: ignore[arg-type]
            found.append([*(svi.step(X, Y) for _ in range(3)), *(b.sum().item() for b in model.buffers())])
    assert found[0] == found[1]
