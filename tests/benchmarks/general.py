"""Steps that no other benchmark names, beside one eager step in torch or, on a GPU, the same in JAX.

Configurations are drawn with a fixed seed from guides, depths, widths, activations, likelihoods, optimisers, schedules,
clipping, temperatures and batches. The baseline is an eager step of the same network: nn.Dropout before each layer, the
loss, backward and torch.optim.Adam; on a GPU it is the same step by hand in JAX, many in one ``lax.scan``. Both take
turns in one process, on one thread, and the best turn of each counts.
"""

import math
import os
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import pyro_dropout as pd
from pyro_dropout.generative.random_state import forked
from tests.benchmarks import jax_general
from tests.benchmarks.figures import Asked, Figure, benchmark

GUIDES: dict[str, Callable[[Any], Any]] = {
    "dropout": pd.AutoDropout,
    "mean field": pd.AutoMeanField,
    "concrete": pd.AutoConcreteDropout,
    "multiplicative": pd.AutoMultiplicative,
    "low rank": pd.AutoLowRank,
    "full rank": pd.AutoFullRank,
    "mixture": pd.AutoRowMixture,
}
ACTIVATIONS = (nn.ReLU, nn.Tanh, nn.GELU, nn.SiLU, nn.ELU, nn.LeakyReLU, nn.Softplus)
LIKELIHOODS: dict[str, tuple[Callable[[], Any], Callable[[], nn.Module], int]] = {
    "Gaussian": (lambda: pd.Gaussian(4.0), nn.MSELoss, 1),
    "learned noise": (lambda: pd.Gaussian(4.0, learn=True), nn.MSELoss, 1),
    "classes": (pd.Categorical, nn.CrossEntropyLoss, 5),
    "counts": (pd.Poisson, nn.PoissonNLLLoss, 1),
    "yes or no": (pd.Bernoulli, nn.BCEWithLogitsLoss, 1),
}
POINTS, INPUTS = 256, 13
FULL_RANK_WIDTH = 20  # a covariance of all weights of a layer: with more units its matrix is what takes the time


@dataclass(frozen=True)
class Setting:
    """One configuration."""

    guide: str = "dropout"
    layers: int = 1
    width: int = 50
    activation: type[nn.Module] = nn.ReLU
    likelihood: str = "Gaussian"
    optim: str = "adam"
    schedule: bool = False
    clip: bool = False
    temperature: float | str | None = None
    batch: int = 128

    def __str__(self) -> str:
        sizes = "-".join(map(str, [INPUTS, *[self.width] * self.layers, LIKELIHOODS[self.likelihood][2]]))
        more = [self.optim, *["schedule"] * self.schedule, *["clipping"] * self.clip]
        more += [] if self.temperature is None else [f"temperature {self.temperature}"]
        return f"{self.guide} {sizes} {self.activation.__name__}, {self.likelihood}, {', '.join(more)}, {self.batch}"

    def network(self, *, dropout: bool) -> nn.Sequential:
        """Return the network; with ``nn.Dropout`` before each layer, for the baseline."""
        outputs, made, size = LIKELIHOODS[self.likelihood][2], [], INPUTS
        for _ in range(self.layers):
            made += [*[nn.Dropout(0.1)] * dropout, nn.Linear(size, self.width), self.activation()]
            size = self.width
        return nn.Sequential(*made, *[nn.Dropout(0.1)] * dropout, nn.Linear(size, outputs))

    def data(self) -> tuple[Tensor, Tensor]:
        """Return made data."""
        with forked():
            torch.manual_seed(0)
            x = torch.randn(POINTS, INPUTS)
        kind = self.likelihood
        if kind == "classes":
            return x, (x[:, 0] * 2).round().long().clamp(-2, 2) + 2
        y = x[:, :1].sin()
        return x, (3 * y.abs()).round() if kind == "counts" else (y > 0).float() if kind == "yes or no" else y


def drawn(count: int, seed: int, guides: Sequence[str] = tuple(GUIDES)) -> list[Setting]:
    """Return different settings."""
    dice, found = random.Random(seed), list[Setting]()
    while len(found) < count:
        guide = dice.choice(list(guides))
        one = Setting(
            guide,
            dice.choice([1, 1, 2, 3]),
            FULL_RANK_WIDTH if guide == "full rank" else dice.choice([20, 50, 100]),
            dice.choice(ACTIVATIONS),
            dice.choice(list(LIKELIHOODS)),
            dice.choice(["adam", "adam", "adamw", "sgd"]),
            dice.random() < 0.5,
            dice.random() < 0.5,
            dice.choice([None, None, 0.5, "auto"]),
            dice.choice([32, 128, POINTS]),
        )
        found += [] if one in found else [one]
    return found


def one_by_one() -> list[Setting]:
    """Return 13-50-1 with dropout, and every setting that differs from it in one thing."""
    guides = [Setting(guide, width=FULL_RANK_WIDTH if guide == "full rank" else 50) for guide in GUIDES]
    others = [Setting(activation=each) for each in ACTIVATIONS[1:]]
    others += [Setting(likelihood=each) for each in LIKELIHOODS if each != "Gaussian"]
    others += [Setting(optim="adamw"), Setting(optim="sgd"), Setting(schedule=True), Setting(clip=True)]
    return [*guides, *others, Setting(temperature=0.5), Setting(batch=POINTS)]


def ours(setting: Setting, steps: int, device: str = "cpu") -> tuple[float, pd.training.History]:
    """Return the seconds of one step of ``fit``."""
    torch.manual_seed(0)
    x, y = setting.data()
    model = pd.BayesianNet(setting.network(dropout=False), likelihood=LIKELIHOODS[setting.likelihood][0]())
    x, y, model = x.to(device), y.to(device), model.to(device)
    how: dict[str, Any] = {"clip_norm": 1.0} if setting.clip else {}
    how |= {"schedule": lambda t: 0.5 ** (t / 1000)} if setting.schedule else {}
    how |= {"lr": 1e-6} if setting.optim == "sgd" else {}
    how |= {} if setting.temperature is None else {"loss": pd.ELBO(temperature=setting.temperature)}
    size = None if setting.batch == POINTS else setting.batch
    guide = GUIDES[setting.guide](model).to(device)
    history = pd.fit(
        model, guide, x, y, steps=steps, batch_size=size, optim=setting.optim, compile=True, progress=False, **how
    )
    return history.seconds / history.steps, history


def eager(setting: Setting, steps: int) -> float:
    """Return the seconds of one eager step of the same network in torch."""
    x, y = setting.data()
    net, loss = setting.network(dropout=True), LIKELIHOODS[setting.likelihood][1]()
    optim = torch.optim.Adam(net.parameters())
    x, y = x[: setting.batch], y[: setting.batch]
    start = time.perf_counter()
    for _ in range(steps):
        optim.zero_grad()
        loss(net(x), y).backward()
        optim.step()
    return (time.perf_counter() - start) / steps


def beside(settings: Sequence[Setting], asked: Asked) -> Iterator[Figure]:
    """Yield what each setting takes beside an eager step or, on a GPU, beside the same by hand in JAX."""
    on_gpu, ratios = asked.device == "cuda", []
    steps = asked.pick(4000 if on_gpu else 400, 4)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    for setting in settings:
        best, base, engine, why = math.inf, math.inf, "", ""
        for _ in range(asked.rounds):
            theirs = jax_general.seconds(setting, "cuda", 1) if on_gpu else eager(setting, steps)
            mine, history = ours(setting, steps, asked.device)
            best, base, engine, why = min(best, mine), min(base, theirs), history.engine, history.why
        ratios.append(best / base)
        name = "JAX" if on_gpu else "torch"
        yield Figure(f"{setting}, {engine}{why and f' ({why})'}, {1e6 * best:.1f} µs, over {name}", best / base)
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    yield Figure("on average (geometric)", mean, most=0.65 if on_gpu else None)
    yield Figure("largest", max(ratios), most=1.0 if on_gpu else None)


@benchmark("general", "cuda")
def general(asked: Asked) -> Iterator[Figure]:
    """Settings that are drawn at random."""
    guides = jax_general.GUIDES if asked.device == "cuda" else tuple(GUIDES)
    return beside(drawn(asked.pick(24, 2), 2026, guides), asked)


@benchmark("one-by-one", "cpu")
def one_at_a_time(asked: Asked) -> Iterator[Figure]:
    """13-50-1 with dropout, and what differs from it in one thing."""
    return beside([each for each in one_by_one() if re.search(asked.who, str(each))][: asked.pick(None, 2)], asked)
