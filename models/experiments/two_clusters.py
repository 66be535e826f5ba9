"""Two clusters of data on a line, and the uncertainty between them: the problem of in-between uncertainty.

    ratio = std of f in the middle of the gap / std of f at the data

Data y = cos(2t + 0.8) + noise lie in two intervals of the line, after Foong, Li, Hernández-Lobato and Turner (2019).
NUTS has ratios of 2.5 to 4.0 in the four problems of ``in_between``.
"""

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from experiments.summaries import standard_error
from pyro_dropout.mathematics.shapes import Float

INPUTS, TAU = 5, 25.0  # of every problem: the dimension of x, and the precision of the noise
CLUSTERS, POINTS = ((-2.0, -1.4), (1.0, 2.0)), 15  # intervals of the line with data, and number of points in each
MIDDLE = (-0.8, 0.4)  # the middle half of the gap: near its ends the data constrain every posterior
OFF_LINE = 0.1  # with several inputs data lie this far off the line, so that no two inputs are equal
GRID = torch.linspace(-4, 4, 97)


@dataclass(frozen=True, eq=False)
class TwoClusters:
    """A problem with data in two clusters; returned by ``two_clusters``.

    Attributes:
        t: positions of the data on the line, (30,).
        x: their inputs, (30, 5).
        y: their targets, (30, 1).
        asked: where a posterior predicts: the data, and then the points of ``GRID``, (30 + 97, 5).
    """

    t: Float[Tensor, " N"]
    x: Float[Tensor, "N Q"]
    y: Float[Tensor, "N 1"]
    asked: Float[Tensor, "M Q"]


def on_line(t: Float[Tensor, " N"], inputs: int) -> Float[Tensor, "N 5"]:
    """Return the points at ``t`` on the diagonal of the first inputs."""
    places: Tensor = t.unsqueeze(-1) * (torch.arange(INPUTS) < inputs) / inputs**0.5
    return places


def two_clusters(inputs: int, seed: int) -> TwoClusters:
    """Return a problem on a line along some of five inputs; the others are zero, and their weights see no data."""
    dice = torch.Generator().manual_seed(seed)
    t = torch.cat([low + (high - low) * torch.rand(POINTS, generator=dice, device="cpu") for low, high in CLUSTERS])
    y = torch.cos(2 * t + 0.8) + TAU**-0.5 * torch.randn(len(t), generator=dice, device="cpu")
    aside = (
        OFF_LINE
        * torch.randn(len(t), INPUTS, generator=dice, device="cpu")
        * (torch.arange(INPUTS) < inputs)
        * (inputs > 1)
    )
    x = on_line(t, inputs) + aside
    return TwoClusters(t, x, y.unsqueeze(-1), torch.cat([x, on_line(GRID, inputs)]))


def gap_ratio(std: Float[Tensor, "*batch M"]) -> Float[Tensor, "three *batch"]:
    """Return the mean standard deviation at the data and in the middle of the gap, and the ratio of the two."""
    middle = (GRID - sum(MIDDLE) / 2).abs() < (MIDDLE[1] - MIDDLE[0]) / 2
    at_data, in_gap = std[..., : -len(GRID)].mean(-1), std[..., -len(GRID) :][..., middle].mean(-1)
    return torch.stack([at_data, in_gap, in_gap / at_data])


def beside(row: dict[str, Any], reference: SimpleNamespace) -> dict[str, Any]:
    """Return a row of the table with its numbers divided by the reference's, on which its own do not depend."""
    at_data, _, true = gap_ratio(reference.std).tolist()
    own, other = row["± ratio"] / row["ratio"], standard_error(gap_ratio(reference.by_chain)[2]).item() / true
    error = 0.0 if row["guide"] == "NUTS" else row["ratio"] / true * math.hypot(own, other)
    return row | {"ratio ÷ NUTS": row["ratio"] / true, "± of that": error, "at data ÷ NUTS": row["at data"] / at_data}
