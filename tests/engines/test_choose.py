"""How steps are taken: eagerly, recorded or compiled; and recorded ones are the eager ones."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pyro
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pyro_dropout as pd
from pyro_dropout.engines import choose, engine, in_c, program
from pyro_dropout.engines.choose import decided, step_size
from pyro_dropout.engines.engine import CannotError, Loop, Step
from pyro_dropout.generative.model_call import ModelCall
from pyro_dropout.training.optimisers import named
from pyro_dropout.training.training_run import TrainingTask

CPU = torch.device("cpu")
X = torch.linspace(-1, 1, 24).unsqueeze(-1)


def network() -> pd.BayesianNet:
    net = nn.Sequential(nn.Linear(1, 6), nn.Tanh(), nn.Linear(6, 1))
    return pd.BayesianNet(net, pd.Prior(), pd.Gaussian(tau=10.0, learn=True))


def trained(make: Any, compile: Any, steps: int = 12, **options: Any) -> pd.training.History:
    torch.manual_seed(0)
    model = network()
    return pd.fit(model, make(model), X, X**2, steps=steps, lr=0.02, seed=1, compile=compile, progress=False, **options)


def test_the_decision_depends_on_steps_and_sizes_alone() -> None:
    small, large = (step_size(nn.Linear(50, outputs).parameters(), 64) for outputs in (1, 100_000))
    assert [decided("auto", steps, small, CPU) for steps in (10, 5_000, 100_000)] == [False, "plain", "auto"]
    assert [decided("auto", steps, large, CPU) for steps in (10, 1_000)] == [False, "auto"]
    asked = (100, 700, 800, 7_000, 8_000)
    found = [decided("auto", steps, small, CPU) for steps in asked]
    assert found == [False, "traced", "plain", "plain", "auto"]
    assert decided("traced", 10_000, small, CPU) == "traced"
    assert decided("auto", 1, small, torch.device("cuda")) == "auto"
    assert [decided(asked, 1_000, small, CPU) for asked in (False, "traced", True)] == [False, "traced", True]
    assert step_size(nn.Linear(50, 100).parameters(), 64) == 5_000 + 100 * 65


@pytest.mark.parametrize("steps", [5, 300, 2_000])
def test_a_history_says_why_each_faster_engine_did_not_take_the_steps(steps: int) -> None:
    model = network()
    fitted = pd.fit(model, pd.AutoDropout(model), X, X**2, steps=steps, progress=False)
    faster = {"eager": ["recorded", "C", "inductor"], "recorded": ["C", "inductor"], "C": []}[fitted.engine]
    assert [name for name in ("recorded", "C", "inductor") if name in fitted.why.partition(":")[0]] == faster
    assert ("too short" in fitted.why) == bool(faster)
    assert not pd.fit(model, pd.AutoDropout(model), X, X**2, steps=5, progress=False, compile=False).why


def test_a_short_training_is_eager_a_longer_one_is_recorded_and_neither_is_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("compiled")

    monkeypatch.setattr(program, "compiled", never)
    assert not trained(pd.AutoDropout, "auto", 3).traced
    assert trained(pd.AutoDropout, "auto", 200).traced
    assert trained(lambda model: pd.Ensemble(model, members=2), "auto", 200).traced


@pytest.fixture
def by_c_or_recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Trainings of 10 steps are long enough for plain C, and torch's compiler is never asked."""

    def never(*_: object) -> None:
        raise AssertionError("compiled by torch")

    monkeypatch.setattr(program, "compiled", never)
    monkeypatch.setattr(choose, "_RECORDING", 5)
    monkeypatch.setattr(choose, "_IN_C", 0.005)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


@pytest.mark.usefixtures("by_c_or_recorded")
def test_what_does_not_fit_in_plain_c_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = trained(pd.AutoDropout, "traced")
    monkeypatch.setattr(in_c, "compiler", lambda: ("no-such-compiler",))
    found = trained(pd.AutoDropout, "auto")
    assert found.traced
    assert torch.equal(found.losses, expected.losses)


@pytest.mark.usefixtures("by_c_or_recorded")
def test_a_large_network_and_an_optimiser_of_torch_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    guide = pd.AutoDropout(model)
    how: Any = {"optim": torch.optim.RMSprop(guide.parameters(), 0.01), "steps": 12, "progress": False}
    assert pd.fit(model, guide, X, X**2, **how).traced
    monkeypatch.setattr(engine, "SMALL", 0)
    found = trained(pd.AutoDropout, "auto")
    assert found.engine == "recorded"
    assert "too many parameters" in found.why


@pytest.mark.usefixtures("by_c_or_recorded")
@pytest.mark.thinned(4)
@pytest.mark.parametrize("batch_size", [None, 4])
@pytest.mark.parametrize("biased", [True, False])
def test_convolutions_are_calls_of_torch_in_plain_c(biased: bool, batch_size: int | None) -> None:
    """The gradient of a first layer has nothing for its inputs, and without a bias nothing for that either."""
    x, found = torch.randn(9, 1, 6), []
    for how in ("auto", "traced", False):
        torch.manual_seed(0)
        layers = [nn.Conv1d(1, 2, 3, bias=biased), nn.ReLU(), nn.Conv1d(2, 2, 2, bias=biased), nn.Flatten()]
        model = pd.BayesianNet(nn.Sequential(*layers, nn.Linear(6, 1)), likelihood=pd.Gaussian(4.0))
        options: Any = {"steps": 12, "seed": 1, "batch_size": batch_size, "compile": how, "progress": False}
        found.append(pd.fit(model, pd.AutoDropout(model), x, x[:, 0, :1], **options))
    assert [each.engine for each in found] == ["C", "recorded", "eager"]
    torch.testing.assert_close(found[0].losses, found[2].losses, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[1].losses, found[2].losses, rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("by_c_or_recorded")
@pytest.mark.parametrize("loads", [True, False])
def test_many_steps_in_one_call_have_a_batch_each(loads: bool) -> None:
    """Those that wait for a loader are taken one by one; its last batch is smaller, and runs eagerly."""

    def model(x: torch.Tensor, num_data: int = 1) -> None:
        centre = pyro.sample("centre", pyro.distributions.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)), pyro.poutine.scale(scale=num_data / len(x)):
            pyro.sample("x", pyro.distributions.Normal(centre, 0.1), obs=x[:, 0])

    options: Any = {"steps": 45, "seed": 1, "batch_size": None if loads else 5, "progress": False}
    found = []
    for how in ("auto", False):
        torch.manual_seed(0)
        guide = pd.AutoMeanField(model)
        data = DataLoader(TensorDataset(X), 5) if loads else X
        found.append(pd.fit(model, guide, data, compile=how, **options))
    assert [each.engine for each in found] == ["C", "eager"]
    torch.testing.assert_close(found[0].losses, found[1].losses, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("by_c_or_recorded")
def test_a_step_that_cannot_be_recorded_warns_as_ever_and_runs_eagerly() -> None:
    class Reads(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * float(x.sum().abs() > -1)

    told = []
    options: Any = {"loss": pd.ELBO(per_example=False), "steps": 12, "progress": False}
    for options["compile"] in ("auto", "traced"):
        net = nn.Sequential(nn.Linear(1, 3), Reads(), nn.Linear(3, 1))
        model = pd.BayesianNet(net, likelihood=pd.Gaussian(4.0))
        with pytest.warns(UserWarning, match="cannot be compiled, and runs eagerly") as seen:
            history = pd.fit(model, pd.AutoDropout(model), X, X, **options)
        told.append([str(each.message) for each in seen])
        assert not history.traced
        assert not history.compiled
    assert told[0] == told[1]
    assert len(told[0]) == 1


@pytest.mark.parametrize("kind", [CannotError, RuntimeError])
def test_an_engine_that_cannot_is_noted_and_one_that_fails_is_warned_of(kind: type[Exception]) -> None:
    class Broken:
        name = "broken"

        def loop(self, step: Step) -> Loop:
            torch.rand(3)
            raise kind("no compiler")

    found, usual = [], choose.engines_for
    for before in ([], [Broken()]):
        torch.manual_seed(0)
        model = network()
        task = TrainingTask(pd.AutoDropout(model), pd.ELBO(), ModelCall(model, (X, X**2, len(X))))
        warned = before and kind is RuntimeError
        tried = mock.patch.object(choose, "engines_for", lambda *given, first=before: [*first, *usual(*given)])
        with tried, pytest.warns(UserWarning, match="'broken' failed.*report") if warned else nullcontext():
            run = task.start(named("adam", 0.01), len(X), True)
        found.append(run.advance(3))
    assert run.engine == "C"
    assert run.why == ["broken: no compiler"]
    torch.testing.assert_close(*found, rtol=0, atol=0)
