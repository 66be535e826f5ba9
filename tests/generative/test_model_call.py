"""A model's own arguments: what its signature says, mini-batches of trees, num_data; and training any Pyro model."""

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
from pyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
from torch import Tensor

import pyro_dropout as pd
from tests.prediction.pyro_models import CASES, X, Y

pytestmark = pytest.mark.usefixtures("in_float64")

QUIET: Any = {"compile": False, "progress": False, "seed": 0, "lr": 0.05}


@pytest.mark.parametrize("kind", [AutoNormal, AutoMultivariateNormal, pd.AutoMeanField])
@pytest.mark.parametrize("name", ["line", "schools", "table", "counts", "module", "nested"])
@pytest.mark.thinned(4)
def test_any_model_is_trained_on_its_own_arguments(name: str, kind: Any) -> None:
    case = CASES[name]
    model = case.make()
    guide = kind(model)
    history = pd.fit(model, guide, *case.args, steps=30, **QUIET, **case.kwargs)
    assert history.steps == 30
    near = 0.5 if name == "counts" else 0.0  # whose prior is nearly its posterior
    assert history.losses[-10:].mean() < history.losses[:5].mean() + near


def test_a_subsampled_plate_scales_itself() -> None:
    def model(x: Tensor, y: Tensor) -> None:
        slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x), subsample_size=4) as rows:
            pyro.sample("obs", dist.Normal(slope * x[rows], 0.5), obs=y[rows])

    guide = AutoNormal(model)
    pd.fit(model, guide, X, Y, steps=120, **QUIET)
    exact = float((X * Y).sum() / 0.25 / (1 + X.square().sum() / 0.25))
    assert guide.median()["slope"].item() == pytest.approx(exact, abs=0.3)
