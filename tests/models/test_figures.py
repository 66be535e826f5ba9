"""Bands are drawn where their numbers are, in as many panels as there are posteriors."""

from typing import Any

import numpy as np
import pytest
import torch
from experiments.figures import draw_std_bands
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
