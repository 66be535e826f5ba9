"""A network under Pyro's JitTrace_ELBO: torch.jit traces one step, and every later one must read the new parameters."""

from collections.abc import Callable
from typing import Any

import pyro
import pytest
import torch
from pyro.infer import JitTrace_ELBO, Trace_ELBO
from torch import nn

import pyro_dropout as pd


@pytest.mark.usefixtures("unchecked_shapes")  # torch.jit hands shapes around as tensors
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "make",
    [pd.AutoMeanField, lambda model: pd.AutoDropout(model, scale=0.1, bias="gaussian")],
    ids=["mean-field", "dropout"],
)
def test_losses_and_gradients_are_those_of_trace_elbo(make: Callable[[Any], Any]) -> None:
    net, x = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1)), torch.randn(20, 3, dtype=torch.float64)
    y, model = x.sum(1, keepdim=True), pd.BayesianNet(net, likelihood=pd.Gaussian(2.0, learn=True)).double()
    guide = make(model)
    traced, plain = JitTrace_ELBO(ignore_jit_warnings=True), Trace_ELBO()
    traced.loss_and_grads(model, guide, x, y)
    trained = [*guide.parameters(), model.likelihood.log_tau]
    for seed in range(3):
        with torch.no_grad():  # what the traced program must see, though it was traced before
            for value in trained:
                value.add_(0.1 * torch.randn_like(value))
        found = []
        for loss in (plain, traced):
            for value in trained:
                value.grad = None
            pyro.set_rng_seed(seed)
            found.append((loss.loss_and_grads(model, guide, x, y), [value.grad.clone() for value in trained]))
        # torch.jit holds sizes as tensors, so that a size times log 2π is rounded to float32
        assert found[0][0] == pytest.approx(found[1][0], rel=1e-7)
        for one, other in zip(found[0][1], found[1][1], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-8)
