"""What figures share: one way to write percentages and large numbers, and names that stand on one line."""

from typing import Any

import matplotlib.figure
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from pyro_dropout.prediction.plot_style import categories_below, finish, short_number


def boxes(figure: Any, texts: Any) -> list[Any]:
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    return [text.get_window_extent(renderer) for text in texts]


def axes_of(**limits: tuple[float, float]) -> tuple[Any, Any]:
    figure = matplotlib.figure.Figure(layout="constrained")
    ax = figure.subplots()
    ax.set(**limits)
    finish(ax)
    figure.draw(FigureCanvasAgg(figure).get_renderer())
    return figure, ax


@pytest.mark.parametrize(
    ("value", "written"),
    [(0, "0"), (700, "700"), (1500, "1.5k"), (-2000, "-2k"), (1.5e6, "1.5M"), (0.01, "0.01"), (2e9, "2G")],
)  # fmt: skip
def test_a_large_number_is_short(value: float, written: str) -> None:
    assert short_number(value) == written


@pytest.mark.parametrize(
    ("limits", "written"),
    [((0, 6000), "2k"), ((0, 10_500), "2k"), ((0, 700_000), "600k"), ((1990, 2025), "2000"), ((0, 900), "200")],
)
def test_axes_have_one_format_and_years_stay_years(limits: tuple[float, float], written: str) -> None:
    for which in "xy":
        _, ax = axes_of(**{f"{which}lim": limits})
        labels = [text.get_text() for text in getattr(ax, f"get_{which}ticklabels")()]
        assert written in labels
        assert not getattr(ax, f"{which}axis").get_offset_text().get_text()


def test_a_logarithmic_axis_has_no_powers_and_no_thousandths_called_m() -> None:
    figure = matplotlib.figure.Figure()
    ax = figure.subplots()
    ax.set(yscale="log", ylim=(0.001, 2000))
    finish(ax)
    figure.draw(FigureCanvasAgg(figure).get_renderer())
    labels = [text.get_text() for text in ax.get_yticklabels()]
    assert {"0.01", "1k"} <= set(labels)
    assert not any("m" in label or "^" in label for label in labels)


@pytest.mark.parametrize(
    "names", [["Audi", "Škoda", "Ångström"], ["a long name of a maker"] * 2 + ["Škoda, a maker of cars"]]
)
def test_names_with_accents_stand_on_the_line_of_the_others(names: list[str]) -> None:
    figure = matplotlib.figure.Figure(layout="constrained")
    ax = figure.subplots()
    categories_below(ax, range(len(names)), names)
    found = boxes(figure, ax.get_xticklabels())
    assert [text.get_text() for text in ax.get_xticklabels()] == names
    assert {text.get_va() for text in ax.get_xticklabels()} == {"baseline"}
    edge = ax.get_window_extent().y0
    assert all(box.y1 < edge for box in found)  # below the axis
    if sum(map(len, names)) < 50:  # upright: no letter below the line in these
        assert max(box.y0 for box in found[:2]) - min(box.y0 for box in found[:2]) < 1
