"""Models of Pyro's tutorials, each by stock SVI and by ours, with our guides where AutoNormal was.

``python -m tests.contracts.tutorials`` prints how far the answers are apart: means over seeds, in standard errors.
"""

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO, TraceEnum_ELBO
from pyro.infer.autoguide import AutoDiscreteParallel, AutoGuideList, AutoNormal, init_to_median
from pyro.nn import PyroModule, PyroSample
from torch import Tensor, nn

import pyro_dropout as pd
from pyro_dropout.engines import program as compiled

SEEDS, STEPS = range(20), 600
ALLOWED = 4.0  # standard errors


class BayesianRegression(PyroModule):
    def __init__(self) -> None:
        super().__init__()
        self.linear = PyroModule[nn.Linear](3, 1)
        self.linear.weight = PyroSample(dist.Normal(0.0, 1.0).expand([1, 3]).to_event(2))
        self.linear.bias = PyroSample(dist.Normal(0.0, 10.0).expand([1]).to_event(1))

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        sigma = pyro.sample("sigma", dist.Uniform(0.0, 10.0))
        mean = self.linear(x).squeeze(-1)
        with pyro.plate("data", x.shape[0]):
            pyro.sample("obs", dist.Normal(mean, sigma), obs=y)
        return mean


def pooled_rates(at_bats: Tensor, hits: Tensor) -> None:
    """Batting averages with a common Beta prior."""
    mean = pyro.sample("m", dist.Uniform(0.0, 1.0))
    spread = pyro.sample("kappa", dist.Gamma(30.0, 1.0))
    with pyro.plate("players", len(at_bats)):
        chance = pyro.sample("phi", dist.Beta(mean * spread, (1 - mean) * spread))
        pyro.sample("hits", dist.Binomial(at_bats, chance), obs=hits)


def pooled_log_odds(at_bats: Tensor, hits: Tensor) -> None:
    """Batting averages with a common Gaussian prior on their log-odds."""
    loc, scale = pyro.sample("loc", dist.Normal(-1.0, 1.0)), pyro.sample("scale", dist.HalfNormal(0.5))
    with pyro.plate("players", len(at_bats)):
        alpha = pyro.sample("alpha", dist.Normal(0.0, 1.0))
        pyro.sample("hits", dist.Binomial(at_bats, logits=loc + scale * alpha), obs=hits)


def eight_schools(sigma: Tensor, y: Tensor) -> None:
    mu, tau = pyro.sample("mu", dist.Normal(0.0, 5.0)), pyro.sample("tau", dist.LogNormal(1.0, 0.5))
    with pyro.plate("schools", len(y)):
        eta = pyro.sample("eta", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(mu + tau * eta, sigma), obs=y)


def subsampled_groups(y: Tensor) -> None:
    """Ten groups, five of which are seen at a time."""
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    with pyro.plate("groups", len(y), subsample_size=5) as index:
        theta = pyro.sample("theta", dist.Normal(mu, 1.0))
        pyro.sample("y", dist.Normal(theta, 0.5), obs=y[index])


def mixture(data: Tensor) -> None:
    weights = pyro.sample("weights", dist.Dirichlet(5.0 * torch.ones(2)))
    scale = pyro.sample("scale", dist.LogNormal(0.0, 0.5))
    locs = pyro.sample("locs", dist.Normal(torch.tensor([0.0, 10.0]), 3.0).to_event(1))
    with pyro.plate("data", len(data)):
        assignment = pyro.sample("assignment", dist.Categorical(weights))
        pyro.sample("obs", dist.Normal(locs[assignment], scale), obs=data)


def listed(make: Callable[[Any], Any], model: Any) -> Any:
    guide = AutoGuideList(model)
    guide.append(make(poutine.block(model, hide=["assignment"])))
    guide.append(AutoDiscreteParallel(poutine.block(model, expose=["assignment"])))
    return guide


@dataclass(frozen=True)
class Tutorial:
    model: Callable[[], Any]
    args: tuple[Any, ...]
    wrap: Callable[[Callable[[Any], Any], Any], Any] = lambda make, model: make(model)
    loss: Callable[[], Any] = lambda: Trace_ELBO()
    ours: Callable[[], Any] = lambda: None


def _data() -> dict[str, Tutorial]:
    maker = torch.Generator().manual_seed(0)
    x = torch.randn(40, 3, generator=maker)
    y = x @ torch.tensor([1.0, -2.0, 0.5]) + 1 + 0.5 * torch.randn(40, generator=maker)
    at_bats = torch.full((9,), 45.0)
    hits = torch.tensor([18.0, 17.0, 16.0, 15.0, 14.0, 12.0, 11.0, 10.0, 7.0])
    sigma = torch.tensor([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])
    effects = torch.tensor([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
    groups = torch.linspace(-1, 3, 10)
    clusters = torch.tensor([0.0, 1.0, 0.5, 10.0, 11.0, 12.0, 10.5])
    enum: Any = {"wrap": listed, "loss": lambda: TraceEnum_ELBO(max_plate_nesting=1)}
    return {
        "bayesian regression": Tutorial(BayesianRegression, (x, y)),
        "baseball": Tutorial(lambda: pooled_rates, (at_bats, hits)),
        "baseball by log-odds": Tutorial(lambda: pooled_log_odds, (at_bats, hits)),
        "eight schools": Tutorial(lambda: eight_schools, (sigma, effects)),
        "a subsampled plate": Tutorial(lambda: subsampled_groups, (groups,)),
        "an enumerated mixture": Tutorial(lambda: mixture, (clusters,), ours=enum["loss"], **enum),
    }


TUTORIALS = _data()
GUIDES = {"mean field": pd.AutoMeanField, "low rank": pd.AutoLowRank}
CASES = [(name, guide, ours) for name in TUTORIALS for guide in GUIDES for ours in (False, True)]


def answers(tutorial: Tutorial, make: Callable[[Any], Any], infer: Any, loss: Any, **options: Any) -> Tensor:
    """The means of all sites in unconstrained space, (seeds, numbers)."""
    found = []
    for seed in SEEDS:
        pyro.clear_param_store()
        pyro.set_rng_seed(seed)
        model = tutorial.model()
        guide = tutorial.wrap(make, model)
        svi = infer(model, guide, pyro.optim.ClippedAdam({"lr": 0.1, "lrd": 0.02 ** (1 / STEPS)}), loss, **options)
        tail = []
        for step in range(STEPS):
            svi.step(*tutorial.args)
            if step >= STEPS - 150 and step % 10 == 0:
                medians = (guide[0] if isinstance(guide, AutoGuideList) else guide).median(*tutorial.args)
                tail.append(torch.cat([medians[name].reshape(-1) for name in sorted(medians)]))
        found.append(torch.stack(tail).mean(0))
    return torch.stack(found)


@cache
def expected(name: str) -> Tensor:
    """AutoNormal's answers by stock SVI."""
    tutorial = TUTORIALS[name]
    return answers(tutorial, partial(AutoNormal, init_loc_fn=init_to_median), SVI, tutorial.loss())


def distance(name: str, guide: str, ours: bool) -> float:
    """How far a guide's answers lie from AutoNormal's: the largest difference of means, in standard errors."""
    tutorial = TUTORIALS[name]
    loss = tutorial.loss() if not ours else tutorial.ours()
    found, reference = answers(tutorial, GUIDES[guide], pd.SVI if ours else SVI, loss), expected(name)
    error = ((found.var(0) + reference.var(0)) / len(SEEDS)).sqrt()
    return float(((found.mean(0) - reference.mean(0)).abs() / error).max())


@contextmanager
def traced() -> Iterator[None]:
    """Run programs as they were traced: compiling each would cost more than its training."""
    made = compiled._compile
    compiled._compile = lambda graph, inputs: graph
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # on draws for each data point, and on losses that are not compiled
            yield
    finally:
        compiled._compile = made


def main() -> int:
    """Print the table; the exit status is 1 where a guide's answers differ."""
    print(
        f"| tutorial | guide | SVI | largest difference from AutoNormal, in standard errors over {len(SEEDS)} seeds |"
    )
    print("|---|---|---|---|")
    worst = 0.0
    with traced():
        for name, guide, ours in CASES:
            off = distance(name, guide, ours)
            worst = max(worst, off)
            print(f"| {name} | {guide} | {'pyro_dropout' if ours else 'Pyro'} | {off:.2f} |", flush=True)
    return 1 if worst > ALLOWED else 0


if __name__ == "__main__":
    sys.exit(main())
