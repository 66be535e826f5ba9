"""Gains of methods over a baseline: paired by split, and judged by their standard error."""

import math

import pytest
from experiments.paired_gains import gain, mean_and_error, plot_gains, wins

import pyro_dropout as pd

SCORES = {
    ("a", "base"): [1.0, 10.0, 100.0],
    ("a", "better"): [2.0, 11.0, 101.5],
    ("b", "base"): [0.0, 0.0, 0.0],
    ("b", "better"): [1.0, -1.0, 0.1],
    ("b", "worse"): [-1.0, -1.1, -0.9],
    ("c", "better"): [1.0, 2.0],
}


def test_a_mean_and_its_error() -> None:
    middle, error = mean_and_error([1.0, 2.0, 3.0, 6.0])
    assert middle == 3.0
    assert error == pytest.approx(math.sqrt((4 + 1 + 0 + 9) / 3 / 4))
    assert math.isnan(mean_and_error([1.0])[1])


def test_splits_are_paired() -> None:
    more, error = gain(SCORES, "a", "better", "base")
    assert more == pytest.approx(3.5 / 3)
    assert error == pytest.approx(1 / 6)  # the splits themselves differ by a hundred times as much
    assert wins(SCORES, "better", "base") == ["a"]
    assert wins(SCORES, "worse", "base") == []


def test_one_split_proves_nothing() -> None:
    assert wins({("a", "base"): [0.0], ("a", "better"): [9.0]}, "better", "base") == []


def test_every_gain_is_drawn() -> None:
    figure = plot_gains(SCORES, "base", "more")
    drawn = [len(axes.containers) for axes in figure.axes]
    assert [axes.get_title() for axes in figure.axes] == ["a", "b", "c"]
    assert drawn == [1, 2, 0]


def test_bad_input() -> None:
    with pytest.raises(pd.PyroDropoutError, match="no score of 'base' on 'c'"):
        gain(SCORES, "c", "better", "base")
    with pytest.raises(pd.ShapeError, match="the same splits"):
        gain({("a", "x"): [1.0], ("a", "y"): [1.0, 2.0]}, "a", "x", "y")
