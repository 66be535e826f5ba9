"""What is said of scores, beside scipy, theory and sums by hand."""

import pytest
from experiments.summaries import gain, wins

SCORES = {
    ("a", "base"): [1.0, 10.0, 100.0],
    ("a", "better"): [2.0, 11.0, 101.5],
    ("b", "base"): [0.0, 0.0, 0.0],
    ("b", "better"): [1.0, -1.0, 0.1],
    ("b", "worse"): [-1.0, -1.1, -0.9],
    ("c", "better"): [1.0, 2.0],
}


def test_splits_are_paired() -> None:
    more, error = gain(SCORES, "a", "better", "base")
    assert more == pytest.approx(3.5 / 3)
    assert error == pytest.approx(1 / 6)  # the splits themselves differ by a hundred times as much
    assert wins(SCORES, "better", "base") == ["a"]
    assert wins(SCORES, "worse", "base") == []


def test_one_split_proves_nothing() -> None:
    assert wins({("a", "base"): [0.0], ("a", "better"): [9.0]}, "better", "base") == []
