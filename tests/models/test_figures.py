"""Bands are drawn where their numbers are, in as many panels as there are posteriors."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from experiments.figures import curve_panels, draw_fan, draw_std_bands
from matplotlib.figure import Figure


def edges(band: Any, at: float) -> tuple[float, float]:
    """The lowest and the highest point of a filled area at one place."""
    corners = band.get_paths()[0].vertices
    heights = corners[np.isclose(corners[:, 0], at), 1]
    return float(heights.min()), float(heights.max())


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_bands_are_multiples_of_the_standard_deviation(kind: Any) -> None:
    axes = Figure().subplots()
    draw_std_bands(axes, kind([0.0, 1.0]), kind([1.0, 2.0]), kind([0.1, 0.3]), multiples=(0.5, 2.0), band_label="two")
    wide, narrow = axes.collections
    assert (*edges(wide, 1.0), *edges(narrow, 1.0)) == pytest.approx((1.4, 2.6, 1.85, 2.15))
    assert (*edges(wide, 0.0), *edges(narrow, 0.0)) == pytest.approx((0.8, 1.2, 0.95, 1.05))
    assert axes.lines[0].get_ydata().tolist() == [1.0, 2.0]
    assert axes.get_legend_handles_labels()[1] == ["two", "mean"]  # one entry for all bands
    draw_std_bands(axes, kind([0.0, 1.0]), kind([1.0, 2.0]), kind([0.1, 0.3]), label=None)
    assert axes.get_legend_handles_labels()[1] == ["two", "mean"]


def test_a_fan_holds_its_share_of_the_draws() -> None:
    axes = Figure().subplots()
    draws = torch.linspace(0, 1, 101).unsqueeze(-1) * torch.tensor([1.0, 10.0])
    draw_fan(axes, [0.0, 1.0], draws, levels=(0.5, 0.9), color="black")
    wide, of_wide, narrow, of_narrow = axes.collections  # each with its empty likeness for the legend
    assert of_wide.get_alpha() == pytest.approx(wide.get_alpha())
    assert 0 < of_wide.get_alpha() < of_narrow.get_alpha() < 1
    assert (*edges(wide, 0.0), *edges(narrow, 0.0)) == pytest.approx((0.05, 0.95, 0.25, 0.75))
    assert edges(wide, 1.0) == pytest.approx((0.5, 9.5))
    assert axes.lines[0].get_ydata().tolist() == pytest.approx([0.5, 5.0])
    assert axes.get_legend_handles_labels()[1] == ["90% of the draws", "50% of the draws", "mean"]


def test_curves_have_one_legend_and_their_bands(tmp_path: Path) -> None:
    one = {"a": ([0, 1], [1.0, 2.0]), "b": ([0, 1], [1.0, 3.0], [0.5, 0.25])}
    two = {"b": ([0, 1], [5.0, 6.0]), "c": ([0, 1], [1.0, 1.0])}
    styles, levels = {"c": {"color": "black", "ls": ":"}}, {"best": 9.0}
    figure = curve_panels({"one": one, "two": two}, xlabel="t", ylabel="y", styles=styles, levels=levels)
    first, second = figure.axes
    assert edges(first.collections[0], 1.0) == (2.75, 3.25)
    assert len(second.collections) == 0
    assert [line.get_label() for line in first.lines] == ["a", "b", "best"]
    assert first.lines[1].get_color() == second.lines[0].get_color() != first.lines[0].get_color()
    assert (second.lines[1].get_color(), second.lines[1].get_linestyle()) == ("black", ":")
    assert sorted(text.get_text() for text in figure.legends[0].get_texts()) == ["a", "b", "best", "c"]
    assert {(axes.get_xlabel(), axes.get_ylabel()) for axes in figure.axes} == {("t", "y")}
    assert first.get_ylim() != second.get_ylim()
    shared = curve_panels({"one": one, "two": two}, xlabel="t", share=True)
    assert shared.axes[0].get_ylim() == shared.axes[1].get_ylim()
    figure.savefig(tmp_path / "curves.png")
