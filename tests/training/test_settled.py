"""A learning rate that has decayed and a posterior that has settled: the losses are flat in both, and they differ."""

import math
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import autoguide
from torch import Tensor, nn

import pyro_dropout as pd
from pyro_dropout.errors import UnfinishedTrainingWarning
from pyro_dropout.generative.model_call import ModelCall
from pyro_dropout.training.optimisers import cosine_decay
from pyro_dropout.training.settled import held_back

QUIET: dict[str, Any] = {"compile": False, "progress": False, "seed": 0}
HELD_BACK = "learning rate had fallen to .* before the posterior had settled.*deviations: "


def line(x: Tensor, y: Tensor | None = None, num_data: int | None = None) -> None:
    """A Bayesian linear regression with wide priors."""
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 30.0).to_event(1))
    b = pyro.sample("b", dist.Normal(0.0, 30.0))
    with pyro.plate("data", num_data or len(x), subsample_size=len(x)):
        pyro.sample("y", dist.Normal(x @ w + b, 5.0), obs=y)


def by_hand(x: Tensor, y: Tensor | None = None, num_data: int | None = None) -> None:
    for name, start in (("w", torch.zeros(2)), ("b", torch.zeros(()))):
        width = pyro.param(f"{name}.width", torch.ones(start.shape), constraint=dist.constraints.positive)
        pyro.sample(name, dist.Normal(pyro.param(f"{name}.mean", start), width).to_event(start.dim()))


def far(shift: float = 30.0) -> tuple[Tensor, Tensor]:
    x = torch.randn(60, 2)
    return x, shift + x @ torch.tensor([shift, -shift]) + 5 * torch.randn(60)


GUIDES: dict[str, Callable[[], Any]] = {
    "mean-field": lambda: pd.AutoMeanField(line),
    "full-rank": lambda: pd.AutoFullRank(line),
    "low-rank": lambda: pd.AutoLowRank(line, rank=1, per="net"),
    "Pyro's": lambda: autoguide.AutoNormal(line),
    "Pyro's diagonal": lambda: autoguide.AutoDiagonalNormal(line),
    "Pyro's full-rank": lambda: autoguide.AutoMultivariateNormal(line),
    "by hand": lambda: by_hand,
}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("guide", GUIDES)
def test_a_rate_that_decayed_too_soon_is_told(guide: str) -> None:
    # The rate sums up to 1.7, and the coefficients are 30.
    with pytest.warns(UnfinishedTrainingWarning, match=HELD_BACK):
        pd.fit(line, GUIDES[guide](), *far(), steps=250, lr=0.05, schedule=lambda t: 0.97**t, **QUIET)


def test_mini_batches_are_looked_through() -> None:
    model = pd.BayesianNet(nn.Linear(2, 1), pd.Prior(0.01), pd.Gaussian(tau=0.04))
    x, y = far()
    with pytest.warns(UnfinishedTrainingWarning, match=HELD_BACK + ".*weight"):
        pd.fit(
            model, pd.AutoMeanField(model), x, y.unsqueeze(-1), steps=250, batch_size=15, lr=0.05,
            schedule=lambda t: 0.97**t, **QUIET,
        )  # fmt: skip


@pytest.mark.thinned(3)
@pytest.mark.parametrize("guide", ["dropout", *GUIDES, "points"])
def test_what_has_settled_or_has_no_width_is_not(guide: str) -> None:
    """Warnings are errors here."""
    if guide == "points":
        pd.fit(line, autoguide.AutoDelta(line), *far(), steps=250, lr=0.05, schedule=lambda t: 0.97**t, **QUIET)
    elif guide == "dropout":
        model = pd.BayesianNet(nn.Linear(2, 1), pd.Prior(0.01), pd.Gaussian(tau=0.04))
        x, y = far()
        how: dict[str, Any] = {"steps": 250, "lr": 0.05, "schedule": lambda t: 0.97**t}
        pd.fit(model, pd.AutoDropout(model), x, y.unsqueeze(-1), **how, **QUIET)
    else:
        pd.fit(line, GUIDES[guide](), *far(3.0), steps=300, lr=0.3, schedule=cosine_decay(300), **QUIET)


@pytest.mark.parametrize("off", [0.3, 5.0])
def test_distances_are_those_of_a_conjugate_posterior(off: float) -> None:
    """Of y ~ N(w, 1), w ~ N(0, 1): q has its width, and is ``off`` such widths away."""
    y = torch.randn(50)

    def model(y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(w, 1.0), obs=y)

    width = 1 / math.sqrt(len(y) + 1)
    guide = autoguide.AutoNormal(model, init_loc_fn=lambda site: y.sum() * width**2 + off * width, init_scale=width)
    guide(y)
    state = torch.get_rng_state()
    told = held_back(lambda t: 0.99**t, 1000, model, guide, pd.ELBO(per_example=False), ModelCall(model, (y,)), len(y))
    assert torch.equal(torch.get_rng_state(), state)
    assert ("w by about 5." in told) == (off > 1)
    assert not held_back(None, 1000, model, guide, pd.ELBO(), ModelCall(model, (y,)), len(y))  # the losses show it
