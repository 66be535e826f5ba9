"""The pictures of the problems with a gap: bands of each posterior, and widths along the line."""

from types import SimpleNamespace

import torch
from torch import Tensor

from experiments.band_plots import PALETTE, band_panels, curve_panels
from experiments.two_clusters import CLUSTERS, GRID, MIDDLE
from pyro_dropout.protocols import Figure


def bands(posteriors: dict[str, tuple[Tensor, Tensor]], problem: SimpleNamespace) -> Figure:
    """Draw mean and ±1, ±2 std of f for each posterior, with NUTS' ±2 std dashed in every panel."""
    shown = {name: (mean[-len(GRID) :], std[-len(GRID) :]) for name, (mean, std) in posteriors.items()}
    figure = band_panels(GRID, shown, columns=4, size=(3.1, 2.7))
    mean, std = shown["NUTS"]
    for axes in figure.axes:
        axes.axvspan(*MIDDLE, color="0.93", lw=0, zorder=0)
        axes.plot(GRID, torch.stack([mean - 2 * std, mean + 2 * std], 1), color="black", lw=0.8, ls="--")
        axes.plot(problem.t, problem.y, "o", color=PALETTE[3], ms=3.5, mec="white", mew=0.3)
        axes.set(xlim=(-4, 4), ylim=(-2.6, 2.6))
    figure.supxlabel("t, the place on the line (grey: the middle of the gap; dashed: NUTS, ±2 std)", fontsize=10)
    figure.supylabel("f, its mean and ±1, ±2 std", fontsize=10)
    return figure


def widths(stds: dict[tuple[int, int], dict[str, Tensor]]) -> Figure:
    """Draw the std of f along the line for each problem, {(depth, inputs): {name: std}}."""
    panels = {f"hidden layers: {depth}, inputs: {inputs}": found for (depth, inputs), found in stds.items()}
    curves = {title: {name: (GRID, found[name][-len(GRID) :]) for name in found} for title, found in panels.items()}
    figure = curve_panels(curves, xlabel="t (grey: data)", ylabel="std of f", styles={"NUTS": {"color": "black"}})
    for axes, found in zip(figure.axes, panels.values(), strict=True):
        for span in CLUSTERS:
            axes.axvspan(*span, color="0.9", lw=0, zorder=0)
        axes.set(xlim=(-3, 3), ylim=(0, 2 * float(found["NUTS"].max()) / 3))
    return figure
