"""Bands are drawn where their numbers are, in as many panels as there are posteriors."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from experiments.band_plots import band_panels, class_panels, curve_panels, draw_fan, draw_std_bands
from matplotlib.figure import Figure

import pyro_dropout as pd
from pyro_dropout.prediction.plot_style import PALETTE


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


def test_a_gradient_and_an_empty_width_are_no_hindrance() -> None:
    axes = Figure().subplots()
    draw_std_bands(axes, torch.arange(3), torch.ones(3, requires_grad=True), torch.zeros(3))
    assert edges(axes.collections[0], 2.0) == (1.0, 1.0)


def test_a_fan_holds_its_share_of_the_draws() -> None:
    axes = Figure().subplots()
    draws = torch.linspace(0, 1, 101).unsqueeze(-1) * torch.tensor([1.0, 10.0])
    draw_fan(axes, [0.0, 1.0], draws, levels=(0.5, 0.9), label="middle")
    wide, of_wide, narrow, of_narrow = axes.collections  # each with its empty likeness for the legend
    assert of_wide.get_alpha() == pytest.approx(wide.get_alpha())
    assert 0 < of_wide.get_alpha() < of_narrow.get_alpha() < 1
    assert (*edges(wide, 0.0), *edges(narrow, 0.0)) == pytest.approx((0.05, 0.95, 0.25, 0.75))
    assert edges(wide, 1.0) == pytest.approx((0.5, 9.5))
    assert axes.lines[0].get_ydata().tolist() == pytest.approx([0.5, 5.0])
    assert axes.get_legend_handles_labels()[1] == ["90% of the draws", "50% of the draws", "middle"]


@pytest.mark.parametrize(("count", "grid"), [(1, (1, 1)), (2, (1, 2)), (5, (2, 3)), (6, (2, 3))])
def test_there_is_a_panel_for_each_posterior_and_no_other(count: int, grid: tuple[int, int], tmp_path: Path) -> None:
    answers = {f"q{k}": ([0.0, float(k)], [1.0, 1.0]) for k in range(count)}
    figure = band_panels([0, 1], answers, columns=3, size=(2.0, 1.5), multiples=(1,), color=PALETTE[1])
    assert [axes.get_title() for axes in figure.axes] == list(answers)
    assert [axes.lines[0].get_ydata()[1] for axes in figure.axes] == list(range(count))
    assert all(len(axes.collections) == 1 for axes in figure.axes)
    assert figure.get_size_inches().tolist() == [2.0 * grid[1], 1.5 * grid[0]]
    figure.axes[0].set_ylim(-3, 7)
    assert {axes.get_ylim() for axes in figure.axes} == {(-3, 7)}  # shared
    figure.savefig(tmp_path / "panels.png")
    assert (tmp_path / "panels.png").stat().st_size > 3000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": [0.0]}, "x, mean and std must have the same length; got 1, 2 and 2"),
        ({"std": [[0.1, 0.2]]}, r"std must have one number per position, \(N,\); got shape \(1, 2\)"),
        ({"std": [0.1, -0.2]}, "std must not be negative"),
        ({"multiples": ()}, "multiples must be positive"),
        ({"multiples": (1, 0)}, "multiples must be positive"),
    ],
)
def test_bands_that_cannot_be_drawn_are_refused(change: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"x": [0.0, 1.0], "mean": [0.0, 1.0], "std": [1.0, 1.0]}
    with pytest.raises(pd.PyroDropoutError, match=message):
        draw_std_bands(Figure().subplots(), **(given | change))


def test_fans_and_panels_that_cannot_be_drawn_are_refused() -> None:
    with pytest.raises(pd.ShapeError, match=r"draws must have shape \(T, N\) with N = 2 positions; got \(3,\)"):
        draw_fan(Figure().subplots(), [0, 1], torch.ones(3))
    with pytest.raises(pd.RangeError, match="levels are shares"):
        draw_fan(Figure().subplots(), [0, 1], torch.ones(3, 2), levels=(95,))
    with pytest.raises(pd.ShapeError, match="answers must hold"):
        band_panels([0, 1], {})
    with pytest.raises(pd.RangeError, match="columns"):
        band_panels([0, 1], {"q": ([0, 1], [1, 1])}, columns=0)


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
    with pytest.raises(pd.ShapeError, match="panels must hold"):
        curve_panels({}, xlabel="t")


@pytest.mark.parametrize("with_images", [False, True])
def test_classes_of_most_probability_are_shown(with_images: bool) -> None:
    f = torch.randn(20, 4, 5, generator=torch.Generator().manual_seed(0))
    f[..., 3] += 4
    f[..., 1] += 2
    images = torch.rand(4, 6, 5) if with_images else None
    figure = class_panels([0.0, 30.0, 60.0, 90.0], f, xlabel="angle", images=images, classes=2)
    assert len(figure.axes) == (4 if with_images else 2)
    inputs, outputs = figure.axes[:2]
    assert inputs.get_legend_handles_labels()[1] == ["class 3", "class 1"]
    found = np.array([line.get_ydata() for line in outputs.lines[:20]])
    np.testing.assert_allclose(found, f.softmax(-1)[..., 3].numpy(), atol=1e-6)
    with pytest.raises(pd.ShapeError, match=r"f must have shape \(T, N, C\) with N = 3 positions"):
        class_panels([0.0, 1.0, 2.0], f, xlabel="angle")
