"""Optimiser updates against torch's own optimisers, step by step."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pyro
import pytest
import torch

import pyro_dropout as pd
from pyro_dropout.training.compile.optimiser_state import from_group
from pyro_dropout.training.optimisers import adam, clock, cosine_decay, sgd

F64 = torch.float64


@pytest.mark.parametrize(
    ("update", "make"),
    [
        (adam(0.02, (0.8, 0.99), 1e-6, 0.1), lambda p: torch.optim.Adam(p, 0.02, (0.8, 0.99), 1e-6, 0.1)),
        (adam(0.02, weight_decay=0.1, decoupled=True), lambda p: torch.optim.AdamW(p, 0.02, weight_decay=0.1)),
        (sgd(0.05, 0.9, 0.1, nesterov=True), lambda p: torch.optim.SGD(p, 0.05, 0.9, weight_decay=0.1, nesterov=True)),
        (sgd(0.05), lambda p: torch.optim.SGD(p, 0.05)),
    ],
    ids=["adam", "adamw", "nesterov", "sgd"],
)
def test_updates_are_torchs(update: pd.training.Update, make: Callable[..., Any]) -> None:
    start = [torch.randn(4, 3, dtype=F64), torch.randn(5, dtype=F64)]
    leaves = [p.clone().requires_grad_() for p in start]
    optimiser = make(leaves)
    values, state = start, update.start(start)
    for taken in range(1, 8):
        gradients = [torch.randn_like(p) for p in start]
        for leaf, gradient in zip(leaves, gradients, strict=True):
            leaf.grad = gradient.clone()
        optimiser.step()
        t, lr = clock(update.lr, values, taken)
        values, state = update.step(values, gradients, state, t, lr)
        torch.testing.assert_close(values, [leaf.detach() for leaf in leaves], rtol=1e-12, atol=1e-12)


def test_clipping_is_torchs() -> None:
    parameters = [torch.randn(3, dtype=F64, requires_grad=True), torch.randn(2, 2, dtype=F64, requires_grad=True)]
    gradients = [torch.randn_like(p) * 5 for p in parameters]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    values = [p.detach().clone() for p in parameters]
    torch.nn.utils.clip_grad_norm_(parameters, 0.7)
    torch.optim.SGD(parameters, 0.1).step()
    update = replace(sgd(0.1), clip_norm=0.7)
    new, _ = update.step(values, gradients, update.start(values), *clock(update.lr, values, 1))
    torch.testing.assert_close(new, [p.detach() for p in parameters], rtol=1e-12, atol=0)


@pytest.mark.parametrize("optim", ["adam", "adamw", "sgd"])
@pytest.mark.parametrize("compile", [False, "traced", pytest.param(True, marks=pytest.mark.deep)])
def test_a_float32_noise_of_a_float64_network_trains_with_clipped_gradients(optim: str, compile: Any) -> None:
    model = pd.BayesianNet(torch.nn.Linear(3, 1).double(), likelihood=pd.Gaussian(tau=10.0, learn=True))
    guide, x = pd.AutoDropout(model, keep=1.0), torch.linspace(-1, 1, 24, dtype=F64).view(8, 3)
    (tau,) = model.likelihood.parameters()
    before = tau.item()
    pd.fit(model, guide, x, x[:, :1], steps=3, lr=0.01, optim=optim, clip_norm=1.0, compile=compile, progress=False)
    assert tau.dtype == torch.float32
    assert tau.item() != before


@pytest.mark.parametrize("decoupled", [False, True])
def test_adam_decays_weights_as_it_is_told(decoupled: bool) -> None:
    leaf = torch.ones(3, dtype=F64, requires_grad=True)
    optimiser = torch.optim.Adam([leaf], 0.1, weight_decay=10.0, decoupled_weight_decay=decoupled)
    update = from_group(type(optimiser), optimiser.param_groups[0])
    assert update is not None
    gradient = torch.tensor([0.5, -2.0, 1.0], dtype=F64)
    values, state = [leaf.detach().clone()], update.start([leaf.detach()])
    for taken in (1, 2, 3):
        leaf.grad = gradient.clone()
        optimiser.step()
        values, state = update.step(values, [gradient], state, *clock(update.lr, values, taken))
    torch.testing.assert_close(values[0], leaf.detach(), rtol=1e-12, atol=1e-12)


def conjugate() -> tuple[Any, Any, torch.Tensor, torch.Tensor]:
    """A bias with a N(0, 1) prior and 50 targets around 20, of precision 4: its posterior has mean 4·1000/201."""
    net = torch.nn.Linear(1, 1).to(F64)
    model = pd.BayesianNet(net, pd.Prior(), pd.Gaussian(4.0)).to(F64)
    return model, pd.AutoMeanField(model), torch.zeros(50, 1, dtype=F64), torch.full((50, 1), 20.0, dtype=F64)


@pytest.mark.parametrize("optim", ["adam", "adamw", "sgd"])
def test_a_named_optimiser_leaves_the_decay_to_the_kl(optim: str) -> None:
    model, guide, x, y = conjugate()
    pd.fit(model, guide, x, y, steps=3000, lr=1e-4 if optim == "sgd" else 0.1, optim=optim, schedule=cosine_decay(3000))
    assert abs(guide.mean()["bias"].item() - 4000 / 201) < 0.01  # a decay of 0.01 moves it by ten times as much


DECAYS: dict[str, Callable[[Any], Any]] = {
    "AdamW, by torch's default": lambda p: torch.optim.AdamW(p, 0.1),
    "SGD": lambda p: torch.optim.SGD(p, 1e-5, weight_decay=0.01),
    "one group of two": lambda p: torch.optim.SGD([{"params": p[:1], "weight_decay": 0.01}, {"params": p[1:]}], 1e-5),
    "an Update": lambda p: adam(0.1, weight_decay=0.01),
}


@pytest.mark.parametrize("kind", DECAYS)
def test_a_decay_beside_the_kl_is_named(kind: str) -> None:
    model, guide, x, y = conjugate()
    optim = DECAYS[kind](list(guide.parameters()))
    with pytest.warns(UserWarning, match=r"weight_decay=0\.01 changes the objective: it is no longer the ELBO"):
        pd.fit(model, guide, x, y, steps=1, optim=optim, compile=False)
    # Without a KL the decay is the only one: warnings are errors here.
    pd.fit(model, guide, x, y, steps=1, optim=optim, compile=False, loss=pd.ELBO(temperature=0.0))


@pytest.mark.parametrize("settings", [{"lr": 0.1}, lambda name: {"lr": 0.1, "weight_decay": 0.01}])
def test_svi_names_a_decay_once(settings: Any) -> None:
    model, guide, x, y = conjugate()
    svi = pd.SVI(model, guide, pyro.optim.AdamW(settings), compile=False)
    with pytest.warns(UserWarning, match="changes the objective"):
        svi.step(x, y)
    svi.step(x, y)


def test_what_a_compiled_step_of_svi_does_not_know_is_not_read() -> None:
    w = [torch.zeros(2, requires_grad=True)]
    for unknown in (
        torch.optim.SGD(w, 0.2, dampening=0.1, momentum=0.5),
        torch.optim.RMSprop(w, 0.2),
        torch.optim.Adam(w, 0.1, amsgrad=True),
        pyro.optim.clipped_adam.ClippedAdam(w, 0.3),  # it decays its own learning rate
    ):
        assert from_group(type(unknown), unknown.param_groups[0]) is None
