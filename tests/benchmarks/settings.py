"""What is measured: networks with their data, guides and ways to train; those that have a name, and some at random."""

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import pyro_dropout as pd
from pyro_dropout.generative.process_state import forked

DROP, TAU, RANK, LEARNING_RATE = 0.1, 10.0, 10, 1e-3
GUIDES: dict[str, Callable[[Any], Any]] = {
    "dropout": lambda model: pd.AutoDropout(model, keep=1 - DROP),
    "mean field": pd.AutoMeanField,
    "concrete": lambda model: pd.AutoConcreteDropout(model, keep=1 - DROP),
    "multiplicative": lambda model: pd.AutoMultiplicative(model, alpha=DROP),
    "low rank": lambda model: pd.AutoLowRank(model, rank=RANK),
    "full rank": pd.AutoFullRank,
    "mixture": pd.AutoRowMixture,
}
ACTIVATIONS = (nn.ReLU, nn.Tanh, nn.GELU, nn.SiLU, nn.ELU, nn.LeakyReLU, nn.Softplus)
LIKELIHOODS: dict[str, tuple[Callable[[], Any], Callable[[], nn.Module], int]] = {  # with torch's loss, and outputs
    "Gaussian": (lambda: pd.Gaussian(TAU), nn.MSELoss, 1),
    "learned noise": (lambda: pd.Gaussian(TAU, learn=True), nn.MSELoss, 1),
    "classes": (pd.Categorical, nn.CrossEntropyLoss, 5),
    "counts": (pd.Poisson, nn.PoissonNLLLoss, 1),
    "yes or no": (pd.Bernoulli, nn.BCEWithLogitsLoss, 1),
}
FULL_RANK_WIDTH = 20  # a covariance of all weights of a layer: with more units its matrix is what takes the time
POINTS, INPUTS = 256, 13  # of a setting drawn at random


@dataclass(frozen=True)
class Setting:
    """One configuration.

    Attributes:
        layers: units in each layer, inputs and outputs included.
        points: how many there are in the data; ``batch`` of them in a step.
        one_draw: whether all points of a step share their weights.
    """

    guide: str = "dropout"
    layers: tuple[int, ...] = (INPUTS, 50, 1)
    activation: type[nn.Module] = nn.ReLU
    likelihood: str = "Gaussian"
    optim: str = "adam"
    schedule: bool = False
    clip: bool = False
    temperature: float | str | None = None
    batch: int = 128
    points: int = 128
    one_draw: bool = False

    @property
    def name(self) -> str:
        """The network's name in tables."""
        groups = [(width, len(list(same))) for width, same in itertools.groupby(self.layers)]
        return "-".join(f"{width}x{count}" if count > 1 else str(width) for width, count in groups)

    def __str__(self) -> str:
        more = [self.optim, *["schedule"] * self.schedule, *["clipping"] * self.clip]
        more += [] if self.temperature is None else [f"temperature {self.temperature}"]
        return (
            f"{self.guide} {self.name} {self.activation.__name__}, {self.likelihood}, {', '.join(more)}, {self.batch}"
        )

    def network(self, *, dropout: bool) -> nn.Sequential:
        """Return the network; with ``nn.Dropout`` before each layer, for the baseline."""
        made: list[nn.Module] = []
        for a, b in itertools.pairwise(self.layers):
            made += [*[nn.Dropout(DROP)] * dropout, nn.Linear(a, b), self.activation()]
        return nn.Sequential(*made[:-1])

    def model(self, device: str) -> pd.BayesianNet:
        """Return the network as this library's Pyro model."""
        likelihood = LIKELIHOODS[self.likelihood][0]()
        return pd.BayesianNet(self.network(dropout=False), likelihood=likelihood).to(device)

    def data(self, device: str, points: int | None = None) -> tuple[Tensor, Tensor]:
        """Return made data: ``points`` of them, or as many as the setting has."""
        with forked():
            torch.manual_seed(0)
            x = torch.randn(self.points if points is None else points, self.layers[0])
        y = x[:, :1].sin().expand(-1, self.layers[-1]).clone()
        if self.likelihood == "classes":
            y = (x[:, 0] * 2).round().long().clamp(-2, 2) + 2
        elif self.likelihood in ("counts", "yes or no"):
            y = (3 * y.abs()).round() if self.likelihood == "counts" else (y > 0).float()
        return x.to(device), y.to(device)

    def how(self) -> dict[str, Any]:
        """Return what ``fit`` is told."""
        loss = {"temperature": self.temperature, **({"per_example": False} if self.one_draw else {})}
        return {
            "batch_size": self.batch if self.batch < self.points else None,
            "optim": self.optim,
            "lr": 1e-6 if self.optim == "sgd" else LEARNING_RATE,
            "schedule": halving if self.schedule else None,
            "clip_norm": 1.0 if self.clip else None,
            "loss": pd.ELBO(**{name: value for name, value in loss.items() if value is not None}),
        }


def halving(t: Any) -> Any:
    """Halve the learning rate every thousand steps."""
    return 0.5 ** (t / 1000)


SMALL = Setting()
DEEP = Setting(layers=(1, *[1024] * 5, 1), batch=272, points=272)
WIDE = Setting(layers=(784, *[1024] * 3, 10), likelihood="classes", batch=512, points=512)


def drawn(count: int, seed: int, guides: Sequence[str] = tuple(GUIDES)) -> list[Setting]:
    """Return different settings."""
    dice, found = random.Random(seed), list[Setting]()
    while len(found) < count:
        guide = dice.choice(list(guides))
        depth = dice.choice([1, 1, 2, 3])
        width = FULL_RANK_WIDTH if guide == "full rank" else dice.choice([20, 50, 100])
        activation, likelihood = dice.choice(ACTIVATIONS), dice.choice(list(LIKELIHOODS))
        one = Setting(
            guide,
            (INPUTS, *[width] * depth, LIKELIHOODS[likelihood][2]),
            activation,
            likelihood,
            dice.choice(["adam", "adam", "adamw", "sgd"]),
            dice.random() < 0.5,
            dice.random() < 0.5,
            dice.choice([None, None, 0.5, "auto"]),
            dice.choice([32, 128, POINTS]),
            POINTS,
        )
        found += [] if one in found else [one]
    return found


def one_by_one() -> list[Setting]:
    """Return 13-50-1 with dropout, and every setting that differs from it in one thing."""
    narrow = (INPUTS, FULL_RANK_WIDTH, 1)
    found = [Setting(each, narrow if each == "full rank" else SMALL.layers, points=POINTS) for each in GUIDES]
    found += [Setting(activation=each, points=POINTS) for each in ACTIVATIONS[1:]]
    for name, (_, _, outputs) in LIKELIHOODS.items():
        found += [Setting(layers=(INPUTS, 50, outputs), likelihood=name, points=POINTS)] * (name != "Gaussian")
    others: list[dict[str, Any]] = [{"optim": "adamw"}, {"optim": "sgd"}, {"schedule": True}, {"clip": True}]
    others += [{"temperature": 0.5}, {"batch": POINTS}]
    return [*found, *(Setting(points=POINTS, **each) for each in others)]
