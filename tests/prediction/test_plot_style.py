"""What figures share: one way to write percentages and large numbers, and names that stand on one line."""

from typing import Any

import matplotlib.figure
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from pyro_dropout.prediction.plot_style import finish, short_number


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
