"""What a model or a guide registers in Pyro's store is there while it lives, and gone with it."""

import gc

import pyro
import pytest
import torch
from torch import Tensor

import pyro_dropout as pd
from tests.generative.test_registration import data, normed, step

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


def test_a_value_that_was_loaded_stays() -> None:
    model = normed()
    guide = pd.AutoMeanField(model)
    step(model, guide, count=1)
    store = pyro.get_param_store()
    state = {part: dict(values) for part, values in store.get_state().items()}  # type: ignore[call-overload]
    state["params"] = {name: value.detach().clone().requires_grad_() for name, value in state["params"].items()}
    store.set_state(state)
    del guide, model
    gc.collect()
    assert "AutoMeanField.0.weight.loc" in store
