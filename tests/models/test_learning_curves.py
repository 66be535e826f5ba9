"""Running means and first arrivals, by hand."""

import math

import numpy as np
import pytest
from experiments.learning_curves import first_reach, running_mean

import pyro_dropout as pd


def test_a_running_mean_uses_what_there_is() -> None:
    scores = np.array([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0])[:, None]
    assert running_mean(scores, 5)[:, 0].tolist() == pytest.approx([0, 0.5, 1, 1.5, 2, 3, 4])
    assert running_mean(scores, 1).tolist() == scores.tolist()
    assert running_mean(scores, 100)[-1, 0] == pytest.approx(3.0)


def test_an_arrival_is_the_first_and_may_never_come() -> None:
    scores = np.array([0.0, 1.0, 5.0, 3.0])[:, None]
    both = np.stack([scores, -scores], 1)  # (times, 2, 1)
    assert first_reach(both, 3.0).tolist() == [[3.0], [math.inf]]
    assert first_reach(both, 0.0).tolist() == [[1.0], [1.0]]


def test_no_scores_are_refused() -> None:
    with pytest.raises(pd.ShapeError, match="at least one time"):
        running_mean([], 3)
    with pytest.raises(pd.ShapeError, match="at least one time"):
        first_reach(2.0, 3)
    with pytest.raises(pd.RangeError, match="window"):
        running_mean([1.0], 0)
