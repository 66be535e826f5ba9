"""The pictures of CO₂ beyond the data: bands of each posterior, and the width of f along x."""

from collections.abc import Mapping
from typing import Any

from experiments.band_plots import PALETTE, band_panels, curve_panels
from pyro_dropout.protocols import Figure


def panels(answers: Mapping[str, Any], questions: Any, data: Any, columns: int, dashed: float) -> Figure:
    """Draw mean and ±½σ to ±2σ of each posterior, with the data, what came after them, and a dashed line."""
    shown = {title: (answer.mean[questions.grid], answer.std[questions.grid]) for title, answer in answers.items()}
    style: dict[str, Any] = {"multiples": (0.5, 1, 1.5, 2), "band_label": "±½σ to ±2σ"}  # the paper's shades
    figure = band_panels(questions.x[questions.grid, 0], shown, columns=columns, **style)
    for axes in figure.axes:
        axes.plot(data.x, data.y, color="black", lw=0.7, label="data")
        axes.plot(data.test_x, data.test_y, ".", color="0.45", ms=2, label="what came")
        axes.vlines([data.x.max(), dashed], -6, 10, ["black", PALETTE[3]], "dashed", lw=0.8)
        axes.set(xlabel=data.x_name, ylabel="CO₂ (standardised)", xlim=(-1.8, 4), ylim=(-6, 10))
    figure.axes[0].legend(frameon=False, fontsize=8, loc="upper left")
    return figure


def spreads(mc: Mapping[tuple[int, str, float], Any], questions: Any) -> Figure:
    """Draw the std of f along x for networks by (depth, kind, dropped), a panel for each kind."""
    x = questions.x[questions.grid, 0]
    curves: dict[str, dict[str, tuple[object, ...]]] = {}
    for (depth, kind, dropped), answer in mc.items():
        name = f"{depth} layers, dropout {dropped}"
        curves.setdefault(kind, {})[name] = x, answer.spread[questions.grid]
    figure = curve_panels(curves, xlabel="x (dashed: the data's end)", ylabel="std of f", size=(4.5, 3.8), share=True)
    for axes in figure.axes:
        axes.axvline(questions.x[questions.data].max(), color="black", ls="--", lw=0.8)
        axes.set(yscale="log")
    return figure
