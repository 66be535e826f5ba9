"""What else takes such a step: plain PyTorch, which is the baseline, and stock Pyro."""

import importlib
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO
from pyro.infer.autoguide import AutoLowRankMultivariateNormal, AutoNormal
from torch import Tensor, nn

from tests.benchmarks.ours import LEARNING_RATE, RANK, dropout
from tests.benchmarks.sizes import TAU, Size
from tests.benchmarks.timing import Absent, Advance, Contestant

BASELINE = "PyTorch nn.Dropout, eager"


def needed(name: str) -> Any:
    """Import a package, or say that it is absent."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as cause:
        raise Absent(name) from cause


def plain(size: Size, device: str) -> tuple[Advance, int]:
    """Return the baseline: dropout, a loss and Adam, without even a weight decay."""
    (x, y), net = size.data(device), size.net(device, dropout=True)
    loss = nn.functional.cross_entropy if size.classes else nn.functional.mse_loss
    optimiser = torch.optim.Adam(net.parameters(), LEARNING_RATE)

    def advance(steps: int) -> None:
        for _ in range(steps):
            optimiser.zero_grad()
            loss(net(x), y).backward()
            optimiser.step()

    return advance, 1


def plain_bnn(size: Size, device: str) -> Callable[..., Any]:
    """Return a Bayesian network written out by hand in plain Pyro."""
    zero, one = torch.zeros((), device=device), torch.ones((), device=device)
    last = len(size.shapes) - 1

    def model(x: Tensor, y: Tensor | None = None) -> None:
        for k, (a, b) in enumerate(size.shapes):
            weight = pyro.sample(f"w{k}", dist.Normal(zero, one / a**0.5).expand([b, a]).to_event(2))
            bias = pyro.sample(f"b{k}", dist.Normal(zero, one).expand([b]).to_event(1))
            x = x @ weight.mT + bias
            x = x if k == last else x.relu()
        with pyro.plate("data", len(x)):
            likelihood = dist.Categorical(logits=x) if size.classes else dist.Normal(x, TAU**-0.5).to_event(1)
            pyro.sample("y", likelihood, obs=y)

    return model


def stock_pyro(size: Size, device: str, guide: Callable[[Any], Any], loss: Any) -> tuple[Advance, int]:
    """Return steps of Pyro's own SVI."""
    x, y = size.data(device)
    model = plain_bnn(size, device)
    svi = SVI(model, guide(model), pyro.optim.Adam({"lr": LEARNING_RATE}), loss)

    def advance(steps: int) -> None:
        for _ in range(steps):
            svi.step(x, y)

    return advance, 1


def contestants(size: Size, device: str) -> list[Contestant]:
    """Return the peers that run on torch, the baseline first."""

    def pyros(guide: Callable[[Any], Any], loss: Any) -> Callable[[], tuple[Advance, int]]:
        return lambda: stock_pyro(size, device, guide, loss)

    def low_rank(model: Any) -> Any:
        return AutoLowRankMultivariateNormal(model, rank=RANK)

    return [
        Contestant(BASELINE, lambda: plain(size, device)),
        Contestant("Pyro SVI, TraceMeanField_ELBO, our AutoDropout", pyros(dropout, TraceMeanField_ELBO())),
        Contestant("Pyro SVI, Trace_ELBO, AutoNormal", pyros(AutoNormal, Trace_ELBO())),
        Contestant("Pyro SVI, TraceMeanField_ELBO, AutoNormal", pyros(AutoNormal, TraceMeanField_ELBO())),
        Contestant("Pyro SVI, Trace_ELBO, AutoLowRankMultivariateNormal rank 10", pyros(low_rank, Trace_ELBO())),
    ]
