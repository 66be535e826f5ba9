"""Twenty small Pyro models that know nothing of this package: every shape that a model's data, sites and plates have.

Each comes with the arguments under which its data are observed, and those under which they are to be predicted.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.nn import PyroModule, PyroSample
from torch import Tensor

F64 = torch.float64
X = torch.linspace(-1, 1, 12, dtype=F64)
NOISE = torch.sin(torch.arange(12, dtype=F64) * 2.3)  # of no generator, so that the data are the same everywhere
Y = 1.5 * X - 0.5 + 0.3 * NOISE
GROUPS = torch.arange(12) % 3


@dataclass(frozen=True)
class Case:
    """A model, what it is called with, and what it observes."""

    make: Callable[[], Any]  # returns the model
    args: tuple[Any, ...] = (X, Y)  # data included
    kwargs: dict[str, Any] = field(default_factory=dict)
    observed: tuple[str, ...] = ("obs",)
    blind: tuple[Any, ...] | None = None  # the arguments without data; by default all but the last
    blind_kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def question(self) -> tuple[Any, ...]:
        return self.args[:-1] if self.blind is None else self.blind


def normal(loc: Any = 0.0, scale: Any = 1.0) -> Any:
    return dist.Normal(torch.as_tensor(loc, dtype=F64), torch.as_tensor(scale, dtype=F64))


def half(scale: float = 1.0) -> Any:
    return dist.HalfNormal(torch.tensor(scale, dtype=F64))


# --- numbers ----------------------------------------------------------------------------------------------------------


def line(x: Tensor, y: Tensor | None = None) -> None:
    slope, shift = pyro.sample("slope", normal()), pyro.sample("shift", normal())
    sigma = pyro.sample("sigma", half())
    with pyro.plate("data", len(x)):
        pyro.sample("obs", dist.Normal(slope * x + shift, sigma), obs=y)


def schools(errors: Tensor, effects: Tensor | None = None) -> None:
    mu, tau = pyro.sample("mu", normal(0.0, 5.0)), pyro.sample("tau", half(5.0))
    with pyro.plate("school", len(errors)):
        theta = pyro.sample("theta", dist.Normal(mu, tau))
        pyro.sample("effect", dist.Normal(theta, errors), obs=effects)


def two_sites(x: Tensor, first: Tensor | None = None, second: Tensor | None = None) -> Tensor:
    slope = pyro.sample("slope", normal())
    with pyro.plate("data", len(x)):
        pyro.sample("first", dist.Normal(slope * x, 0.5), obs=first)
        pyro.sample("second", dist.Laplace(slope.square() * x, 0.4), obs=second)
    return slope * x


def nested(y: Tensor | None = None) -> None:
    mu = pyro.sample("mu", normal())
    sigma = pyro.sample("sigma", dist.LogNormal(torch.tensor(0.0, dtype=F64), 0.5))
    with pyro.plate("rows", 4, dim=-2):
        row = pyro.sample("row", normal(0.0, 0.5))
        with pyro.plate("columns", 3, dim=-1):
            pyro.sample("obs", dist.Normal(mu + row, sigma), obs=y)


def grouped(x: Tensor, group: Tensor, y: Tensor | None = None) -> Tensor:
    spread = pyro.sample("spread", half())
    with pyro.plate("groups", 3):
        shift = pyro.sample("shift", dist.Normal(torch.zeros((), dtype=F64), spread))
    with pyro.plate("data", len(x)):
        return pyro.sample("obs", dist.Normal(x + shift[group], 0.5), obs=y)


def masked(x: Tensor, seen: Tensor, y: Tensor | None = None) -> None:
    slope, sigma = pyro.sample("slope", normal()), pyro.sample("sigma", half())
    with pyro.plate("data", len(x)), poutine.mask(mask=seen):
        pyro.sample("obs", dist.Normal(slope * x, sigma), obs=y)


def scaled(x: Tensor, y: Tensor | None = None) -> Tensor:
    slope = pyro.sample("slope", normal())
    with poutine.scale(scale=2.5), pyro.plate("data", len(x)):
        pyro.sample("obs", dist.Normal(slope * x, 0.5), obs=y)
    return slope * x


def unplated(y: Tensor | None = None) -> None:
    mu = pyro.sample("mu", normal())
    pyro.sample("obs", normal(mu.expand(12), 0.7), obs=y)


def walk(steps: Tensor | None = None) -> None:
    drift = pyro.sample("drift", normal())
    at = torch.zeros((), dtype=F64)
    for t in range(3):
        at = pyro.sample(f"step_{t}", normal(at + drift, 0.5), obs=None if steps is None else steps[t])


def stretched(x: Tensor, y: Tensor | None = None) -> None:
    """Observations through a transform: a distribution without moments in closed form."""
    slope = pyro.sample("slope", normal(0.0, 0.5))
    with pyro.plate("data", len(x)):
        base = dist.Normal(slope * x, torch.tensor(0.4, dtype=F64))
        pyro.sample("obs", dist.TransformedDistribution(base, [dist.transforms.SoftplusTransform()]), obs=y)


# --- classes and counts -----------------------------------------------------------------------------------------------


def coins(x: Tensor, y: Tensor | None = None) -> Tensor:
    rate = pyro.sample("rate", dist.Beta(torch.tensor(2.0, dtype=F64), 2.0))
    slope = pyro.sample("slope", normal())
    logits = slope * x + torch.logit(rate)
    with pyro.plate("data", len(x)):
        pyro.sample("obs", dist.Bernoulli(logits=logits), obs=y)
    return logits


def classes(x: Tensor, y: Tensor | None = None) -> None:
    weight = pyro.sample("weight", normal().expand([3, 2]).to_event(2))
    inputs = torch.stack([x, torch.ones_like(x)], -1)
    with pyro.plate("data", len(x)):
        pyro.sample("obs", dist.Categorical(logits=inputs @ weight.mT), obs=y)


def counts(x: Tensor, *, exposure: Tensor, y: Tensor | None = None) -> None:
    slope = pyro.sample("slope", normal(0.0, 0.5))
    with pyro.plate("data", len(x)):
        pyro.sample("obs", dist.Poisson(exposure * torch.exp(slope * x)), obs=y)


# --- several numbers at a point ---------------------------------------------------------------------------------------


def pairs(x: Tensor, y: Tensor | None = None) -> None:
    slope = pyro.sample("slope", normal().expand([2]).to_event(1))
    scale = pyro.sample("scale", dist.LogNormal(torch.zeros(2, dtype=F64), 0.3).to_event(1))
    root = torch.diag_embed(scale) @ torch.tensor([[1.0, 0.0], [0.6, 0.8]], dtype=F64)
    with pyro.plate("data", len(x)):
        pyro.sample("obs", dist.MultivariateNormal(x.unsqueeze(-1) * slope, scale_tril=root), obs=y)


# --- other ways to write a model --------------------------------------------------------------------------------------


def table(batch: dict[str, Tensor]) -> None:
    slope = pyro.sample("slope", normal())
    with pyro.plate("data", len(batch["x"])):
        pyro.sample("obs", dist.Normal(slope * batch["x"], 0.5), obs=batch.get("y"))


class Line(PyroModule):  # type: ignore[misc]
    """A line as a module, with a learned precision that is no latent variable."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = PyroSample(normal())
        self.log_scale = torch.nn.Parameter(torch.tensor(-0.5, dtype=F64))

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        f: Tensor = self.slope * x
        with pyro.plate("data", len(x)):
            pyro.sample("obs", dist.Normal(f, self.log_scale.exp()), obs=y)
        return f


def penalised(x: Tensor, y: Tensor | None = None) -> None:
    slope = pyro.sample("slope", normal())
    pyro.factor("penalty", -3 * slope.square())
    pyro.deterministic("twice", 2 * slope)
    with pyro.plate("data", len(x)):
        pyro.sample("obs", dist.Normal(slope * x, 0.5), obs=y)


def batched(x: Tensor, y: Tensor | None = None, num_data: int | None = None) -> Tensor:
    weight = pyro.sample("weight", normal().expand([1, 2]).to_event(2))
    f = torch.stack([x, torch.ones_like(x)], -1) @ weight.mT
    scale = 1.0 if num_data is None else num_data / len(x)
    with pyro.plate("data", len(x)), poutine.scale(scale=scale):
        pyro.sample("obs", dist.Normal(f, 0.5).to_event(1), obs=y)
    return f


CASES: dict[str, Case] = {
    "line": Case(lambda: line),
    "schools": Case(lambda: schools, (1 + X.square(), 3 * Y), observed=("effect",)),
    "two_sites": Case(lambda: two_sites, (X, Y, Y.flip(0)), observed=("first", "second"), blind=(X,)),
    "nested": Case(lambda: nested, (Y.reshape(4, 3),)),
    "grouped": Case(lambda: grouped, (X, GROUPS, Y)),
    "masked": Case(lambda: masked, (X, NOISE > -0.7, Y)),
    "scaled": Case(lambda: scaled),
    "unplated": Case(lambda: unplated, (Y,)),
    "walk": Case(lambda: walk, (Y[:3],), observed=("step_0", "step_1", "step_2")),
    "stretched": Case(lambda: stretched, (X, Y.exp())),
    "coins": Case(lambda: coins, (X, (NOISE > 0).to(F64))),
    "classes": Case(lambda: classes, (X, GROUPS)),
    "counts": Case(
        lambda: counts,
        (X,),
        {"exposure": 2 + X.square(), "y": (3 + 2 * NOISE).round()},
        blind=(X,),
        blind_kwargs={"exposure": 2 + X.square()},
    ),
    "pairs": Case(lambda: pairs, (X, torch.stack([Y, -Y], -1))),
    "table": Case(lambda: table, ({"x": X, "y": Y},), blind=({"x": X},)),
    "module": Case(Line),
    "penalised": Case(lambda: penalised),
    "batched": Case(lambda: batched, (X, Y.unsqueeze(-1))),
}
