"""The figure shows what it says: curves that fall, labelled axes, and refusals in words."""

import pytest

from pyro_dropout.comparison import plot_kl_gap


def test_every_curve_falls_and_every_axis_is_named() -> None:
    figure = plot_kl_gap(keeps=[0.5, 0.9], scales=[0.3, 1.0, 3.0], draws=50)
    left, right = figure.axes
    for axes, curves in ((left, 2), (right, 3)):
        lines = [line for line in axes.lines if not str(line.get_label()).startswith("_")]
        assert len(lines) == curves == len(axes.get_legend().get_texts())
        assert axes.get_xlabel()
        assert "nats" in axes.get_ylabel()
        for line in lines:
            y = list(line.get_ydata())
            assert y[0] > y[-1] >= 0
    # d = 8 at even odds, read off the picture
    even = left.lines[0]
    at_eight = dict(zip(even.get_xdata().tolist(), even.get_ydata().tolist(), strict=True))[8.0]
    assert at_eight == pytest.approx(9.35351e-5, rel=1e-5)
