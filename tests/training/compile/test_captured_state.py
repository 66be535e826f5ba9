"""What a model reads without being handed it: seen at every step, or a step that is compiled anew, or not compiled."""

import random
import types
import weakref
from array import array as numbers
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from typing import Any, ClassVar

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor, nn

import pyro_dropout as pd

pytestmark = pytest.mark.usefixtures("as_traced")
TARGET = torch.zeros(1)
s = 1.0
SETTINGS = {"sharpness": 1.0, "layers": [1.0]}
config = types.ModuleType("config_of_the_user")
config.__file__ = "config_of_the_user.py"
config.sharpness = 1.0


def observe(mean: Tensor, tau: Any, y: Tensor) -> None:
    with pyro.plate("d", len(y)):
        pyro.sample("y", dist.Normal(mean, 1.0).expand(y.shape).mask(True), obs=y * tau)


def losses_of(
    model: Any, change: Any, args: Sequence[Any] = (), steps: int = 4, compile: Any = True
) -> tuple[list[float], list[float], pd.SVI]:
    """Losses of compiled steps, and of eager ones, while ``change(k)`` is called before each."""
    found = []
    for how in (compile, False):
        pyro.clear_param_store()
        guide = pd.AutoMeanField(model)
        change(0)
        torch.manual_seed(0)
        guide(*args)
        svi = pd.SVI(model, guide, pyro.optim.Adam({"lr": 0.0}), pd.ELBO(per_example=False), compile=how)
        found.append([])
        for k in range(steps):
            change(k)
            torch.manual_seed(0)
            found[-1].append(svi.step(*args))
        first = svi if how else first
    return found[0], found[1], first


def w() -> Tensor:
    return pyro.sample("w", dist.Normal(0.0, 0.01))


def rebound_global() -> Any:
    def change(k: int) -> None:
        global TARGET
        TARGET = torch.tensor([10.0 * k])

    return lambda: observe(w(), 1.0, TARGET), change, 1


def enclosing_variable() -> Any:
    target, tau = torch.zeros(1), 1.0

    def change(k: int) -> None:
        nonlocal target, tau
        target, tau = torch.tensor([3.0 * k]), 1.0 + k // 2

    return lambda: observe(w(), tau, target), change, 2  # one program for each value of tau


def other_shape() -> Any:
    target = torch.zeros(1)

    def change(k: int) -> None:
        nonlocal target
        target = torch.ones(1 + k)

    return lambda: observe(w(), 1.0, target), change, 4


def settings(read: Any, write: Any) -> Any:
    """A number that is 1 + k at step k."""
    return lambda: (lambda: observe(w(), read(), torch.ones(1)), lambda k: write(1.0 + k), 4)


def attributes() -> Any:
    class Holder:
        tau = 1.0

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tau, self.holder, self.target = 1.0, Holder(), torch.zeros(1)

        def forward(self) -> None:
            observe(w(), self.tau * self.holder.tau, self.target)

    model = Model()

    def change(k: int) -> None:
        model.tau, model.holder.tau, model.target = 1.0 + k, 2.0 + k, torch.full((1,), float(k))

    return model, change, 4


class Slots:
    """An object without a dict, whose class holds a list and reads it by a property."""

    __slots__ = ("__weakref__", "tau")
    layers: ClassVar[list[float]] = [1.0]

    def __init__(self) -> None:
        self.tau = 1.0

    @property
    def first(self) -> float:
        return LAST[-1]


LAST = deque([1.0])
SLOTS, CONTEXT, NUMBERS = Slots(), ContextVar[float]("tau", default=1.0), numbers("d", [1.0])
WEAK = weakref.ref(SLOTS)


class Swapped:
    """A class whose function is exchanged."""

    read: Any = staticmethod(lambda: 1.0)


def value_read() -> Any:
    tau = torch.tensor(1.0)
    return lambda: observe(w(), tau.item(), torch.ones(1)), lambda k: tau.fill_(1.0 + k), 4


def array() -> Any:
    target = np.ones(1, dtype=np.float32)
    return lambda: observe(w(), 1.0, torch.as_tensor(target.copy())), lambda k: target.fill(k), 4


def two_names() -> Any:
    """One tensor, found first by the name that the model does not read."""
    both = {"other": torch.zeros(1)}
    change = lambda k: both.update(read=torch.tensor([10.0 * k]) if k else both["other"])  # noqa: E731
    return lambda: observe(w(), 1.0, both["read"]), change, 2


CASES: dict[str, Any] = {
    "a global that is looked up by its name": settings(lambda: globals()["s"], lambda v: globals().update(s=v)),
    "a global tensor": rebound_global,
    "a tensor of two names": two_names,
    "a variable of an enclosing function": enclosing_variable,
    "a tensor that changes its shape": other_shape,
    "a number in a dict": settings(lambda: SETTINGS["sharpness"], lambda v: SETTINGS.update(sharpness=v)),
    "a number in a list": settings(lambda: SETTINGS["layers"][0], lambda v: SETTINGS["layers"].__setitem__(0, v)),
    "a number in a module": settings(lambda: config.sharpness, lambda v: setattr(config, "sharpness", v)),
    "attributes of modules and objects": attributes,
    "a value that is read with item": value_read,
    "a numpy array": array,
    "a slot": settings(lambda: SLOTS.tau, lambda v: setattr(SLOTS, "tau", v)),
    "a list of a class": settings(lambda: Slots.layers[0], lambda v: Slots.layers.__setitem__(0, v)),
    "a deque behind a property": settings(lambda: SLOTS.first, lambda v: LAST.__setitem__(0, v)),
    "a context variable": settings(lambda: CONTEXT.get(), lambda v: CONTEXT.set(v)),
    "an array of Python's": settings(lambda: NUMBERS[0], lambda v: NUMBERS.__setitem__(0, v)),
    "behind a weak reference": settings(lambda: WEAK().tau, lambda v: setattr(SLOTS, "tau", v)),
    "a function of a class": settings(lambda: Swapped.read(), lambda v: setattr(Swapped, "read", lambda: v)),
}


@pytest.mark.thinned(5)
@pytest.mark.parametrize("case", CASES)
def test_what_changes_is_seen(case: str) -> None:
    model, change, programs = CASES[case]()
    one, other, svi = losses_of(model, change)
    assert len(set(other)) > 1
    assert one == pytest.approx(other, rel=1e-5)
    assert svi._built == programs


def test_a_global_with_the_name_of_a_site_is_not_read() -> None:
    def model() -> None:
        s = pyro.sample("s", dist.Normal(0.0, 0.01))
        observe(s, 1.0, torch.ones(1))

    one, other, svi = losses_of(model, lambda k: globals().update(s=1.0 + k))
    assert one == pytest.approx(other, rel=1e-5)
    assert svi._built == 1


def test_an_argument_that_has_another_name_or_is_given_twice() -> None:
    """A step that has seen one tensor in two places does not take them for one."""
    x = torch.ones(1)

    def model(a: Tensor, b: Tensor) -> None:
        observe(w() * a + x, 1.0, b)

    steps, given = [(x, x), (x, 5 * x), (3 * x, x), (7 * x, 2 * x)], [x, x]
    one, other, _ = losses_of(model, lambda k: given.__setitem__(slice(None), steps[k]), given)
    assert one == pytest.approx(other, rel=1e-5)


@pytest.mark.deep
def test_a_module_of_the_network_in_another_mode() -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.9), nn.Linear(3, 1))

    def change(k: int) -> None:
        net[1].train(k % 2 == 0)

    one, other, svi = losses_of(pd.BayesianNet(net), change, (torch.ones(4, 2), torch.zeros(4, 1)))
    assert one == pytest.approx(other, rel=1e-4)
    assert svi._built == 2


def test_a_counter_that_does_not_matter_costs_one_compilation() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self) -> None:
            observe(w(), 1.0, torch.ones(1))

    model = Model()

    def change(k: int) -> None:
        model.calls = k

    one, other, svi = losses_of(model, change, steps=8)
    assert one == pytest.approx(other, rel=1e-5)
    assert svi._built == 1


@pytest.mark.parametrize("steps", [8, pytest.param(40, marks=pytest.mark.deep)])
def test_a_counter_that_will_matter_is_watched_on(steps: int) -> None:
    """Its first values make no difference; where it keeps changing, steps run eagerly, and say so."""
    epoch = {"number": 0}

    def model() -> None:
        observe(w(), 1.0 if epoch["number"] < 5 else 3.0, torch.ones(1))

    with nullcontext() if steps < 16 else pytest.warns(UserWarning, match=r"epoch\['number'\].* keeps changing"):
        one, other, _ = losses_of(model, lambda k: epoch.update(number=k), steps=steps, compile="auto")
    assert one == pytest.approx(other, rel=1e-5)
    assert one[4] != one[5]


def test_a_tensor_that_cannot_be_found_again_is_refused_by_name() -> None:
    def hidden() -> Any:
        kept = [torch.ones(1)]
        return iter(lambda: kept[0], None)

    source = hidden()

    def model() -> None:
        observe(w(), 1.0, next(source))

    svi = pd.SVI(model, pd.AutoMeanField(model), pyro.optim.Adam({"lr": 0.0}), pd.ELBO(per_example=False), compile=True)
    with pytest.raises(
        pd.errors.PyroDropoutError, match="is not an argument, a parameter or a buffer, and that cannot be"
    ):
        svi.step()


@pytest.mark.deep
@pytest.mark.parametrize("changes", [Tensor.copy_, Tensor.add_], ids=["at its end", "in place"])
def test_a_tensor_that_the_model_changes_is_refused_by_name(changes: Any) -> None:
    """As a running baseline: what a step computes in memory of its own would be lost."""
    baseline = torch.zeros(1)

    def model() -> None:
        observe(w() - baseline, 1.0, torch.ones(1))
        changes(baseline, baseline.detach() + 1.0)

    with pytest.raises(pd.errors.PyroDropoutError, match="it changes 'baseline', a tensor that is not a buffer"):
        losses_of(model, lambda k: None)


def test_frozen_parameters_stay() -> None:
    model = pd.BayesianNet(nn.Linear(2, 1))
    guide = pd.AutoMeanField(model)
    svi = pd.SVI(model, guide, pyro.optim.Adam({"lr": 0.1}), compile=True)
    x = torch.randn(6, 2)
    svi.step(x, x[:, :1])
    frozen = guide.states["weight"].loc
    frozen.requires_grad_(False)
    before, other = frozen.clone(), guide.states["bias"].loc.detach().clone()
    svi.step(x, x[:, :1])
    assert torch.equal(frozen, before)
    assert not torch.equal(guide.states["bias"].loc, other)


@pytest.mark.deep
def test_a_parameter_store_that_is_loaded_between_compiled_steps() -> None:
    model = pd.BayesianNet(nn.Linear(2, 1))
    guide = pd.AutoMeanField(model)
    svi = pd.SVI(model, guide, pyro.optim.Adam({"lr": 0.0}), compile=True)
    x = torch.randn(6, 2)
    svi.step(x, x[:, :1])
    state = pyro.get_param_store().get_state()
    loaded = {name: torch.full_like(value, -3.0).requires_grad_() for name, value in state["params"].items()}
    pyro.get_param_store().set_state({**state, "params": loaded})
    svi.step(x, x[:, :1])
    assert torch.equal(guide.mean()["weight"], torch.full((1, 2), -3.0))


def test_a_schedule_that_draws_is_found_out() -> None:
    model, x = pd.BayesianNet(nn.Linear(1, 1)), torch.ones(3, 1)
    how = {"steps": 3, "progress": False, "schedule": lambda t: t * 0 + random.random()}
    with pytest.raises(pd.errors.PyroDropoutError, match="traced twice and gave two different programs"):
        pd.fit(model, pd.AutoDropout(model), x, x, compile=True, **how)
