"""Linearised predictions of a last layer cost at most three forward passes, on whatever device there is."""

import pytest
import torch

from tests.benchmarks.linearised import AT_MOST, measured


@pytest.mark.bench
def test_a_last_layer_costs_three_forward_passes() -> None:
    found = measured("cuda" if torch.cuda.is_available() else "cpu", images=10_000, rounds=3, samples=1000)
    assert found["predict, linearised"] <= AT_MOST * found["forward pass"]
