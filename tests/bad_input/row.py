"""One bad call, and the small models that bad calls are made to."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import torch
from torch import nn

import pyro_dropout as pd

RANGE, SHAPE, OTHER = pd.errors.RangeError, pd.errors.ShapeError, pd.errors.PyroDropoutError
NAN, INF = float("nan"), float("inf")
X = torch.linspace(-1, 1, 12).unsqueeze(-1)
Y = X**2
LABELS = torch.arange(12) % 3
QUIET: Any = {"steps": 1, "compile": False, "progress": False}


class Row(NamedTuple):
    """A bad call.

    Attributes:
        error: the class of the error, to the letter.
        argument: the word for what is wrong, as the message has it.
        given: what was given, in its words.
        call: the call; of a file, a function of the folder to put it in.
    """

    error: type[Exception]
    argument: str
    given: str
    call: Callable[..., object]


def out_of_range(call: Callable[..., object], **wrong: Any) -> list[Row]:
    """The same call with one wrong argument at a time."""

    def row(name: str, value: Any) -> Row:
        return Row(RANGE, name, f"got {value!r}", lambda: call(**{name: value}))

    return [row(*each) for each in wrong.items()]


@contextmanager
def nothing_lost(*parts: nn.Module) -> Iterator[None]:
    """Check that a call leaves every parameter and buffer as it was, however it ends."""
    before = [{name: value.clone() for name, value in part.state_dict().items()} for part in parts]
    try:
        yield
    finally:
        for part, values in zip(parts, before, strict=True):
            after = part.state_dict()
            assert after.keys() == values.keys()
            assert all(torch.equal(after[name], value) for name, value in values.items())


# --- what is called ---------------------------------------------------------------------------------------------------


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 4), nn.ReLU(), nn.Linear(4, 1))


def model(likelihood: pd.generative.Likelihood | None = None) -> pd.BayesianNet:
    return pd.BayesianNet(net(), likelihood=likelihood or pd.Gaussian(tau=4.0))


def pair(keep: float = 0.9) -> tuple[Any, Any]:
    """A regression with dropout."""
    made = model()
    return made, pd.AutoDropout(made, keep=keep)


def dense() -> tuple[Any, Any]:
    """A regression with a guide that has a density."""
    made = model()
    return made, pd.AutoMeanField(made)


def classes() -> tuple[Any, Any]:
    """Three classes."""
    made = pd.BayesianNet(nn.Linear(1, 3), likelihood=pd.Categorical())
    return made, pd.AutoDropout(made)


def line(x: Any, y: Any = None) -> None:
    """A Pyro model that is not a network."""
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(slope * x, 1.0).to_event(1), obs=y)


def build(seed: int = 0, keep: float = 0.9) -> tuple[Any, Any]:
    """One replica of a fleet."""
    return pair(keep)


def fleet() -> pd.Fleet:
    return pd.Fleet(build, {"seed": [0, 1]})


def fit(x: Any = X, y: Any = Y, **options: Any) -> None:
    own = pair()
    with nothing_lost(*own):
        pd.fit(*own, x, y, **{**QUIET, **options})


def class_fit(x: Any, y: Any) -> None:
    own = classes()
    with nothing_lost(*own):
        pd.fit(*own, x, y, **QUIET)


def kind_fit(likelihood: pd.generative.Likelihood, y: Any, **options: Any) -> None:
    own = model(likelihood)
    guide = pd.AutoDropout(own)
    with nothing_lost(own, guide):
        pd.fit(own, guide, X, y, **{**QUIET, **options})


def kind_fleet_fit(likelihood: pd.generative.Likelihood, y: Any) -> None:
    def replica(seed: int) -> tuple[Any, Any]:
        made = model(likelihood)
        return made, pd.AutoDropout(made)

    own = pd.Fleet(replica, {"seed": [0, 1]})
    with nothing_lost(*(part for each in own for part in each)):
        own.fit(X, y, **QUIET)


def fleet_fit(x: Any = X, y: Any = Y, **options: Any) -> None:
    own = fleet()
    with nothing_lost(*(part for replica in own for part in replica)):
        own.fit(x, y, **{**QUIET, **options})


def predict(*x: Any, **options: Any) -> Any:
    own = pair()
    with nothing_lost(*own):
        return pd.predict(*own, *(x or (X,)), **{"samples": 3, **options})


@cache
def answer() -> Any:
    return pd.predict(*pair(), X, samples=4, seed=0)


def site_answer(**options: Any) -> Any:
    """What a Pyro model that is not a network says of its site."""
    draws = pd.prediction.SampledPosterior({"slope": torch.linspace(-1, 1, 4).unsqueeze(0)})
    return pd.predict(line, draws, X, samples=4, seed=0, **options)


@cache
def class_answer() -> Any:
    return pd.predict(*classes(), X, samples=4, seed=0)


@cache
def count_answer() -> Any:
    counted = model(pd.Poisson())
    return pd.predict(counted, pd.AutoDropout(counted), X, samples=4, seed=0)
