"""Compiled steps against eager ones, draw for draw; and what happens where nothing can be compiled."""

import copy
import random
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor, nn

import pyro_dropout as pd
from pyro_dropout.engines import in_c
from pyro_dropout.engines import program as compiled
from pyro_dropout.training.compile import compiled_step

F64 = torch.float64
ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def problem(dtype: torch.dtype = torch.float32) -> tuple[pd.BayesianNet, Tensor, Tensor]:
    net = nn.Sequential(nn.Linear(3, 7), nn.ReLU(), nn.Linear(7, 1)).to(dtype)
    x = torch.randn(16, 3, dtype=dtype)
    return pd.BayesianNet(net, likelihood=pd.Gaussian(tau=4.0)), x, x[:, :1] ** 2


@pytest.fixture
def eager_draws() -> Iterator[None]:
    """Make inductor draw its random numbers as eager code does, so that the two can be compared draw for draw."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's own modules, when they are first imported
        import torch._inductor.config as inductor
    with inductor.patch(fallback_random=True):
        yield


@pytest.mark.deep
@pytest.mark.usefixtures("eager_draws")
def test_steps_are_the_steps_of_pyros_svi() -> None:
    """Same seed, same draws: 20 compiled steps end where 20 of Pyro's own do, on batches of two sizes."""
    model, x, y = problem(F64)
    guide = pd.AutoDropout(model, keep=0.8)
    twin_model = copy.deepcopy(model)
    twin = pd.AutoDropout(twin_model, keep=0.8)
    ours = pd.SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), compile=True)
    theirs = pyro.infer.SVI(twin_model, twin, pyro.optim.Adam({"lr": 0.01}), pd.ELBO())
    sizes = [16, 16, 8] * 7
    pyro.set_rng_seed(3)
    losses = [ours.step(x[:n], y[:n], 16) for n in sizes]
    pyro.set_rng_seed(3)
    assert losses == pytest.approx([theirs.step(x[:n], y[:n], 16) for n in sizes], rel=1e-9)
    torch.testing.assert_close(guide.mean(), twin.mean(), rtol=1e-9, atol=1e-9)
    assert len(ours._programs) == 2
    assert ours.evaluate_loss(x, y) > 0


@pytest.mark.usefixtures("eager_draws", "quickly")
def test_settings_changed_between_steps_are_seen() -> None:
    """τ in place, keep by another buffer: a compiled step is the eager one after either."""
    model, x, y = problem(F64)
    guide = pd.AutoDropout(model, keep=0.8)
    svi = pd.SVI(model, guide, pyro.optim.SGD({"lr": 1e-12}), compile=True)
    svi.step(x, y)
    model.likelihood.log_tau.add_(1.0)
    guide.states["0/weight"].keep = torch.tensor(0.3, dtype=F64)
    for _ in range(2):
        pyro.set_rng_seed(3)
        compiled_loss = svi.step(x, y)
        pyro.set_rng_seed(3)
        assert compiled_loss == pytest.approx(pd.ELBO().loss(model, guide, x, y), rel=1e-9)
    assert len(svi._programs) == 1


def stepped_by_value(x: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([2, 1]).to_event(2))
    if (x @ w).sum() > 0:  # control flow that depends on a value
        pyro.sample("a", dist.Normal(0.0, 1.0), obs=torch.tensor(0.0))


def test_what_cannot_be_traced_runs_eagerly_with_one_warning() -> None:
    loss, x = pd.ELBO(per_example=False), torch.ones(3, 2)
    svi = pd.SVI(stepped_by_value, pd.AutoMeanField(stepped_by_value), pyro.optim.Adam({"lr": 0.01}), loss)
    with pytest.warns(UserWarning, match=r"cannot be compiled, and runs eagerly.*control flow that depends on values"):
        svi.step(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        svi.step(x)
    strict = pd.SVI(stepped_by_value, pd.AutoMeanField(stepped_by_value), pyro.optim.Adam({}), loss, compile=True)
    with pytest.raises(RuntimeError, match="data-dependent"):
        strict.step(x)


def test_randomness_that_a_tracer_would_freeze_is_noticed() -> None:
    def model(x: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([2, 1]).to_event(2))
        pyro.sample("a", dist.Normal(random.random(), 1.0), obs=(x @ w).mean())

    svi = pd.SVI(model, pd.AutoMeanField(model), pyro.optim.Adam({"lr": 0.01}), pd.ELBO(per_example=False))
    with pytest.warns(UserWarning, match="traced twice and gave two different programs"):
        svi.step(torch.ones(3, 2))


@pytest.mark.deep
def test_a_shape_that_fails_later_keeps_the_optimisers_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    """The eager step of an odd batch and the compiled ones are one training: as if all had been eager."""
    model, x, y = problem(F64)
    guide = pd.AutoDropout(model, keep=1.0)
    twin = pd.AutoDropout(copy.deepcopy(model), keep=1.0)
    svi = pd.SVI(model, guide, pyro.optim.Adam({"lr": 0.01}))
    theirs = pyro.infer.SVI(twin.model, twin, pyro.optim.Adam({"lr": 0.01}), pd.ELBO())
    svi.step(x, y, 16)

    def refuse(*args: Any, **options: Any) -> Any:
        raise RuntimeError("no")

    with monkeypatch.context() as patch:
        patch.setattr(compiled_step, "chosen", refuse)
        with pytest.warns(UserWarning, match="this step cannot be compiled"):
            svi.step(x[:5], y[:5], 16)
    svi.step(x, y, 16)
    for n in (16, 5, 16):
        theirs.step(x[:n], y[:n], 16)
    torch.testing.assert_close(guide.mean(), twin.mean(), rtol=1e-9, atol=1e-9)


def test_without_a_compiler_the_warning_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler(*args: Any) -> Any:
        raise RuntimeError("No working C++ compiler found")

    monkeypatch.setattr(compiled, "compiled", no_compiler)
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr(in_c, "compiler", lambda: ())
    model, x, y = problem()
    svi = pd.SVI(model, pd.AutoDropout(model), pyro.optim.Adam({"lr": 0.01}))
    with pytest.warns(UserWarning, match=r"no C\+\+ compiler on this machine: install one"):
        assert svi.step(x, y) > 0


# --- trees of inputs, what lies around a model, saved state ------------------------------------------------------


class Batch(NamedTuple):
    x: Tensor
    rest: dict[str, Any]


AROUND: dict[str, Any] = {}


def on_batches(batch: Batch, rate: float = 1.0) -> None:
    w = pyro.sample("w", dist.Normal(torch.zeros(1, 3), 1.0).to_event(2))
    b = pyro.sample("b", dist.Normal(torch.zeros(1), 1.0).to_event(1))
    with pyro.plate("data", len(batch.x)):
        mean = (batch.x @ w.mT).squeeze(-1) + b + AROUND["offset"]
        with pyro.poutine.scale(scale=rate):
            pyro.sample("y", dist.Normal(mean, AROUND["noise"]), obs=batch.rest["y"][0])


def steps_on(given: list[Batch], compile: bool) -> tuple[list[float], dict[str, Tensor], Any]:
    """Train a point (nothing is drawn), with a float, a tensor and a number around the model that change."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    AROUND.update(offset=torch.tensor(0.5), noise=1.0)
    guide, optim = pd.AutoDropout(on_batches, keep=1.0), pyro.optim.Adam({"lr": 0.05})
    svi = pd.SVI(on_batches, guide, optim, pd.ELBO(per_example=False), compile=compile)
    losses = []
    for step, batch in enumerate(given):
        AROUND["offset"] = torch.tensor(-1.0) if step == 5 else AROUND["offset"]
        AROUND["noise"] = 2.0 if step == 8 else AROUND["noise"]
        losses.append(svi.step(batch, 1.0 / (1 + step % 3)))
    assert svi._built == (2 if compile else 0)  # of the tensors and floats none is compiled again, of the number one
    found = {name: value.detach().clone() for name, value in pyro.get_param_store().items()}
    states = {name: state["state"][0].items() for name, state in optim.get_state().items()}
    kept = {f"{name} {key}": torch.as_tensor(v).cpu().float() for name, rows in states.items() for key, v in rows}
    return losses, found, kept


@pytest.mark.usefixtures("quickly")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
def test_twenty_steps_are_the_eager_ones(device: str) -> None:
    with torch.device(device):
        given = [Batch(torch.randn(4, 3), {"y": [torch.randn(4)], "name": "batch"}) for _ in range(20)]
        found, expected = steps_on(given, True), steps_on(given, False)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
