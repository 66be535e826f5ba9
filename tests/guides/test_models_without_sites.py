"""Models whose sites a guide has no use for: none at all, none that is latent, and none that is a weight."""

import warnings
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoGuideList
from pyro.optim import Adam
from torch import Tensor

import pyro_dropout as pd


def _observed(x: Tensor) -> None:
    loc = pyro.param("loc", torch.tensor(0.0))
    with pyro.plate("data", len(x), dim=-1):
        pyro.sample("y", dist.Normal(loc, 1.0), obs=pyro.subsample(x, event_dim=0))


def _two(x: Tensor) -> None:
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    pyro.sample("weight", dist.Normal(torch.zeros(2, 2), 1.0).to_event(2))
    pyro.sample("y", dist.Normal(slope * x, 1.0).to_event(1), obs=x)


@pytest.mark.parametrize("kind", [pd.AutoMeanField, pd.AutoLowRank, pd.AutoDropout, pd.AutoFullRank])
def test_a_model_without_latent_sites_trains_its_parameters(kind: Any) -> None:
    """As with Pyro's AutoNormal, whole or subsampled."""
    x = torch.ones(10)
    plates = lambda x: pyro.plate("data", len(x), subsample_size=5, dim=-1)  # noqa: E731
    for guide in (kind(_observed), kind(_observed, create_plates=plates)):
        pyro.clear_param_store()
        assert guide(x) == {}
        SVI(_observed, guide, Adam({"lr": 0.1}), Trace_ELBO()).step(x)
        pd.fit(_observed, guide, x, steps=2, lr=0.1, compile=False, progress=False)
        assert pyro.param("loc").item() == pytest.approx(0.3, abs=0.05)


@pytest.mark.parametrize("ask", [pd.predict, pd.to_arviz, pd.khat])
def test_there_is_nothing_to_draw_from_it(ask: Any) -> None:
    guide = pd.AutoMeanField(_observed)
    guide(torch.ones(4))
    with pytest.raises(pd.errors.PyroDropoutError, match="no latent site, so there is nothing to draw"):
        ask(_observed, guide, torch.ones(4))


def test_the_warning_about_missing_weights_can_be_filtered_and_is_not_given_without_reason() -> None:
    """It is no concern of a part of an AutoGuideList, nor of a model that says what its sites are."""
    x = torch.ones(3)

    def marked(x: Tensor) -> None:
        pyro.sample("z", dist.Normal(x, 1.0).to_event(1), infer={"kind": "other"})

    parts = AutoGuideList(_two)
    parts.append(pd.AutoDropout(poutine.block(_two, hide=["slope"]), scale=0.1))
    parts.append(pd.AutoDropout(poutine.block(_two, expose=["slope"]), scale=0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for guide in (parts, pd.AutoDropout(marked), pd.AutoDropout(_observed)):
            guide(x)
        pd.AutoLowRank(poutine.block(_two, hide=["weight"]), per="net")(x)
    for guide in (pd.AutoDropout, pd.AutoLowRank):  # low rank by layer is mean field then
        with pytest.warns(pd.errors.NoWeightWarning, match="finds no weight"):
            guide(poutine.block(_two, hide=["weight"]))(x)
