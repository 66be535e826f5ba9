"""Runs of a model that look at shapes alone, as they do on a GPU."""

import pytest
import torch

from pyro_dropout.generative.trial_run import run_for_shapes


def test_an_index_that_is_not_there_is_looked_up_by_shape_alone() -> None:
    found = []

    def look_up() -> None:
        found.append(torch.arange(3)[torch.tensor([5, 6])].shape)

    run_for_shapes(look_up, True)
    assert found == [(2,)]
    with pytest.raises(IndexError):
        run_for_shapes(look_up, False)


def test_a_network_that_reads_values_is_run_with_them() -> None:
    found = []

    def read() -> None:
        value = torch.ones(2).sum().item()
        found.append(value)

    run_for_shapes(read, True)
    assert found == [2.0]
