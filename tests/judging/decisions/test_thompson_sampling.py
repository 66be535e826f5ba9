"""Thompson sampling chooses each arm as often as the posterior believes it to be the best."""

from typing import Any

import pyro
import pytest
import torch
from scipy import stats
from torch import nn

import pyro_dropout as pd


def linear(loc: list[float], scale: float, likelihood: Any = None, dtype: torch.dtype = torch.float32) -> Any:
    """The reward of a context is wᵀx, with w ~ N(loc, scale²) in the posterior."""
    model = pd.BayesianNet(nn.Linear(len(loc), 1, bias=False).to(dtype), likelihood=likelihood or pd.Gaussian(1.0))
    guide = pd.AutoMeanField(model, init=lambda name, shape: torch.tensor([loc], dtype=dtype), init_scale=scale)
    return model, guide


def test_an_arm_is_chosen_as_often_as_it_is_the_best(dtype: torch.dtype) -> None:
    """w₁ - w₀ ~ N(0.4, 2·0.5²), so arm 1 is best with probability Φ(0.4/√0.5) = 0.714; 250 calls, 5.5 errors."""
    model, guide = linear([0.1, 0.5], 0.5, dtype=dtype)
    arms, calls = torch.eye(2, dtype=dtype), 250
    chosen = torch.stack([pd.thompson(model, guide, arms) for _ in range(calls)])
    assert chosen.shape == (calls,)
    exact = float(stats.norm.cdf(0.4 / 0.5**0.5))
    assert abs(chosen.double().mean().item() - exact) < 5.5 * (exact * (1 - exact) / calls) ** 0.5


def test_all_contexts_share_one_draw() -> None:
    """The same two arms in 50 contexts: one draw gives one choice, and other calls give other ones."""
    model, guide = linear([0.0, 0.0], 1.0)
    contexts = torch.eye(2).expand(50, 2, 2)
    seen = set()
    for seed in range(20):
        chosen = pd.thompson(model, guide, contexts, seed=seed)
        assert chosen.shape == (50,)
        assert len(chosen.unique()) == 1
        assert torch.equal(chosen, pd.thompson(model, guide, contexts, seed=seed))
        seen.add(chosen[0].item())
    assert seen == {0, 1}


def test_each_context_gets_its_own_best_action() -> None:
    model, guide = linear([1.0, -1.0], 1e-6)
    contexts = torch.randn(30, 4, 2)
    exact = (contexts[..., 0] - contexts[..., 1]).argmax(-1)
    state = torch.get_rng_state()
    assert torch.equal(pd.thompson(model, guide, contexts, seed=1), exact)
    assert torch.equal(torch.get_rng_state(), state)
    coins = linear([1.0, -1.0], 1e-6, pd.Bernoulli())
    assert torch.equal(pd.thompson(*coins, contexts), exact)
    images = pd.BayesianNet(nn.Sequential(nn.Flatten(), nn.Linear(6, 1)))
    assert pd.thompson(images, pd.AutoDropout(images), torch.randn(5, 3, 2, 3)).shape == (5,)


def test_learning_finds_the_better_arm() -> None:
    """A conjugate bandit whose arms pay N(0, 1) and N(1, 1), over 200 rounds.

    Of 200,000 such bandits, played in numpy, 12 chose the better arm 80 times or less: fails with probability 6e-5.
    """
    total, count = torch.zeros(2), torch.zeros(2)
    model = pd.BayesianNet(nn.Linear(2, 1, bias=False))
    for _ in range(200):
        precision = 1 + count  # prior N(0, 1), noise of precision 1
        guide = _gaussian(total / precision, precision.rsqrt())
        arm = int(pd.thompson(model, guide, torch.eye(2)))
        total[arm] += torch.randn(()) + arm
        count[arm] += 1
    assert count[1] > 80


def _gaussian(loc: torch.Tensor, scale: torch.Tensor) -> Any:
    def guide(*args: Any) -> None:
        pyro.sample("weight", pyro.distributions.Normal(loc[None], scale[None]).to_event(2))

    return guide


@pytest.mark.usefixtures("unchecked_shapes")
def test_bad_input() -> None:
    model, guide = linear([0.0, 0.0], 1.0)
    for contexts in (torch.zeros(2), torch.zeros(0, 2)):
        with pytest.raises(pd.ShapeError, match=r"contexts must be \(N, A, features...\) or \(A, features\)"):
            pd.thompson(model, guide, contexts)
    with pytest.raises(pd.ShapeError, match=r"contexts must be .* got list"):
        pd.thompson(model, guide, [[0.0]])  # type: ignore[arg-type]
    wide = pd.BayesianNet(nn.Linear(2, 3))
    with pytest.raises(pd.ShapeError, match="model must have one target, the reward of an action; it has 3"):
        pd.thompson(wide, pd.AutoDropout(wide), torch.eye(2))
