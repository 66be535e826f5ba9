"""The networks that are measured, their data, and their layers as plain torch."""

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import pyro_dropout as pd

DROP = 0.1
TAU = 10.0


@dataclass(frozen=True)
class Size:
    """A network and its batch.

    Attributes:
        name: what tables call it.
        layers: units in each layer, inputs and outputs included.
        batch: data points in a step.
        classes: whether outputs are the logits of classes; otherwise they are regressed on.
    """

    name: str
    layers: tuple[int, ...]
    batch: int
    classes: bool = False

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Inputs and outputs of every weight layer."""
        return list(itertools.pairwise(self.layers))

    @property
    def weights(self) -> int:
        """How many numbers the network has."""
        return sum(a * b + b for a, b in self.shapes)

    def data(self, device: str, points: int | None = None) -> tuple[Tensor, Tensor]:
        """Return one batch of noise, or ``points`` data points of it: what is in the data takes no part in the time."""
        count = self.batch if points is None else points
        x = torch.randn(count, self.layers[0], device=device)
        if self.classes:
            return x, torch.randint(0, self.layers[-1], (count,), device=device)
        return x, torch.randn(count, self.layers[-1], device=device)

    def net(self, device: str, *, dropout: bool = False) -> nn.Sequential:
        """Return the network with ReLU, and with dropout before every weight layer where asked for."""
        parts: list[nn.Module] = []
        for a, b in self.shapes:
            parts += [*([nn.Dropout(DROP)] if dropout else []), nn.Linear(a, b), nn.ReLU()]
        return nn.Sequential(*parts[:-1]).to(device)

    def model(self, device: str) -> Any:
        """Return the network as this library's Pyro model."""
        likelihood = pd.Categorical() if self.classes else pd.Gaussian(tau=TAU)
        return pd.BayesianNet(self.net(device), likelihood=likelihood).to(device)


SMALL = Size("13-50-1", (13, 50, 1), 128)
DEEP = Size("1-1024x5-1", (1, *[1024] * 5, 1), 272)
WIDE = Size("784-1024x3-10", (784, *[1024] * 3, 10), 512, classes=True)
SIZES = {size.name: size for size in (SMALL, DEEP, WIDE)}
