"""Two clusters of data on a line, and the uncertainty between them: the problem of in-between uncertainty.

    ratio = std of f in the middle of the gap / std of f at the data

Data y = cos(2t + 0.8) + noise lie in two intervals of the line, after Foong, Li, Hernández-Lobato and Turner (2019).
NUTS has ratios of 2.5 to 4.0 in the four problems of ``in_between``.
"""

from types import SimpleNamespace

import torch
from torch import Tensor

from pyro_dropout.mathematics.shapes import Float

INPUTS, TAU = 5, 25.0  # of every problem: the dimension of x, and the precision of the noise
CLUSTERS, POINTS = ((-2.0, -1.4), (1.0, 2.0)), 15  # intervals of the line with data, and number of points in each
MIDDLE = (-0.8, 0.4)  # the middle half of the gap: near its ends the data constrain every posterior
OFF_LINE = 0.1  # with several inputs data lie this far off the line, so that no two inputs are equal
GRID = torch.linspace(-4, 4, 97)


def on_line(t: Float[Tensor, " N"], inputs: int) -> Float[Tensor, "N 5"]:
    """Return the points at ``t`` on the diagonal of the first inputs."""
    places: Tensor = t.unsqueeze(-1) * (torch.arange(INPUTS) < inputs) / inputs**0.5
    return places


def two_clusters(inputs: int, seed: int) -> SimpleNamespace:
    """Return a problem on a line along some of five inputs; the others are zero, and their weights see no data.

    It has 30 points ``t`` on the line, their inputs ``x``, (30, 5), and targets ``y``, (30, 1), and the points
    ``asked`` at which a posterior predicts: those of the data, and then those of ``GRID``, (30 + 97, 5).
    """
    dice = torch.Generator().manual_seed(seed)
    t = torch.cat([low + (high - low) * torch.rand(POINTS, generator=dice, device="cpu") for low, high in CLUSTERS])
    y = torch.cos(2 * t + 0.8) + TAU**-0.5 * torch.randn(len(t), generator=dice, device="cpu")
    aside = OFF_LINE * torch.randn(len(t), INPUTS, generator=dice, device="cpu")
    x = on_line(t, inputs) + aside * (torch.arange(INPUTS) < inputs) * (inputs > 1)
    return SimpleNamespace(t=t, x=x, y=y.unsqueeze(-1), asked=torch.cat([x, on_line(GRID, inputs)]))


def gap_ratio(std: Float[Tensor, "*batch M"]) -> Float[Tensor, "three *batch"]:
    """Return the mean standard deviation at the data and in the middle of the gap, and the ratio of the two."""
    middle = (GRID - sum(MIDDLE) / 2).abs() < (MIDDLE[1] - MIDDLE[0]) / 2
    at_data, in_gap = std[..., : -len(GRID)].mean(-1), std[..., -len(GRID) :][..., middle].mean(-1)
    return torch.stack([at_data, in_gap, in_gap / at_data])
