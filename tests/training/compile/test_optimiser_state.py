"""The optimiser's state is where Pyro keeps it: compiled and eager steps go on from each other, and files hold it."""

import io
import warnings
from collections.abc import Callable
from typing import Any

import pyro
import pyro.optim
import pytest
import torch
from torch import Tensor, nn

import pyro_dropout as pd

F64 = torch.float64
pytestmark = pytest.mark.usefixtures("as_traced")
OPTIMISERS: dict[str, Callable[[], Any]] = {
    "adam": lambda: pyro.optim.Adam({"lr": 0.05, "betas": (0.8, 0.9)}),
    "adamw": lambda: pyro.optim.AdamW({"lr": 0.05, "weight_decay": 0.1}),
    "sgd": lambda: pyro.optim.SGD({"lr": 0.01}),
    "momentum": lambda: pyro.optim.SGD({"lr": 0.01, "momentum": 0.9, "nesterov": True}),
    "clipped by norm": lambda: pyro.optim.Adam({"lr": 0.05}, {"clip_norm": 0.5}),
    "clipped by both": lambda: pyro.optim.SGD({"lr": 0.05}, {"clip_norm": 5.0, "clip_value": 0.3}),
    "clipped adam": lambda: pyro.optim.ClippedAdam({"lr": 0.05, "clip_norm": 1.0}),
    "rates by name": lambda: pyro.optim.Adam(lambda name: {"lr": 0.1 if "loc" in name else 0.01}),
    "some by name": lambda: pyro.optim.Adam(lambda name: {"lr": 0.1 if "loc" in name else 0.0}),
    "clips by name": lambda: pyro.optim.Adam({"lr": 0.05}, lambda _, name: {"clip_norm": 0.1} if "loc" in name else {}),
    "clipped adam by name": lambda: pyro.optim.ClippedAdam(
        lambda name: {"lr": 0.05, "clip_norm": 0.1, "lrd": 0.9} if "loc" in name else {"lr": 0.01}
    ),
}


def pair() -> tuple[Any, Any, Tensor, Tensor]:
    pyro.clear_param_store()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).to(F64)
    model = pd.BayesianNet(net, likelihood=pd.Gaussian(4.0)).to(F64)
    x = torch.randn(8, 2, dtype=F64)
    return model, pd.AutoMeanField(model), x, x.sum(1, keepdim=True)


def run(how: list[bool], optim: Any, state: Any = None) -> tuple[dict[str, Tensor], Any]:
    """Take steps, each compiled or not; return the parameters and the optimiser's state."""
    model, guide, x, y = pair()
    svis = {way: pd.SVI(model, guide, optim, pd.ELBO(), compile=way) for way in (True, False)}
    if state is not None:
        optim.set_state(state)
    for k, way in enumerate(how):
        torch.manual_seed(k)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "the optimiser's weight_decay")  # asked for here
            svis[way].step(x, y)
    return {name: value.detach().clone() for name, value in guide.named_parameters()}, optim.get_state()


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.allclose(one.double(), other.double(), rtol=1e-10, atol=1e-12)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.deep
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.deep] if place else []) for place, name in enumerate(OPTIMISERS)]
)
def test_compiled_steps_leave_the_state_that_eager_ones_leave(name: str) -> None:
    eager, mixed = run([False] * 6, OPTIMISERS[name]()), run([True, True, False, False, True, True], OPTIMISERS[name]())
    compiled_ = run([True] * 6, OPTIMISERS[name]())
    for found in (mixed, compiled_):
        assert same(found[0], eager[0])
        assert same(found[1], eager[1])
    assert all(state["state"] for state in compiled_[1].values()) == (name not in ("sgd", "clipped by both"))


@pytest.mark.deep
def test_a_state_that_was_set_is_taken_up() -> None:
    _, state = run([True] * 5, OPTIMISERS["adam"]())
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    eager = run([False] * 3, OPTIMISERS["adam"](), state)
    compiled_ = run([True] * 3, OPTIMISERS["adam"](), loaded)
    assert same(compiled_[0], eager[0])
    assert same(compiled_[1], eager[1])
    assert not same(compiled_[0], run([True] * 3, OPTIMISERS["adam"]())[0])


@pytest.mark.deep
def test_a_rate_that_is_changed_between_steps_is_seen() -> None:
    found = []
    for way in (True, False):
        model, guide, x, y = pair()
        optim = OPTIMISERS["adam"]()
        svi = pd.SVI(model, guide, optim, pd.ELBO(), compile=way)
        for k in range(4):
            torch.manual_seed(k)
            svi.step(x, y)
            for each in optim.optim_objs.values():
                each.param_groups[0]["lr"] = 0.05 / (k + 2)
        found.append({name: value.detach().clone() for name, value in guide.named_parameters()})
    assert same(*found)
    assert pd.SVI(*pair()[:2], OPTIMISERS["adam"](), pd.ELBO())._built == 0
