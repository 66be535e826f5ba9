"""Which inputs are handed on, and what that is worth."""

import itertools

import matplotlib.pyplot as plt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pyro_dropout as pd
from tests.oracles.both_types import dtypes

F64 = torch.float64
FEW = st.lists(st.integers(0, 4), min_size=1, max_size=25)  # with many ties


@given(values=FEW, budget=st.floats(0, 1), dtype=dtypes)
def test_a_budget_is_met_exactly_by_the_most_uncertain(values: list[int], budget: float, dtype: torch.dtype) -> None:
    uncertainty = torch.tensor(values, dtype=dtype)
    found = pd.defer(uncertainty, budget=budget)
    assert found.dtype == torch.bool
    assert found.sum() == round(budget * len(values))
    ranked = sorted(range(len(values)), key=lambda i: (-values[i], i))[: int(found.sum())]
    assert sorted(ranked) == found.nonzero().reshape(-1).tolist()


def test_a_threshold_is_not_exceeded_by_what_is_kept(dtype: torch.dtype) -> None:
    uncertainty = torch.tensor([0.5, 1.0, 2.0], dtype=dtype)
    assert pd.defer(uncertainty, threshold=1.0).tolist() == [False, False, True]
    assert pd.defer(uncertainty, threshold=-1).all()
    assert pd.defer(uncertainty, budget=1).all()
    assert not pd.defer(uncertainty, budget=0).any()


def test_the_curve_is_a_mean_over_random_orders_of_ties() -> None:
    uncertainty = torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0], dtype=F64)
    score = torch.tensor([1.0, 0.0, 5.0, 2.0, 0.0], dtype=F64)
    curve = pd.rejection_curve(uncertainty, score)
    orders = [[*a, *b] for a in itertools.permutations([1, 3]) for b in itertools.permutations([0, 2, 4])]
    brute = torch.stack([score[order].cumsum(0) / torch.arange(1, 6) for order in orders]).mean(0)
    torch.testing.assert_close(curve.score, brute)
    assert curve.kept.tolist() == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert curve.random.tolist() == pytest.approx([1.6] * 5)
    assert curve.oracle.tolist() == pytest.approx([5.0, 3.5, 8 / 3, 2.0, 1.6])
    assert curve.area == pytest.approx(brute.mean().item())
    assert curve.error[-1].item() == pytest.approx(score.std(correction=0).item() / 5**0.5)


@given(seed=st.integers(0, 2**31), points=st.integers(2, 30), higher=st.booleans(), dtype=dtypes)
def test_the_oracle_is_the_best_order(seed: int, points: int, higher: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    score = torch.randn(points, dtype=dtype, generator=generator)
    any_order = torch.randn(points, dtype=dtype, generator=generator)
    sign = 1 if higher else -1
    curve = pd.rejection_curve(any_order, score, higher_is_better=higher)
    assert (sign * (curve.oracle - curve.score) >= -1e-12).all()
    assert curve.score[-1].item() == pytest.approx(score.double().mean().item())
    perfect = pd.rejection_curve(-sign * score, score, higher_is_better=higher)
    torch.testing.assert_close(perfect.score, perfect.oracle)
    assert perfect.ratio == pytest.approx(1.0)
    assert curve.ratio <= 1 + 1e-9
    same = pd.rejection_curve(torch.zeros(points), score, higher_is_better=higher)
    assert same.ratio == pytest.approx(0.0, abs=1e-9)


def test_right_and_wrong_are_scores_and_the_figure_is_labelled() -> None:
    right = torch.tensor([True, False, True])
    curve = pd.rejection_curve(torch.tensor([0.1, 0.5, 0.2]), right)
    assert curve.score.tolist() == pytest.approx([1.0, 1.0, 2 / 3])
    ax = curve.plot(ylabel="accuracy of those kept")
    assert ax.get_ylabel() == "accuracy of those kept"
    assert ax.get_xlabel() == "fraction of inputs kept"
    assert len(ax.get_legend().get_texts()) == 4
    assert curve.plot(ax) is ax
    plt.close("all")


@pytest.mark.usefixtures("unchecked_shapes")
def test_bad_input() -> None:
    some = torch.tensor([0.1, 0.2])
    for both in ({}, {"budget": 0.5, "threshold": 0.5}):
        with pytest.raises(pd.PyroDropoutError, match="exactly one of budget and threshold"):
            pd.defer(some, **both)
    for budget in (-0.1, 1.1, float("nan")):
        with pytest.raises(pd.RangeError, match=r"budget must lie in \[0, 1\]"):
            pd.defer(some, budget=budget)
    with pytest.raises(pd.RangeError, match="threshold must be a real number"):
        pd.defer(some, threshold="high")  # type: ignore[arg-type]
    with pytest.raises(pd.ShapeError, match=r"one number for each input, \(N,\); got shape \(2, 1\). Sum or average"):
        pd.defer(some.unsqueeze(-1), budget=0.5)
    with pytest.raises(pd.RangeError, match="uncertainty must be finite"):
        pd.defer(some / 0, budget=0.5)
    with pytest.raises(pd.ShapeError, match="score must have one number for each of 2 inputs"):
        pd.rejection_curve(some, torch.ones(3))
    with pytest.raises(pd.RangeError, match="score must be finite"):
        pd.rejection_curve(some, some / 0)
