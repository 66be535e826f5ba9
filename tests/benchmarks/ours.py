"""This library's steps, as ``fit`` and ``SVI`` take them."""

from collections.abc import Callable
from typing import Any

import pyro

import pyro_dropout as pd
from pyro_dropout.engines.engine import CHAIN
from pyro_dropout.generative.model_call import ModelCall
from pyro_dropout.generative.precision import Precision, products_in
from pyro_dropout.training.fit import TrainingTask
from pyro_dropout.training.optimisers import named
from tests.benchmarks.sizes import DROP, Size
from tests.benchmarks.timing import Advance, Contestant

Guide = Callable[[Any], Any]
RANK = 10
LEARNING_RATE = 1e-3
EPOCH = 8  # batches in the data of the contestant who shuffles


def dropout(model: Any) -> Any:
    """Return the guide that most rows are about."""
    return pd.AutoDropout(model, keep=1 - DROP)


# name, guide, whether every data point has a draw of its own
GUIDES: list[tuple[str, Guide, bool]] = [
    ("AutoDropout", dropout, True),
    ("AutoMeanField, one draw a step", pd.AutoMeanField, False),
    ("AutoMeanField, a draw for each point", pd.AutoMeanField, True),
    ("AutoLowRank rank 10, one draw a step", lambda model: pd.AutoLowRank(model, rank=RANK), False),
    ("AutoConcreteDropout", lambda model: pd.AutoConcreteDropout(model, keep=1 - DROP), True),
    ("AutoMultiplicative", lambda model: pd.AutoMultiplicative(model, alpha=DROP / (1 - DROP)), True),
    ("AutoRowMixture, 2 components", pd.AutoRowMixture, True),
]


def fitting(
    size: Size,
    device: str,
    guide: Guide,
    *,
    per_example: bool,
    compile: bool,
    batches: int = 1,
    products: Precision = "float32",
) -> tuple[Advance, int]:
    """Return the steps of a training that was set up as ``fit`` sets it up, with Adam."""
    x, y = size.data(device, batches * size.batch)
    model = size.model(device)
    posterior = guide(model).to(device)
    task = TrainingTask(posterior, pd.ELBO(per_example=per_example), ModelCall(model, (x, y, len(x))))
    with products_in(products):
        run = task.start(named("adam", LEARNING_RATE), size.batch, compile)

    def advance(steps: int) -> None:
        done = 0
        while done < steps:
            done += len(run.advance(steps - done))

    return advance, CHAIN if compile and device == "cuda" else 1


def stepping(size: Size, device: str, *, compile: bool) -> tuple[Advance, int]:
    """Return the steps of ``SVI``, called one by one from Python."""
    x, y = size.data(device)
    model = size.model(device)
    svi = pd.SVI(model, dropout(model).to(device), pyro.optim.Adam({"lr": LEARNING_RATE}), compile=compile)

    def advance(steps: int) -> None:
        for _ in range(steps):
            svi.step(x, y)

    return advance, 1


def contestants(size: Size, device: str, *, compile: bool = True) -> list[Contestant]:
    """Return every guide under ``fit``, then dropout in mini-batches and under ``SVI``."""

    def fit(guide: Guide, per_example: bool, batches: int = 1) -> Callable[[], tuple[Advance, int]]:
        return lambda: fitting(size, device, guide, per_example=per_example, compile=compile, batches=batches)

    return [
        *(Contestant(f"fit, {name}", fit(guide, own)) for name, guide, own in GUIDES),
        Contestant("fit, AutoDropout, shuffled mini-batches", fit(dropout, True, EPOCH)),
        *([Contestant("SVI, AutoDropout", lambda: stepping(size, device, compile=True))] if compile else []),
        Contestant("SVI(compile=False), AutoDropout", lambda: stepping(size, device, compile=False)),
    ]
