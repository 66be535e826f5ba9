"""Which inputs are handed on, what that is worth, and Thompson sampling as often as the posterior believes."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, nn

import pyro_dropout as pd
from tests.oracles.both_types import dtypes
from tests.oracles.made_predictions import made

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


def test_the_curve_is_a_mean_over_random_orders_of_ties() -> None:
    uncertainty = torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0], dtype=F64)
    score = torch.tensor([1.0, 0.0, 5.0, 2.0, 0.0], dtype=F64)
    curve = pd.judging.rejection_curve(uncertainty, score)
    orders = [[*a, *b] for a in itertools.permutations([1, 3]) for b in itertools.permutations([0, 2, 4])]
    brute = torch.stack([score[order].cumsum(0) / torch.arange(1, 6) for order in orders]).mean(0)
    torch.testing.assert_close(curve.score, brute)
    assert curve.kept.tolist() == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert curve.random.tolist() == pytest.approx([1.6] * 5)
    assert curve.oracle.tolist() == pytest.approx([5.0, 3.5, 8 / 3, 2.0, 1.6])
    assert curve.area == pytest.approx(brute.mean().item())
    assert curve.error[-1].item() == pytest.approx(score.std(correction=0).item() / 5**0.5)


class Asked:
    """A model whose logits or means are a function of x, and which remembers what it was asked."""

    def __init__(self, likelihood: pd.generative.Likelihood, noise: float, outputs: int = 1) -> None:
        self.likelihood, self.noise, self.outputs, self.seen = likelihood, noise, outputs, Tensor()

    def __call__(self, x: Tensor) -> pd.prediction.Prediction:
        self.seen = x
        f = torch.cat([x, *[torch.zeros_like(x)] * (self.outputs - 1)], -1)
        return made(f + self.noise * x * torch.tensor([-1.0, 1.0], dtype=x.dtype).reshape(2, 1, 1), self.likelihood)


def test_regression(dtype: torch.dtype) -> None:
    weak, strong = Asked(pd.Gaussian(4.0), 1.0), Asked(pd.Gaussian(400.0), 0.0)
    x = torch.tensor([[3.0], [1.0], [-2.0], [0.5]], dtype=dtype)  # the weak one is unsure in proportion to |x|
    result = pd.judging.cascade(weak, strong, x, budget=0.5, costs=(2.0, 7.0))
    assert result.deferred.tolist() == [True, False, True, False]
    assert torch.equal(strong.seen, x[[0, 2]])
    assert result.cost == 4 * 2 + 2 * 7
    torch.testing.assert_close(result.uncertainty, (x.square() + 0.25).sqrt().squeeze(-1))
    assert result.mean.dtype == dtype
    torch.testing.assert_close(result.mean, torch.where(result.deferred[:, None], strong(x).mean, weak(x).mean))
    with pytest.raises(pd.errors.PyroDropoutError, match=r"accuracy\(y\) is for classes"):
        result.accuracy(x)
    with pytest.raises(pd.errors.PyroDropoutError, match="probs is for classes"):
        result.probs  # noqa: B018


def test_the_strong_model_mends_what_the_weak_one_does_not_know() -> None:
    """Weak logits say nothing of half of the inputs, and say so; strong ones are right on all."""
    x = torch.tensor([[4.0], [0.0], [-4.0], [0.01]])
    y = torch.tensor([0, 1, 1, 1])
    weak = Asked(pd.Categorical(), 0.0, outputs=2)

    def strong(x: Tensor) -> pd.prediction.Prediction:
        labels = {4.0: 0, 0.0: 1, -4.0: 1, 0.01: 1}
        own = torch.tensor([labels[round(v, 2)] for v in x[:, 0].tolist()])
        return made(9.0 * torch.nn.functional.one_hot(own, 2).float().unsqueeze(0), pd.Categorical())

    result = pd.judging.cascade(weak, strong, x, threshold=0.5, uncertainty="entropy")
    assert result.deferred.tolist() == [False, True, False, True]
    assert result.accuracy(y) == 1.0
    assert result.probs.shape == (4, 2)
    alone = pd.judging.cascade(weak, strong, x, threshold=10.0)
    assert alone.accuracy(y) == 0.5
    assert alone.strong is None


def linear(loc: list[float], scale: float, likelihood: Any = None, dtype: torch.dtype = torch.float32) -> Any:
    """The reward of a context is wᵀx, with w ~ N(loc, scale²) in the posterior."""
    model = pd.BayesianNet(nn.Linear(len(loc), 1, bias=False).to(dtype), likelihood=likelihood or pd.Gaussian(1.0))
    guide = pd.AutoMeanField(model, init=lambda name, shape: torch.tensor([loc], dtype=dtype), init_scale=scale)
    return model, guide


@pytest.mark.thinned(2)
def test_an_arm_is_chosen_as_often_as_it_is_the_best(dtype: torch.dtype) -> None:
    """w₁ - w₀ ~ N(0.4, 2·0.5²), so arm 1 is best with probability Φ(0.4/√0.5) = 0.714; 100 calls, 5.5 errors."""
    model, guide = linear([0.1, 0.5], 0.5, dtype=dtype)
    arms, calls = torch.eye(2, dtype=dtype), 100
    chosen = torch.stack([pd.judging.thompson(model, guide, arms) for _ in range(calls)])
    assert chosen.shape == (calls,)
    exact = float(stats.norm.cdf(0.4 / 0.5**0.5))
    assert abs(chosen.double().mean().item() - exact) < 5.5 * (exact * (1 - exact) / calls) ** 0.5


def test_all_contexts_share_one_draw() -> None:
    """The same two arms in 50 contexts: one draw gives one choice, and other calls give other ones."""
    model, guide = linear([0.0, 0.0], 1.0)
    contexts = torch.eye(2).expand(50, 2, 2)
    seen = set()
    for seed in range(20):
        chosen = pd.judging.thompson(model, guide, contexts, seed=seed)
        assert chosen.shape == (50,)
        assert len(chosen.unique()) == 1
        assert torch.equal(chosen, pd.judging.thompson(model, guide, contexts, seed=seed))
        seen.add(chosen[0].item())
    assert seen == {0, 1}
