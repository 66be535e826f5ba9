"""Optimiser updates against torch's own optimisers, step by step."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pyro
import pytest
import torch

import pyro_dropout as pd
from pyro_dropout.training.optimisers import adam, clock, cosine_decay, from_group

F64 = torch.float64
OPTIMISERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda p: torch.optim.Adam(p, 0.02, (0.8, 0.99), 1e-6, 0.1),
    "adam, decoupled": lambda p: torch.optim.Adam(p, 0.1, weight_decay=10.0, decoupled_weight_decay=True),
    "adamw": lambda p: torch.optim.AdamW(p, 0.02, weight_decay=0.1),
    "nesterov": lambda p: torch.optim.SGD(p, 0.05, 0.9, weight_decay=0.1, nesterov=True),
    "sgd": lambda p: torch.optim.SGD(p, 0.05),
}


@pytest.mark.parametrize("clip", [None, 0.7])
@pytest.mark.parametrize("name", OPTIMISERS)
def test_updates_are_torchs(name: str, clip: float | None, dtype: torch.dtype) -> None:
    """With a schedule, and with clipped gradients: as functions, and where the parameters are."""
    leaves = [torch.randn(4, 3, dtype=dtype, requires_grad=True), torch.randn(5, dtype=dtype, requires_grad=True)]
    optimiser = OPTIMISERS[name](leaves)
    (group,) = optimiser.param_groups
    found = from_group(type(optimiser), group)
    assert found is not None
    update = replace(found, clip_norm=clip, schedule=lambda t: 1 / (1 + t))
    values = [leaf.detach().clone() for leaf in leaves]
    mine, state, slots = [value.clone() for value in values], update.start(values), update.start(values)
    for taken in range(1, 8):
        for leaf in leaves:
            leaf.grad = torch.randn_like(leaf)
        t, lr = clock(update.lr, values, taken)
        gradients = [leaf.grad.clone() for leaf in leaves]
        values, state = update.step(values, gradients, state, t, lr)
        update.in_place(mine, [gradient.clone() for gradient in gradients], slots, t, lr)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(leaves, clip)
        group["lr"] = update.lr / taken
        optimiser.step()
        wanted, slack = [leaf.detach() for leaf in leaves], 1e-6 if dtype == torch.float32 else 1e-12
        torch.testing.assert_close(values, wanted, rtol=10 * slack, atol=slack)
        slack = max(slack, 1e-7)  # torch's fused kernel takes the learning rate as a float
        torch.testing.assert_close(mine, wanted, rtol=10 * slack, atol=slack)
        torch.testing.assert_close(slots, state, rtol=10 * slack, atol=slack)


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
