"""What one training step holds in memory, beside the same step of plain dropout in torch."""

import gc
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pyro_dropout as pd
from tests.oracles.memory import allocations, peak_allocated

BATCH, WIDTH, HIDDEN = 272, 1024, 5


def layers(*, dropout: bool) -> nn.Sequential:
    """1-1024-1024-1024-1024-1024-1 with ReLU, and dropout before every weight layer where asked for."""
    parts: list[nn.Module] = []
    for a, b in ((1, WIDTH), *[(WIDTH, WIDTH)] * (HIDDEN - 1), (WIDTH, 1)):
        parts += [*([nn.Dropout(0.1)] if dropout else []), nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*parts[:-1])


def peak_bytes(trained: nn.Module, loss: Callable[[Tensor, Tensor], Tensor]) -> int:
    """The most bytes held at any time in one step: the trained weights, and all that the step allocates."""
    x, y = torch.randn(BATCH, 1), torch.randn(BATCH, 1)
    weights = sum(p.numel() * p.element_size() for p in trained.parameters())
    return weights + peak_allocated(lambda: loss(x, y).backward())


def test_a_step_holds_at_most_half_as_much_again_as_plain_dropout() -> None:
    net = layers(dropout=True)
    weights = sum(p.numel() * p.element_size() for p in net.parameters())
    theirs = peak_bytes(net, lambda x, y: F.mse_loss(net(x), y))
    assert theirs > 2 * weights  # weights and gradients at least, or the measurement is not one
    model = pd.BayesianNet(layers(dropout=False))
    guide, elbo = pd.AutoDropout(model, keep=0.9), pd.ELBO()
    own = peak_bytes(guide, lambda x, y: elbo.differentiable_loss(model, guide, x, y))
    # the network that the guide started from keeps its values, which the step does not touch
    both = own + weights
    mebi = 2**20
    print(f"plain dropout {theirs / mebi:.1f} MiB; AutoDropout {own / mebi:.1f} MiB, {own / theirs:.2f} times as much")
    print(f"with the network's own weights, {both / mebi:.1f} MiB, {both / theirs:.2f} times")
    assert own <= 1.5 * theirs
    assert both <= 1.6 * theirs


def test_a_step_leaves_nothing_behind() -> None:
    # what is left after a step must not wait for Python's cycle collector
    model = pd.BayesianNet(layers(dropout=False))
    guide, elbo = pd.AutoDropout(model, keep=0.9), pd.ELBO()
    x, y = torch.randn(BATCH, 1), torch.randn(BATCH, 1)
    elbo.differentiable_loss(model, guide, x, y).backward()

    def three_steps() -> None:
        for _ in range(3):
            elbo.differentiable_loss(model, guide, x, y).backward()

    gc.collect()
    gc.disable()
    try:
        left = sum(allocations(three_steps))
    finally:
        gc.enable()
    print(f"left after three steps: {left} bytes")
    assert left < BATCH * WIDTH  # less than a quarter of one activation
