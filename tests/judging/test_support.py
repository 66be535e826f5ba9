"""Rows beyond the training rows and in holes between them are flagged, in tables of many columns; others are not."""

import math

import pytest
import torch
from torch import Tensor

import pyro_dropout as pd


def table(rows: int) -> Tensor:
    """Twelve columns: even, skewed, whole numbers, two that go together, spikes, categories, a constant."""
    even, skewed = torch.rand(rows, 3), torch.distributions.LogNormal(4.8, 0.6).sample((rows, 1))
    rooms = (skewed / 40 + torch.randn(rows, 1)).round().clamp(1, 9)
    kind = torch.nn.functional.one_hot(torch.randint(3, (rows,)), 3).float()
    yes = (torch.rand(rows, 1) < 0.3).float()
    spikes = torch.where(torch.rand(rows, 1) < 0.4, 50.0, 1000 * torch.rand(rows, 1))  # as gaps filled with a mean
    return torch.cat(
        [even, skewed, rooms, skewed.log() + 0.1 * torch.randn(rows, 1), spikes, kind, yes, 0 * yes + 3], 1
    )


def between(column: Tensor, low: float, high: float) -> Tensor:
    first, last = torch.quantile(column, torch.tensor([low, high]))
    return (column > first) & (column < last)


HOLES = {
    "along an even column": lambda x: between(x[:, 1], 0.4, 0.6),
    "along a skewed column": lambda x: between(x[:, 3], 0.6, 0.8),
    "of a whole number": lambda x: x[:, 4] == 4,
    "in two columns": lambda x: between(x[:, 0], 0.3, 0.7) & between(x[:, 2], 0.3, 0.7),
    "within a category": lambda x: (x[:, 8] == 1) & between(x[:, 1], 0.3, 0.7),
    "a pair of categories": lambda x: (x[:, 9] == 1) & (x[:, 10] == 1),
}


@pytest.mark.parametrize("hole", HOLES)
@pytest.mark.thinned(6)
def test_rows_in_a_hole_are_flagged_and_others_are_not(hole: str) -> None:
    x = table(1600)
    inside = HOLES[hole](x)
    outside, held = x[~inside], x[inside][:80]
    support = pd.judging.Support.of(outside[:1000])
    assert support.flag(held).double().mean() > 0.9
    assert support.flag(outside[1000:]).double().mean() <= 0.05
    columns = {
        "along an even column": (1,),
        "along a skewed column": (3,),
        "of a whole number": (4,),
        "in two columns": (0, 2),
    }
    if hole in columns:
        named = support.inputs(held)
        assert named.count(columns[hole]) > 0.8 * len(named)


@pytest.mark.parametrize(
    ("heavy", "others"),
    [(False, 0), (False, 3), pytest.param(False, 30, marks=pytest.mark.deep), (True, 0), (True, 3), (True, 30)],
)
def test_a_column_that_no_longer_goes_with_another_is_flagged(heavy: bool, others: int) -> None:
    """One column is ten times another; its values are shuffled, among columns of noise."""

    def drawn(rows: int) -> Tensor:
        weight = torch.randn(rows, 1).exp() if heavy else torch.rand(rows, 1)
        return torch.cat([weight, 10 * weight + 0.05 * torch.rand(rows, 1), torch.randn(rows, others)], 1)

    x = drawn(1000)
    support, broken = pd.judging.Support.of(x), x.clone()
    broken[:, 1] = broken[torch.randperm(1000), 1]
    assert support.flag(broken).double().mean() > 0.85
    assert support.flag(drawn(1000)).double().mean() <= 0.06


def test_rows_like_the_training_rows_are_flagged_as_rarely_as_promised() -> None:
    for rate in (0.03, 0.2):
        support = pd.judging.Support.of(table(600)[:, :8], rate=rate)
        share = support.flag(table(800)[:, :8]).double().mean().item()
        assert share < rate + 4 * math.sqrt(rate / 600)  # the limits are quantiles of 600 rows
        assert rate < 0.1 or share > 0.05


@pytest.mark.deep
def test_few_rows_flag_few_others() -> None:
    shares = []
    for seed in range(20):
        x = torch.randn(360, 13, generator=torch.Generator().manual_seed(seed))
        shares.append(pd.judging.Support.of(x[:60]).flag(x[60:]).double().mean().item())
    assert sum(shares) / len(shares) < 0.055  # three rows of sixty; 0.066 if the largest of the sixty were the limit


def test_copies_of_rows_change_nothing() -> None:
    x, new = torch.randn(300, 2), torch.randn(500, 2)
    one, twice = pd.judging.Support.of(x), pd.judging.Support.of(torch.cat([x, x, x[:100]]))
    assert abs((one.flag(new).double().mean() - twice.flag(new).double().mean()).item()) < 0.02
    few = torch.randint(3, (200, 2)).float()  # rows of few values repeat by chance
    assert len(pd.judging.Support.of(few).rows) == 200


def test_rows_are_judged_one_by_one_and_the_same_way_twice() -> None:
    x = table(200)
    support, new = pd.judging.Support.of(x), table(20)
    assert torch.equal(torch.cat([support.score(row[None]) for row in new]), support.score(new))
    assert torch.equal(pd.judging.Support.of(x).score(new), support.score(new))
    assert support.flag(new[:0]).shape == (0,)


def test_a_damaged_state_is_refused() -> None:
    state = pd.judging.Support.of(table(50)).state()
    damages = {
        "rows": state["rows"][:, :3],
        "along": state["along"] * math.nan,
        "paired": state["paired"] + 50,
        "limits": -state["limits"],
    }
    for name, value in damages.items():
        with pytest.raises(TypeError, match="what training rows are like"):
            pd.judging.Support.from_state(state | {name: value})
