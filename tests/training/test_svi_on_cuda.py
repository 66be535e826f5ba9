"""Compiled steps replayed as CUDA graphs are the eager ones: trees of inputs, what lies around a model, saved state."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

import pyro_dropout as pd

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True)
def on_the_gpu() -> Iterator[None]:
    with torch.device("cuda"):
        yield


class Batch(NamedTuple):
    x: Tensor
    rest: dict[str, Any]


AROUND: dict[str, Any] = {}


def model(batch: Batch, rate: float = 1.0) -> None:
    w = pyro.sample("w", dist.Normal(torch.zeros(1, 3), 1.0).to_event(2))
    b = pyro.sample("b", dist.Normal(torch.zeros(1), 1.0).to_event(1))
    with pyro.plate("data", len(batch.x)):
        mean = (batch.x @ w.mT).squeeze(-1) + b + AROUND["offset"]
        with pyro.poutine.scale(scale=rate):
            pyro.sample("y", dist.Normal(mean, AROUND["noise"]), obs=batch.rest["y"][0])


def batches(count: int, rows: int = 4) -> list[Batch]:
    return [Batch(torch.randn(rows, 3), {"y": [torch.randn(rows)], "name": "batch"}) for _ in range(count)]


def run(compile: bool, given: list[Batch], lr: float = 0.05) -> tuple[list[float], dict[str, Tensor], Any]:
    """Train a point (nothing is drawn), with a float, a tensor and a number around the model that change."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    AROUND.update(offset=torch.tensor(0.5), noise=1.0)
    guide = pd.AutoDropout(model, keep=1.0)
    optim = pyro.optim.Adam({"lr": lr})
    svi = pd.SVI(model, guide, optim, pd.ELBO(per_example=False), compile=compile)
    losses = []
    for step, batch in enumerate(given):
        if step == 5:
            AROUND["offset"] = torch.tensor(-1.0)
        if step == 8:
            AROUND["noise"] = 2.0
        losses.append(svi.step(batch, 1.0 / (1 + step % 3)))
    found = {name: value.detach().clone() for name, value in pyro.get_param_store().items()}
    return losses, found, optim.get_state()


def test_twenty_steps_are_the_eager_ones() -> None:
    given = batches(20)
    fast, found, one = run(True, given)
    slow, expected, other = run(False, given)
    torch.testing.assert_close(torch.tensor(fast), torch.tensor(slow), rtol=1e-4, atol=1e-4)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)
    assert one.keys() == other.keys()
    for name, state in other.items():
        for key, value in state["state"][0].items():
            torch.testing.assert_close(
                torch.as_tensor(one[name]["state"][0][key]).cpu().float(),
                torch.as_tensor(value).cpu().float(),
                rtol=1e-4,
                atol=1e-5,
            )


def test_a_loaded_store_is_taken_up(tmp_path: Any) -> None:
    AROUND.update(offset=torch.tensor(0.0), noise=1.0)
    given = batches(6)
    guide = pd.AutoDropout(model, keep=1.0)
    svi = pd.SVI(model, guide, pyro.optim.Adam({"lr": 0.1}), pd.ELBO(per_example=False), compile=True)
    svi.step(given[0])
    pyro.get_param_store().save(str(tmp_path / "store"))
    kept = {name: value.detach().clone() for name, value in pyro.get_param_store().items()}
    for batch in given[1:]:
        svi.step(batch)
    pyro.get_param_store().load(str(tmp_path / "store"))
    slow = pd.ELBO(per_example=False).loss(model, guide, given[1])
    assert svi.step(given[1]) == pytest.approx(slow, rel=1e-5)
    moved = pyro.get_param_store()
    assert any(not torch.equal(moved[name], value) for name, value in kept.items())
