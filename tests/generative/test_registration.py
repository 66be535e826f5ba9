"""Names in Pyro's store: the same in every process, never shared by two owners, and a loaded value wins."""

import gc
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from pyro.optim import Adam
from torch import Tensor, nn

import pyro_dropout as pd
from tests.own_process import python


def normed() -> pd.BayesianNet:
    """A network with a hidden parameter (of the normalisation), and a learned precision."""
    net = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Linear(3, 1))
    return pd.BayesianNet(net, likelihood=pd.Gaussian(1.0, learn=True))


def data() -> tuple[Tensor, Tensor]:
    x = torch.linspace(-1, 1, 12).reshape(6, 2)
    return x, x[:, :1]


def step(model: Any, guide: Any, lr: float = 0.1, count: int = 2) -> None:
    svi = SVI(model, guide, Adam({"lr": lr}), pd.ELBO(per_example=False))
    for _ in range(count):
        svi.step(*data())


@pytest.mark.deep
def test_a_store_saved_by_one_script_is_found_by_another(tmp_path: Path) -> None:
    """The second script builds other objects first, and in another order."""
    script = """
import sys, torch, pyro, pyro_dropout as pd
from tests.generative.test_registration import normed, step, data
torch.manual_seed(int(sys.argv[2]))
if sys.argv[1] == "load":
    others = [pd.AutoDropout(normed()), pd.Gaussian(2.0, learn=True)]
    guide = pd.AutoMeanField(model := normed())
    pyro.get_param_store().load(sys.argv[3])
    step(model, guide, lr=0.0, count=1)
else:
    guide = pd.AutoMeanField(model := normed())
    step(model, guide)
    pyro.get_param_store().save(sys.argv[3])
print(guide.mean()["0.weight"].flatten().tolist(), model.net[1].weight.tolist(), model.likelihood.tau.item())
"""
    said = []
    for seed, what in enumerate(("save", "load")):
        said.append(python("-W", "ignore", "-c", script, what, seed, tmp_path / "store.pt").stdout)
    assert said[0] == said[1]


def test_a_loaded_value_of_another_shape_is_refused_by_name() -> None:
    model = normed()
    guide = pd.AutoMeanField(model)
    pyro.get_param_store().set_state(
        {
            "params": {"AutoMeanField.0.weight.loc": torch.zeros(5, requires_grad=True)},
            "constraints": {"AutoMeanField.0.weight.loc": dist.constraints.real},
        }
    )
    with pytest.raises(pd.errors.ShapeError, match=r"'AutoMeanField\.0\.weight\.loc' with shape"):
        guide(*data())


def test_a_guide_made_anew_starts_anew() -> None:
    """As when a cell of a notebook is run twice: what the first one has learned stays its own."""
    model = normed()
    guide = pd.AutoMeanField(model)
    step(model, guide, count=5)
    trained = guide.mean()["0.weight"]
    guide = pd.AutoMeanField(model)
    step(model, guide, lr=0.0, count=1)
    assert not torch.equal(guide.mean()["0.weight"], trained)
    assert torch.allclose(guide.mean()["0.weight"], model.net[0].weight)


def test_a_parameter_that_is_not_contiguous_is_trained() -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm([3]))
    net[1].weight = nn.Parameter(torch.ones(3, 2)[:, 0])  # every other number of its memory
    model = pd.BayesianNet(net)
    before = net[1].weight.detach().clone()
    SVI(model, pd.AutoMeanField(model), Adam({"lr": 0.1}), pd.ELBO()).step(data()[0], torch.zeros(6, 3))
    assert not torch.equal(net[1].weight, before)


# --- what is registered is there while its owner lives, and gone with it ----------------------------------------------

QUIET = {"compile": False, "progress": False}


def train(kind: type = pd.AutoMeanField) -> Tensor:
    """Train a fresh pair, and let go of it."""
    model = normed()
    guide = kind(model)
    pd.fit(model, guide, *data(), steps=2, **QUIET)
    assert len(pyro.get_param_store()) >= len(list(guide.parameters()))
    return pd.predict(model, guide, data()[0], samples=3).mean


@pytest.mark.parametrize("kind", [pd.AutoMeanField, pd.AutoDropout, lambda model: pd.Ensemble(model, members=2)])
def test_a_fit_leaves_nothing_behind(kind: type) -> None:
    train(kind)
    gc.collect()
    assert not len(pyro.get_param_store())
    assert not pyro.get_param_store()._constraints
    assert not pyro.get_param_store()._param_to_name


def test_what_lives_stays_in_the_store() -> None:
    model = normed()
    first, second = pd.AutoMeanField(model), pd.AutoMeanField(model)
    for guide in (first, second):
        step(model, guide, count=1)
    store = pyro.get_param_store()
    del first, guide
    gc.collect()
    held = {id(value) for value in store._params.values()}
    assert held == {id(value) for part in (second, model.likelihood, model.net[1]) for value in part.parameters()}
    assert all(store.param_name(value) in store for value in second.parameters())
    step(model, second)
    torch.testing.assert_close(dict(store)["AutoMeanField_1.0.weight.loc"], second.states["0/weight"].loc)
