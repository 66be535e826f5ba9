"""Two trainings that differ are told apart, and two that do not are not."""

from typing import Any

import pytest
import torch

from pyro_dropout.training.checkpoints.fingerprint import told_update
from pyro_dropout.training.optimisers import named


def late(step: int) -> Any:
    return lambda t: torch.where(t < step, 1.0, 0.1)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (late(30), late(31)),
        (late(20_000), late(30_000)),
        (lambda t: 0.5 * (1 + torch.cos(t / 100)), lambda t: 0.5 * (1 + torch.cos(t / 101))),
        (lambda t: 1.0 if t < 500 else 0.5, lambda t: 1.0 if t < 501 else 0.5),
        (None, late(4)),
    ],
)
def test_schedules_are_told_apart(first: Any, second: Any) -> None:
    told = [told_update(named("sgd", 0.1, schedule=schedule)) for schedule in (first, second)]
    assert told[0] != told[1]
    assert told[0] == told_update(named("sgd", 0.1, schedule=first))
