"""What a model reads without being handed it: seen at every step, or a step that is compiled anew, or not compiled."""

import types
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor, nn

import pyro_dropout as pd
from pyro_dropout.engines import program as compiled
from pyro_dropout.training.compile.captured_state import CapturedState

TARGET = torch.zeros(1)
SHARPNESS = 1.0
SETTINGS = {"sharpness": 1.0, "layers": [1.0]}
config = types.ModuleType("config_of_the_user")
config.__file__ = "config_of_the_user.py"
config.sharpness = 1.0


@pytest.fixture(autouse=True)
def as_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run programs as they were traced; a C++ compiler takes seconds to build each."""
    monkeypatch.setattr(compiled, "_compile", lambda graph, inputs: graph)


def observe(mean: Tensor, tau: Any, y: Tensor) -> None:
    with pyro.plate("d", len(y)):
        pyro.sample("y", dist.Normal(mean, 1.0).expand(y.shape).mask(True), obs=y * tau)


def losses_of(model: Any, change: Any, *args: Any, steps: int = 4) -> tuple[list[float], list[float], pd.SVI]:
    """Losses of compiled steps, and of eager ones, while ``change(k)`` is called before each."""
    found = []
    for compile in (True, False):
        pyro.clear_param_store()
        guide = pd.AutoMeanField(model)
        change(0)
        torch.manual_seed(0)
        guide(*args)
        svi = pd.SVI(model, guide, pyro.optim.Adam({"lr": 0.0}), pd.ELBO(per_example=False), compile=compile)
        found.append([])
        for k in range(steps):
            change(k)
            torch.manual_seed(0)
            found[-1].append(svi.step(*args))
        first = svi if compile else first
    return found[0], found[1], first


def w() -> Tensor:
    return pyro.sample("w", dist.Normal(0.0, 0.01))


def test_a_global_tensor_that_is_rebound() -> None:
    def model() -> None:
        observe(w(), 1.0, TARGET)

    def change(k: int) -> None:
        global TARGET
        TARGET = torch.tensor([10.0 * k])

    one, other, svi = losses_of(model, change)
    assert one == pytest.approx(other, rel=1e-5)
    assert svi._built == 1


@pytest.mark.deep
def test_a_variable_of_an_enclosing_function() -> None:
    target, tau = torch.zeros(1), 1.0

    def model() -> None:
        observe(w(), tau, target)

    def change(k: int) -> None:
        nonlocal target, tau
        target, tau = torch.tensor([3.0 * k]), 1.0 + k // 2

    one, other, svi = losses_of(model, change)
    assert one == pytest.approx(other, rel=1e-5)
    assert svi._built == 2  # one for each value of tau


@pytest.mark.deep
def test_a_tensor_that_changes_its_shape() -> None:
    target = torch.zeros(1)

    def model() -> None:
        observe(w(), 1.0, target)

    def change(k: int) -> None:
        nonlocal target
        target = torch.ones(1 + k)

    one, other, _ = losses_of(model, change)
    assert one == pytest.approx(other, rel=1e-5)


def global_number(k: int) -> None:
    global SHARPNESS
    SHARPNESS = 1.0 + k


def in_a_dict(k: int) -> None:
    SETTINGS["sharpness"] = 1.0 + k


def in_a_list(k: int) -> None:
    SETTINGS["layers"][0] = 1.0 + k


def in_a_module(k: int) -> None:
    config.sharpness = 1.0 + k


@pytest.mark.parametrize(
    ("read", "change"),
    [
        (lambda: SHARPNESS, global_number),
        pytest.param(lambda: SETTINGS["sharpness"], in_a_dict, marks=pytest.mark.deep),
        pytest.param(lambda: SETTINGS["layers"][0], in_a_list, marks=pytest.mark.deep),
        pytest.param(lambda: config.sharpness, in_a_module, marks=pytest.mark.deep),
    ],
)
def test_numbers_that_change(read: Any, change: Any) -> None:
    def model() -> None:
        observe(w(), read(), torch.ones(1))

    one, other, _ = losses_of(model, change)
    assert len(set(other)) > 1
    assert one == pytest.approx(other, rel=1e-5)


@pytest.mark.deep
def test_attributes_of_modules_and_objects() -> None:
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

    one, other, _ = losses_of(model, change)
    assert one == pytest.approx(other, rel=1e-5)


@pytest.mark.deep
def test_a_module_of_the_network_in_another_mode() -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.9), nn.Linear(3, 1))
    model = pd.BayesianNet(net)

    def change(k: int) -> None:
        net[1].train(k % 2 == 0)

    one, other, svi = losses_of(model, change, torch.ones(4, 2), torch.zeros(4, 1))
    assert one == pytest.approx(other, rel=1e-4)
    assert svi._built == 2


@pytest.mark.deep
def test_a_value_that_is_read_with_item() -> None:
    tau = torch.tensor(1.0)

    def model() -> None:
        observe(w(), tau.item(), torch.ones(1))

    def change(k: int) -> None:
        tau.fill_(1.0 + k)

    one, other, _ = losses_of(model, change)
    assert len(set(other)) > 1
    assert one == pytest.approx(other, rel=1e-5)


@pytest.mark.deep
def test_a_numpy_array_that_changes() -> None:
    target = np.ones(1, dtype=np.float32)

    def model() -> None:
        observe(w(), 1.0, torch.as_tensor(target.copy()))

    def change(k: int) -> None:
        target[:] = k

    one, other, _ = losses_of(model, change)
    assert len(set(other)) > 1
    assert one == pytest.approx(other, rel=1e-5)


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


def test_a_tensor_that_cannot_be_found_again_is_refused_by_name() -> None:
    def hidden() -> Any:
        kept = [torch.ones(1)]
        return iter(lambda: kept[0], None)

    source = hidden()

    def model() -> None:
        observe(w(), 1.0, next(source))

    svi = pd.SVI(model, pd.AutoMeanField(model), pyro.optim.Adam({"lr": 0.0}), pd.ELBO(per_example=False), compile=True)
    with pytest.raises(pd.PyroDropoutError, match="is not an argument, a parameter or a buffer, and that cannot be"):
        svi.step()


@pytest.mark.deep
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


def test_what_is_looked_at() -> None:
    inner = {"rate": 0.5, "table": torch.ones(2)}

    def model() -> float:
        return float(inner["rate"]) + SHARPNESS

    found = CapturedState([model], [])
    assert [place.name for place, _ in found.tensors] == ["inner['table']"]
    found.watch([])
    assert found.changed() is None
    inner["rate"] = 0.7
    place = found.changed()
    assert place is not None
    assert place.name == "inner['rate']"
    found.forget([place])
    assert found.changed() is None


def test_a_number_may_become_a_tensor_and_nan_stays_nan() -> None:
    inner = {"rate": 0.5, "unknown": float("nan")}

    def model() -> object:
        return inner["rate"], inner["unknown"]

    found = CapturedState([model], [])
    inner["unknown"] = float("nan")
    assert found.changed() is None
    inner["rate"] = torch.ones(3)
    place = found.changed()
    assert place is not None
    assert place.name == "inner['rate']"
