"""Reliability, calibration error and Brier score of classes, against loops written out and honest classifiers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pyro_dropout as pd
from tests.oracles.both_types import digits, dtypes
from tests.oracles.made_predictions import made

F64 = torch.float64


def written_out(sure: list[float], right: list[bool], bins: int) -> tuple[list[int], float]:
    """The table and the error, one point and one bin at a time."""
    count, total = [], 0.0
    for k in range(bins):
        own = [i for i, c in enumerate(sure) if k / bins < c <= (k + 1) / bins]
        count.append(len(own))
        if own:
            accuracy, confidence = sum(right[i] for i in own) / len(own), sum(sure[i] for i in own) / len(own)
            total += len(own) / len(sure) * abs(accuracy - confidence)
    return count, total


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    points=st.integers(1, 40),
    classes=st.integers(2, 5),
    bins=st.integers(1, 20),
    dtype=dtypes,
)
def test_the_table_is_what_a_loop_finds(seed: int, points: int, classes: int, bins: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    answer = made(2 * torch.randn(3, points, classes, dtype=dtype, generator=generator), pd.Categorical())
    y = torch.randint(classes, (points,), generator=generator)
    probs = answer.probs.tolist()
    right = [max(range(classes), key=p.__getitem__) == label for p, label in zip(probs, y.tolist(), strict=True)]
    count, error = written_out([max(p) for p in probs], right, bins)
    table = pd.judging.reliability(answer, y, bins)
    assert table.count.tolist() == count
    assert table.ece == pytest.approx(error, abs=digits(dtype, 1e-12, 1e-6)) == pd.ece(answer, y, bins)
    assert torch.equal(table.accuracy.isnan(), table.count == 0)
    brier = [
        sum((p - (c == label)) ** 2 for c, p in enumerate(ps)) for ps, label in zip(probs, y.tolist(), strict=True)
    ]
    assert pd.judging.brier(answer, y).tolist() == pytest.approx(brier)
