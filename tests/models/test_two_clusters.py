"""The problem with a gap: where its data lie, and what the ratio is."""

import pytest
import torch
from experiments.two_clusters import GRID, gap_ratio, on_line, two_clusters

import pyro_dropout as pd


@pytest.mark.parametrize("inputs", [1, 5])
def test_data_lie_in_two_clusters_along_some_inputs(inputs: int) -> None:
    problem = two_clusters(inputs, seed=0)
    assert problem.x.shape == (30, 5)
    in_first, in_second = (problem.t > -2) & (problem.t < -1.4), (problem.t > 1) & (problem.t < 2)
    assert (int(in_first.sum()), int(in_second.sum())) == (15, 15)
    noise = problem.y.flatten() - torch.cos(2 * problem.t + 0.8)
    assert 0.1 < noise.std() < 0.3  # 30 draws with standard deviation 0.2
    assert len(problem.asked) == 30 + len(GRID)
    line = problem.asked[30:]
    assert torch.allclose(line.norm(dim=1), GRID.abs(), atol=1e-6)  # a unit of t is a unit of length
    assert (line[:, inputs:] == 0).all()
    aside = problem.x - on_line(problem.t, inputs)
    assert bool((aside == 0).all()) if inputs == 1 else 0.07 < aside.std() < 0.13
    assert not torch.equal(two_clusters(inputs, seed=1).t, problem.t)


def test_a_ratio_is_that_of_the_averages() -> None:
    std = torch.ones(2, 30 + len(GRID))
    std[0, 30:][GRID.abs() < 1] = 3.0  # the whole middle of the gap, and more
    std[1, :30] = 4.0
    at_data, in_gap, ratio = gap_ratio(std)
    assert at_data.tolist() == [1, 4]
    assert in_gap.tolist() == [3, 1]
    assert ratio.tolist() == [3, 0.25]
    std[0, 30:][(GRID < -0.81) | (GRID > 0.41)] = 1.0
    assert gap_ratio(std)[1, 0] == 3  # only the middle counts


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(pd.RangeError, match="inputs must be from 1 to 5; got 6"):
        two_clusters(6, seed=0)
    with pytest.raises(pd.ShapeError, match="std must have a number for each point"):
        gap_ratio(torch.ones(97))
