"""What is said of classifiers: areas beside counts of pairs, gradients beside sums, tables by hand, odd images."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from experiments.classifiers import (
    auroc,
    error_table,
    rejection_table,
)
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from tests.oracles.both_types import dtypes

FEW = st.lists(st.integers(0, 5), min_size=1, max_size=20)  # with many ties


@given(odd=FEW, ordinary=FEW, dtype=dtypes)
def test_an_area_counts_pairs(odd: list[int], ordinary: list[int], dtype: torch.dtype) -> None:
    found = auroc(torch.tensor(odd, dtype=dtype), torch.tensor(ordinary, dtype=dtype))
    pairs = [(a > b) + 0.5 * (a == b) for a in odd for b in ordinary]
    assert found.value == pytest.approx(sum(pairs) / len(pairs))
    labels = [1] * len(odd) + [0] * len(ordinary)
    assert found.value == pytest.approx(roc_auc_score(labels, odd + ordinary))
    mirrored = auroc(torch.tensor(ordinary, dtype=dtype), torch.tensor(odd, dtype=dtype))
    assert found.value + mirrored.value == pytest.approx(1)
    assert math.isnan(found.error) == (min(len(odd), len(ordinary)) < 2)
    assert mirrored.error == pytest.approx(found.error, nan_ok=True)


def answer(*chosen: int) -> Any:
    """A prediction that is all but sure of a class of three, for each input."""
    probs = torch.full((len(chosen), 3), 0.1).scatter(1, torch.tensor(chosen)[:, None], 0.8)
    return SimpleNamespace(probs=probs, log_prob=lambda y: probs[torch.arange(len(y)), y].log())


def test_a_gain_has_the_larger_of_two_errors() -> None:
    y = torch.tensor([0, 1, 2, 0])
    right, one_off = answer(0, 1, 2, 0), answer(0, 1, 2, 1)
    (row,) = error_table({"net": [(one_off, right), (right, right)]}, y, group="kind", ways=("plain", "MC"))
    assert row["kind"] == "net"
    assert (row["plain %"], row["MC %"], row["gain"]) == pytest.approx((12.5, 0.0, 12.5))
    assert row["± binomial"] == row["± over seeds"] == 0
    gain = torch.tensor([[0.0, 0, 0, 1], [0, 0, 0, 0]])
    over_seeds, over_inputs = (100 * gain.mean(d).std().item() / n**0.5 for d, n in ((1, 2), (0, 4)))
    assert row["± gain"] == pytest.approx(max(over_seeds, over_inputs))
    assert row["MC log p"] == pytest.approx(torch.tensor(0.8).log().item())


def test_rejection_by_hand() -> None:
    uncertainty, mistake = torch.arange(100.0), torch.zeros(100)
    mistake[[10, 97, 99]] = 1
    rows, figure = rejection_table({"a": {"good": (uncertainty, mistake), "bad": (-uncertainty, mistake)}})
    assert [list(row)[:2] for row in rows] == [["model", "by"]] * 2
    errors = [[row[f"error % at {share}%"] for share in (100, 99, 95)] for row in rows]
    assert errors[0] == pytest.approx([3.0, 200 / 99, 100 / 95])
    assert errors[1] == pytest.approx([3.0, 300 / 99, 300 / 95])
    assert rows[0]["of the oracle's gain"] > 0 > rows[1]["of the oracle's gain"]
    (axes,) = figure.axes
    assert axes.get_title() == "model: a"
    assert [line.get_ydata()[-1] for line in axes.lines] == pytest.approx([3.0, 3.0])


def sure(of_first: list[float]) -> torch.Tensor:
    return torch.tensor([[p, 1 - p] for p in of_first])
