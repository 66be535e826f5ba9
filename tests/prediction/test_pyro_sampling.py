"""The sampler and simulation-based calibration on Pyro models that are not networks."""

import warnings
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoNormal
from torch import Tensor

import pyro_dropout as pd
from pyro_dropout.generative.model_call import ModelCall
from tests.prediction.pyro_models import CASES, F64, X, Y, line, normal

pytestmark = pytest.mark.usefixtures("in_float64")

QUICK: Any = {"chains": 2, "samples": 60, "warmup": 60, "compile": False, "progress": False}
ROUGH = pytest.mark.filterwarnings("ignore:chains disagree", "ignore:.*trajectories diverged")


# --- nuts -------------------------------------------------------------------------------------------------------------


@pytest.mark.deep
@ROUGH
@pytest.mark.parametrize(
    "name",
    [
        *("line", "counts", "table", "module", "unplated", "penalised"),
        pytest.param("schools", marks=pytest.mark.deep),
    ],
)
def test_any_signature_any_site_and_any_return_value(name: str) -> None:
    case = CASES[name]
    model = case.make()
    found = pd.nuts(model, *case.args, **QUICK, **case.kwargs)
    assert all(value.shape[:2] == (2, 60) and value.dtype == F64 for value in found.weights.values())
    answer = pd.predict(model, found, *case.question, samples=50, seed=0, **case.blind_kwargs)
    assert torch.isfinite(answer.mean).all()
    data = pd.to_arviz(model, found, *case.args, **case.kwargs)
    assert data["posterior"].sizes["chain"] == 2


# --- simulation-based calibration -------------------------------------------------------------------------------------


def conjugate(model: Any, y: Tensor) -> pd.prediction.SampledPosterior:
    precision = 1 + len(y) / 0.49
    return pd.prediction.SampledPosterior(
        {"mu": float(y.sum() / 0.49) / precision + precision**-0.5 * torch.randn(1, 99)}
    )


def level(y: Tensor | None = None) -> None:
    mu = pyro.sample("mu", normal())
    with pyro.plate("data", 12):
        pyro.sample("y", normal(mu, 0.7), obs=y)


def test_the_exact_posterior_is_calibrated_and_a_narrow_one_is_not() -> None:
    """A 99 % band: with another seed this fails with a probability of 1 %; the seed is set."""
    right = pd.sbc(level, conjugate, torch.zeros(12), replications=100, progress=False)
    assert right.inside_band(0.99) == {"mu": True}

    def narrow(model: Any, y: Tensor) -> pd.prediction.SampledPosterior:
        exact = conjugate(model, y).weights["mu"]
        return pd.prediction.SampledPosterior({"mu": exact.mean() + 0.3 * (exact - exact.mean())})

    assert pd.sbc(level, narrow, torch.zeros(12), replications=100, progress=False).inside_band(0.99) == {"mu": False}


def test_data_that_the_model_takes_apart_are_simulated_too() -> None:
    """The site observes a part of an argument: the model that is fitted has the simulated values all the same."""
    met: list[Tensor] = []

    def fit(model: Any, batch: dict[str, Tensor]) -> Any:
        trace = pyro.poutine.trace(model).get_trace(batch)
        met.append(trace.nodes["obs"]["value"])
        assert trace.nodes["obs"]["is_observed"]
        return AutoNormal(model)

    def model(batch: dict[str, Tensor]) -> None:
        slope = pyro.sample("slope", normal())
        with pyro.plate("data", 12):
            pyro.sample("obs", normal(slope * batch["x"], 0.5), obs=2 * batch["y"])

    found = pd.sbc(model, fit, {"x": X, "y": Y}, replications=3, samples=9, progress=False)
    assert list(found.ranks) == ["slope"]
    assert len({float(value[0]) for value in met}) == 3
    assert not any(torch.equal(value, 2 * Y) for value in met)


def test_what_cannot_be_simulated_is_told() -> None:
    case = CASES["penalised"]
    with pytest.raises(pd.errors.PyroDropoutError, match=r"'penalty' is a pyro\.factor.*cannot be simulated"):
        pd.sbc(case.make(), conjugate, *case.args, replications=1, progress=False)
    with pytest.raises(pd.errors.PyroDropoutError, match="line observes nothing with these arguments: also pass data"):
        pd.sbc(line, conjugate, X, replications=1, progress=False)


# --- types ------------------------------------------------------------------------------------------------------------


def test_constants_that_want_single_precision_are_sampled_in_it() -> None:
    torch.set_default_dtype(torch.float32)
    weights = torch.ones(2, 2)

    def model(x: Tensor, y: Tensor) -> None:
        slope = pyro.sample("slope", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("obs", dist.Normal((x @ weights) @ slope, 1.0), obs=y)

    x = torch.stack([X, X], -1).float()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = pd.nuts(model, x, Y.float(), **{**QUICK, "samples": 10, "warmup": 10})
    assert found.weights["slope"].dtype == torch.float32
    assert np.isfinite(found.weights["slope"].numpy()).all()
    assert ModelCall(model, (x,)).dtype == torch.float32
