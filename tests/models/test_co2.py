"""The two series of the paper: the models are its objective, and scores are those of closed forms."""

from typing import Any

import pytest
import torch
from torch import Tensor

import pyro_dropout as pd
from tests.models.test_scripts import FOLDER, loaded

pytestmark = pytest.mark.deep  # the script runs whole, which takes a minute

co2 = loaded(FOLDER / "co2.py")


# --- the model --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dropped", [0.1, 0.2])
def test_every_weight_and_bias_has_the_papers_weight_decay(dropped: float) -> None:
    net = co2.model(4, 6, "ReLU", dropped, N)
    guide = co2.guide(net, dropped)
    torch.nn.init.normal_(guide.states["2/bias"].loc)
    kl = pd.ELBO().parts(net, guide, torch.zeros(N, 1), torch.zeros(N, 1))["kl"]
    kl.backward()
    locs = {name: p for name, p in guide.named_parameters() if name.endswith("loc")}
    assert len(locs) == 10  # five weights and five biases
    for name, loc in locs.items():  # minus the ELBO is Nτ times eq. 3, whose λ‖M‖² has the gradient 2λM
        assert torch.allclose(loc.grad, 2 * N * co2.TAU * co2.LAMBDA * loc, rtol=1e-5), name
    assert type(guide.posterior("0.weight")).__name__ == "Delta"  # the only input is never dropped
    assert guide.posterior("2.weight").probs[..., 0].unique().item() == pytest.approx(1 - dropped)


def objective(weights: list[Tensor], kind: str, x: Tensor, y: Tensor) -> Tensor:
    """Eq. 3 without dropout, written out."""
    h = x
    for k in range(0, len(weights), 2):
        h = h @ weights[k].T + weights[k + 1]
        if k < len(weights) - 2:
            h = torch.tanh(h) if kind == "TanH" else torch.relu(h)
    return (y - h).square().sum() / (2 * len(x)) + 1e-6 * sum(w.square().sum() for w in weights)


def test_a_fleet_takes_the_steps_of_sgd_on_the_papers_objective() -> None:
    x = torch.linspace(-1, 1, N)[:, None]
    y, none = torch.sin(3 * x), 1e-12  # keep rounds to 1 in float32: nothing random is left

    def build(kind: str) -> Any:
        torch.manual_seed(3)
        net = co2.model(1, 8, kind, none, N)
        return net, co2.guide(net, none)

    fleet = pd.Fleet(build, {"kind": co2.KINDS})
    starts = [[p.detach().clone() for p in guide.parameters()] for _, guide in fleet]
    rate = co2.RATE / (co2.TAU * N)
    options: Any = {"optim": "sgd", "schedule": pd.training.inverse_decay(), "compile": False, "progress": False}
    fleet.fit(x, y, steps=25, lr=rate, **options)
    for kind, weights, (_, guide) in zip(co2.KINDS, starts, fleet, strict=True):
        velocity = [torch.zeros_like(w) for w in weights]
        first = [w.clone() for w in weights]
        for t in range(25):
            free = [w.requires_grad_() for w in weights]
            gradients = torch.autograd.grad(objective(free, kind, x, y), free)
            velocity = [0.9 * v + g for v, g in zip(velocity, gradients, strict=True)]
            step = 0.01 * (1 + 1e-4 * t) ** -0.25
            weights = [(w - step * v).detach() for w, v in zip(free, velocity, strict=True)]
        assert max((w - start).abs().max() for w, start in zip(weights, first, strict=True)) > 1e-2
        for learned, oracle in zip(guide.parameters(), weights, strict=True):
            assert torch.allclose(learned, oracle, atol=2e-5)


# --- the answers ------------------------------------------------------------------------------------------------------


N = 30


# --- the model and the data -------------------------------------------------------------------------------------------


# --- the answers ------------------------------------------------------------------------------------------------------
