"""What else takes such a step: plain PyTorch, which is the baseline, stock Pyro, TyXe and bayesian-torch."""

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


def loss_of(size: Size) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the negative log-likelihood of one batch, as one writes it in torch."""
    return nn.functional.cross_entropy if size.classes else nn.functional.mse_loss


def descending(net: nn.Module, loss: Callable[[], Tensor]) -> tuple[Advance, int]:
    """Return eager steps of Adam."""
    optimiser = torch.optim.Adam(net.parameters(), LEARNING_RATE)

    def advance(steps: int) -> None:
        for _ in range(steps):
            optimiser.zero_grad()
            loss().backward()
            optimiser.step()

    return advance, 1


def plain(size: Size, device: str) -> tuple[Advance, int]:
    """Return the baseline: dropout, a loss and Adam, without even a weight decay."""
    (x, y), net, loss = size.data(device), size.net(device, dropout=True), loss_of(size)
    return descending(net, lambda: loss(net(x), y))


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


def tyxe(size: Size, device: str) -> tuple[Advance, int]:
    """Return steps of TyXe's ``VariationalBNN.fit``."""
    package = needed("tyxe")
    x, y = size.data(device)
    prior = package.priors.IIDPrior(dist.Normal(torch.zeros((), device=device), torch.ones((), device=device)))
    if size.classes:
        likelihood = package.likelihoods.Categorical(len(x))
    else:
        likelihood = package.likelihoods.HomoskedasticGaussian(len(x), scale=TAU**-0.5)
    bnn = package.VariationalBNN(size.net(device), prior, likelihood, package.guides.AutoNormal)
    optimiser = pyro.optim.Adam({"lr": LEARNING_RATE})
    return lambda steps: bnn.fit([(x, y)] * steps, optimiser, 1, device=device), 1


def bayesian_torch(size: Size, device: str) -> tuple[Advance, int]:
    """Return steps of a network whose layers bayesian-torch has replaced."""
    convert = needed("bayesian_torch.models.dnn_to_bnn")
    (x, y), net, loss = size.data(device), size.net(device), loss_of(size)
    options = {"prior_mu": 0.0, "prior_sigma": 1.0, "posterior_mu_init": 0.0, "posterior_rho_init": -3.0}
    convert.dnn_to_bnn(net, {**options, "type": "Reparameterization", "moped_enable": False, "moped_delta": 0.5})
    net = net.to(device)
    return descending(net, lambda: loss(net(x), y) + convert.get_kl_loss(net) / len(x))


def contestants(size: Size, device: str) -> list[Contestant]:
    """Return the peers that run on torch, the baseline first."""

    def pyros(guide: Callable[[Any], Any], loss: Any) -> Callable[[], tuple[Advance, int]]:
        return lambda: stock_pyro(size, device, guide, loss)

    def low_rank(model: Any) -> Any:
        return AutoLowRankMultivariateNormal(model, rank=RANK)

    return [
        Contestant(BASELINE, lambda: plain(size, device), 0),
        Contestant("Pyro SVI, TraceMeanField_ELBO, our AutoDropout", pyros(dropout, TraceMeanField_ELBO()), 3),
        Contestant("Pyro SVI, Trace_ELBO, AutoNormal", pyros(AutoNormal, Trace_ELBO()), 3),
        Contestant("Pyro SVI, TraceMeanField_ELBO, AutoNormal", pyros(AutoNormal, TraceMeanField_ELBO()), 3),
        Contestant("Pyro SVI, Trace_ELBO, AutoLowRankMultivariateNormal rank 10", pyros(low_rank, Trace_ELBO()), 4),
        Contestant("TyXe, AutoNormal", lambda: tyxe(size, device), 3),
        Contestant("bayesian-torch, reparameterisation", lambda: bayesian_torch(size, device), 3),
    ]
