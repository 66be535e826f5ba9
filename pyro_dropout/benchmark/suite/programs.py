"""Programs of Pyro with a few parameters, each in the space in which it is written: regressions and hierarchies."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_dropout.benchmark.problems import problem
from pyro_dropout.benchmark.suite.networks import noise
from pyro_dropout.protocols import Record, Weights

_MESQUITE = Path(__file__).parents[1] / "data" / "mesquite.csv"


def program(model: Callable[..., Any], arguments: tuple[Tensor, ...], asked: dict[str, Any]) -> Record:
    """Return a problem of parameters, each given by its name and a function of the draws, (S,)."""

    def quantities(model: Any, weights: Weights) -> Tensor:
        del model  # a program has no parameters of its own
        return torch.stack([of(weights) for of in asked.values()], -1)

    return {"make": lambda seed: model, "arguments": arguments, "quantities": quantities, "labels": tuple(asked)}


def each(name: str, count: int, of: Callable[[Weights], Tensor]) -> dict[str, Any]:
    """Return the quantities of a vector of parameters, (S, count), by name."""
    return {f"{name} {k + 1}": lambda weights, k=k: of(weights)[:, k] for k in range(count)}


@problem(
    "eight-schools",
    title="Eight schools, non-centred",
    about="How far the schools differ is barely known, and the effects depend on it: a funnel. Means and widths of a"
    " long run are published in posteriordb.",
    kind="parameters",
    nuts={"target_accept": 0.95},
)
def eight_schools() -> Record:
    def model(y: Tensor, sigma: Tensor) -> None:
        mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
        tau = pyro.sample("tau", dist.HalfCauchy(5.0))
        with pyro.plate("schools", len(y)):
            eta = pyro.sample("eta", dist.Normal(0.0, 1.0))
            pyro.sample("y", dist.Normal(mu + tau * eta, sigma), obs=y)

    y = torch.tensor([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
    sigma = torch.tensor([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])
    effects = each("theta", 8, lambda weights: weights["mu"][:, None] + weights["tau"][:, None] * weights["eta"])
    shared = {name: lambda weights, name=name: weights[name] for name in ("mu", "tau")}
    return program(model, (y, sigma), effects | shared)


@problem(
    "mesquite",
    title="A regression of posteriordb: the weight of 46 bushes",
    about="Seven coefficients of nearly collinear inputs, and the noise: a factorised posterior is far too narrow."
    " Means and widths are published in posteriordb (mesquite-logmesquite_logvas).",
    kind="parameters",
)
def mesquite() -> Record:
    def model(x: Tensor, y: Tensor) -> None:
        # The published prior is flat; this one is so wide that it changes no mean by a thousandth of its width.
        beta = pyro.sample("beta", dist.Normal(x.new_zeros(7), 30.0).to_event(1))
        sigma = pyro.sample("sigma", dist.HalfNormal(30.0))
        with pyro.plate("bushes", len(y)):
            pyro.sample("y", dist.Normal((x * beta).sum(-1), sigma), obs=y)

    rows = [line.split(",") for line in _MESQUITE.read_text("utf-8").splitlines() if line[:1].isdigit()]
    table = torch.tensor([[float(value) for value in row] for row in rows], dtype=torch.float64)
    weight, diam1, diam2, canopy, total, density, group = table.unbind(-1)
    logs = [(diam1 * diam2 * canopy).log(), (diam1 * diam2).log(), (diam1 / diam2).log(), total.log(), density.log()]
    x = torch.stack([torch.ones_like(weight), *logs, group], -1).float()
    asked = each("beta", 7, lambda weights: weights["beta"]) | {"sigma": lambda weights: weights["sigma"]}
    return program(model, (x, weight.log().float()), asked)


@problem(
    "pooling",
    title="Eight groups with intercepts and slopes of their own",
    about="Some groups have three points, and lean on the others. The two widths between groups are uncertain, and"
    " everything else depends on them.",
    kind="parameters",
    nuts={"target_accept": 0.95},
)
def pooling() -> Record:
    def model(group: Tensor, x: Tensor, y: Tensor) -> None:
        mu = pyro.sample("mu", dist.Normal(x.new_zeros(2), 2.0).to_event(1))
        spread = pyro.sample("spread", dist.HalfNormal(x.new_ones(2)).to_event(1))
        sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
        z = pyro.sample("z", dist.Normal(x.new_zeros(8, 2), 1.0).to_event(2))
        line = (mu + spread * z)[group]
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(line[:, 0] + line[:, 1] * x, sigma), obs=y)

    group = torch.repeat_interleave(torch.arange(8), torch.tensor([3, 3, 3, 4, 5, 6, 8, 12]))
    x = noise(44, seed=40)
    lines = torch.tensor([1.0, -0.5]) + torch.tensor([0.8, 0.3]) * noise(8, 2, seed=41)
    y = lines[group, 0] + lines[group, 1] * x + 0.5 * noise(44, seed=42)

    def line(k: int) -> Callable[[Weights], Tensor]:
        return lambda weights: weights["mu"][:, [k]] + weights["spread"][:, [k]] * weights["z"][..., k]

    asked = each("intercept", 8, line(0)) | each("slope", 8, line(1))
    asked |= each("mu", 2, lambda weights: weights["mu"]) | each("spread", 2, lambda weights: weights["spread"])
    return program(model, (group, x, y), asked | {"sigma": lambda weights: weights["sigma"]})


@problem(
    "counts",
    title="Counts of ten groups with rates of their own",
    about="Small counts say little about each rate, and the width between groups decides how far they are pulled"
    " together. The likelihood is Poisson, so that nothing is Gaussian.",
    kind="parameters",
    held_out=True,
    nuts={"target_accept": 0.95},
)
def counts() -> Record:
    def model(exposure: Tensor, y: Tensor) -> None:
        mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
        spread = pyro.sample("spread", dist.HalfNormal(1.0))
        with pyro.plate("groups", len(y)):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("y", dist.Poisson(exposure * (mu + spread * z).exp()), obs=y)

    exposure = torch.tensor([1.0, 1.0, 2.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0])
    y = torch.tensor([0.0, 3.0, 1.0, 4.0, 2.0, 9.0, 4.0, 3.0, 15.0, 6.0])
    rates = each("log rate", 10, lambda weights: weights["mu"][:, None] + weights["spread"][:, None] * weights["z"])
    shared = {name: lambda weights, name=name: weights[name] for name in ("mu", "spread")}
    return program(model, (exposure, y), rates | shared)
