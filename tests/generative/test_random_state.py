"""Saving, restoring and seeding the random generators."""

import contextlib
import random

import numpy as np
import pytest
import torch

from pyro_dropout.generative.random_state import forked, seeded

CPU = torch.device("cpu")


def draws() -> tuple[float, float, float]:
    """Draw from the generators of torch, Python and numpy that all code shares."""
    return float(torch.rand(())), random.random(), float(np.random.rand())  # noqa: NPY002


def test_a_fork_leaves_no_trace_even_after_an_error() -> None:
    found = []
    with contextlib.suppress(ZeroDivisionError), forked():
        found.append(draws())
        _ = 1 / 0
    assert [draws()] == found


@pytest.mark.parametrize("seed", [0, -3, 2**62])
def test_a_seed_decides_all_draws_and_is_forgotten(seed: int) -> None:
    with forked():
        following = draws()
    found = []
    for _ in range(2):
        with seeded(seed, CPU):
            found.append(draws())
    assert found[0] == found[1]
    with seeded(7, CPU):
        assert all(a != b for a, b in zip(draws(), found[0], strict=True))
    assert draws() == following
