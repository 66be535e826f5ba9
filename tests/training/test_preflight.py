"""What a training is asked to do: what is refused before anything is changed, and what is let through."""

from functools import partial
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor, nn

import pyro_dropout as pd
from pyro_dropout.training.preflight import check_targets

QUIET: Any = {"steps": 2, "compile": False, "progress": False}
X = torch.linspace(-1, 1, 12).unsqueeze(-1)
ONES = torch.ones(12, 1)


def made(likelihood: pd.generative.Likelihood) -> pd.BayesianNet:
    return pd.BayesianNet(nn.Sequential(nn.Linear(1, 4), nn.ReLU(), nn.Linear(4, 1)), likelihood=likelihood)


# --- targets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("likelihood", "y"),
    [
        (pd.Bernoulli(), ONES),
        (pd.Bernoulli(), ONES > 0),
        (pd.Bernoulli(), ONES.long()),
        (pd.Poisson(), 3 * ONES),
        (pd.Poisson(), ONES.long()),
        (pd.Gaussian(), ONES.long()),
    ],
)
@pytest.mark.thinned(3)
def test_possible_targets_are_trained_on(likelihood: pd.generative.Likelihood, y: Tensor) -> None:
    model = made(likelihood)
    history = pd.fit(model, pd.AutoDropout(model), X, y, validation=(X, y), **QUIET)
    assert history.losses.isfinite().all()


class Even(pd.generative.Likelihood):
    """A likelihood of someone else's, whose targets are even."""

    def distribution(self, f: Tensor) -> Any:
        return dist.Normal(f, 1.0).to_event(1)

    def check_values(self, f: Tensor, y: Tensor) -> None:
        if bool((y % 2 != 0).any()):
            raise pd.errors.RangeError("y must be even.")


def test_a_likelihood_of_ones_own_is_asked_too() -> None:
    check_targets(made(Even()), X, 2 * ONES)
    with pytest.raises(pd.errors.RangeError, match=r"^y must be even\.$"):
        check_targets(made(Even()), X, ONES)


def test_looking_leaves_no_mark() -> None:
    model = pd.BayesianNet(
        nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)), likelihood=pd.Bernoulli()
    )
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    check_targets(model, X, ONES)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


# --- gradients --------------------------------------------------------------------------------------------------------


def test_training_in_inference_mode_is_refused_by_name() -> None:
    model = made(pd.Gaussian(4.0))
    guide = pd.AutoMeanField(model)
    fleet = pd.Fleet(lambda seed: (model, guide), {"seed": [0]})
    with torch.inference_mode():
        for train in (partial(pd.fit, model, guide), fleet.fit):
            with pytest.raises(
                pd.errors.PyroDropoutError, match=r"torch\.inference_mode\(\) switches off; do it outside"
            ):
                train(X, X, **QUIET)
        svi = pd.SVI(model, guide, pyro.optim.Adam({"lr": 0.1}), compile=False)
        with pytest.raises(pd.errors.PyroDropoutError, match=r"training needs gradients"):
            svi.step(X, X)
        with pytest.raises(pd.errors.PyroDropoutError, match=r"sampling needs gradients"):
            pd.nuts(model, X, X, chains=2, samples=4, warmup=4, compile=False, progress=False)
        made_there = pd.AutoMeanField(model)
    with pytest.raises(pd.errors.PyroDropoutError, match=r"of the guide was made in torch\.inference_mode"):
        pd.fit(model, made_there, X, X, **QUIET)


def test_an_eager_step_without_gradients_trains_as_a_compiled_one_does() -> None:
    model = made(pd.Gaussian(4.0))
    guide = pd.AutoMeanField(model)
    before = guide.mean()
    with torch.no_grad():
        pd.SVI(model, guide, pyro.optim.Adam({"lr": 0.1}), compile=False).step(X, X)
    assert all(not torch.equal(value, before[name]) for name, value in guide.mean().items())


def test_data_made_in_inference_mode_are_trained_on_and_predicted_in_it() -> None:
    model = made(pd.Gaussian(4.0))
    guide = pd.AutoMeanField(model)
    with torch.inference_mode():
        x = 2 * X
    assert torch.isfinite(pd.fit(model, guide, x, x, **QUIET).losses).all()
    outside = pd.predict(model, guide, x, samples=5, seed=0)
    with torch.inference_mode():
        inside = pd.predict(model, guide, x, samples=5, seed=0)
        assert torch.equal(inside.log_prob(x), outside.log_prob(x))


@pytest.mark.parametrize("optim", ["adam", "torch"])
def test_a_guide_with_nothing_to_train_is_refused_by_name(optim: str) -> None:
    model = made(pd.Gaussian(4.0))
    guide = pd.AutoMeanField(model)
    chosen: Any = torch.optim.Adagrad(guide.parameters()) if optim == "torch" else optim
    guide.requires_grad_(False)
    with pytest.raises(pd.errors.PyroDropoutError, match=r"nothing to train: AutoMeanField.*requires_grad_\(True\)"):
        pd.fit(model, guide, X, X, optim=chosen, **QUIET)
    with pytest.raises(pd.errors.PyroDropoutError, match="nothing to train"):
        pd.Fleet(lambda seed: (model, guide), {"seed": [0]}).fit(X, X, **QUIET)
    next(guide.parameters()).requires_grad_(True)
    assert pd.fit(model, guide, X, X, **QUIET).steps == 2
