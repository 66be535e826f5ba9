"""Who takes the steps: this library, plain PyTorch, which is the baseline, and stock Pyro."""

import itertools
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO
from pyro.infer.autoguide import AutoLowRankMultivariateNormal, AutoNormal
from torch import Tensor

import pyro_dropout as pd
from pyro_dropout.engines.engine import CHAIN
from tests.benchmarks.settings import GUIDES, LEARNING_RATE, LIKELIHOODS, RANK, TAU, Setting
from tests.benchmarks.timing import Advance, Contestant

BASELINE = "PyTorch nn.Dropout, eager"


def ours(name: str, setting: Setting, device: str, *, compile: bool = True, **how: Any) -> Contestant:
    """Return the steps of ``fit``; the note says what took them."""

    def build() -> tuple[Advance, int]:
        model = setting.model(device)
        guide, data = GUIDES[setting.guide](model).to(device), setting.data(device)

        def advance(steps: int) -> float:
            asked = setting.how() | how
            history = pd.fit(model, guide, *data, steps=steps, compile=compile, progress=False, **asked)
            made.note = f"{history.engine}{history.why and f' ({history.why})'}"
            return history.seconds

        return advance, CHAIN

    made = Contestant(name, build)
    return made


def plain(setting: Setting, device: str) -> Contestant:
    """Return the baseline: dropout, a loss and Adam, without even a weight decay."""

    def build() -> tuple[Advance, int]:
        (x, y), net = setting.data(device, setting.batch), setting.network(dropout=True).to(device)
        loss = LIKELIHOODS[setting.likelihood][1]()
        optimiser = torch.optim.Adam(net.parameters(), LEARNING_RATE)

        def advance(steps: int) -> None:
            for _ in range(steps):
                optimiser.zero_grad()
                loss(net(x), y).backward()
                optimiser.step()

        return advance, 1

    return Contestant(BASELINE, build)


def plain_bnn(setting: Setting, device: str) -> Callable[..., Any]:
    """Return a Bayesian network written out by hand in plain Pyro."""
    zero, one = torch.zeros((), device=device), torch.ones((), device=device)
    shapes = list(itertools.pairwise(setting.layers))

    def model(x: Tensor, y: Tensor | None = None) -> None:
        for k, (a, b) in enumerate(shapes):
            weight = pyro.sample(f"w{k}", dist.Normal(zero, one / a**0.5).expand([b, a]).to_event(2))
            bias = pyro.sample(f"b{k}", dist.Normal(zero, one).expand([b]).to_event(1))
            x = x @ weight.mT + bias
            x = x if k == len(shapes) - 1 else x.relu()
        with pyro.plate("data", len(x)):
            normal = setting.likelihood == "Gaussian"
            likelihood = dist.Normal(x, TAU**-0.5).to_event(1) if normal else dist.Categorical(logits=x)
            pyro.sample("y", likelihood, obs=y)

    return model


def by_svi(name: str, setting: Setting, device: str, make: Callable[[Any], Any]) -> Contestant:
    """Return the steps of an SVI, called one by one from Python; ``make`` is given an optimiser."""

    def build() -> tuple[Advance, int]:
        (x, y), svi = setting.data(device), make(pyro.optim.Adam({"lr": LEARNING_RATE}))

        def advance(steps: int) -> None:
            for _ in range(steps):
                svi.step(x, y)

        return advance, 1

    return Contestant(name, build)


def of_svi(setting: Setting, device: str, *, compile: bool) -> list[Contestant]:
    """Return this library's ``SVI`` with dropout, and Pyro's with guides of both."""

    def own(compile: bool) -> Callable[[Any], Any]:
        def make(optim: Any) -> Any:
            model = setting.model(device)
            return pd.SVI(model, GUIDES["dropout"](model).to(device), optim, compile=compile)

        return make

    def stock(guide: Callable[[Any], Any], loss: Any) -> Callable[[Any], Any]:
        def make(optim: Any) -> Any:
            model = plain_bnn(setting, device)
            return SVI(model, guide(model), optim, loss)

        return make

    low_rank = AutoLowRankMultivariateNormal
    makers = {
        **({"SVI, AutoDropout": own(True)} if compile else {}),
        "SVI(compile=False), AutoDropout": own(False),
        "Pyro SVI, TraceMeanField_ELBO, our AutoDropout": stock(GUIDES["dropout"], TraceMeanField_ELBO()),
        "Pyro SVI, Trace_ELBO, AutoNormal": stock(AutoNormal, Trace_ELBO()),
        "Pyro SVI, TraceMeanField_ELBO, AutoNormal": stock(AutoNormal, TraceMeanField_ELBO()),
        f"Pyro SVI, Trace_ELBO, {low_rank.__name__} rank {RANK}": stock(lambda m: low_rank(m, rank=RANK), Trace_ELBO()),
    }
    return [by_svi(name, setting, device, make) for name, make in makers.items()]
