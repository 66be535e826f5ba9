"""A cascade answers with the right model, asks the strong one no more than needed, and adds up its price."""

import pytest
import torch
from torch import Tensor

import pyro_dropout as pd
from tests.oracles.made_predictions import made

F64 = torch.float64


class Asked:
    """A model whose logits or means are a function of x, and which remembers what it was asked."""

    def __init__(self, likelihood: pd.Likelihood, noise: float, outputs: int = 1) -> None:
        self.likelihood, self.noise, self.outputs, self.seen = likelihood, noise, outputs, Tensor()

    def __call__(self, x: Tensor) -> pd.Prediction:
        self.seen = x
        f = torch.cat([x, *[torch.zeros_like(x)] * (self.outputs - 1)], -1)
        return made(f + self.noise * x * torch.tensor([-1.0, 1.0], dtype=x.dtype).reshape(2, 1, 1), self.likelihood)


def test_regression(dtype: torch.dtype) -> None:
    weak, strong = Asked(pd.Gaussian(4.0), 1.0), Asked(pd.Gaussian(400.0), 0.0)
    x = torch.tensor([[3.0], [1.0], [-2.0], [0.5]], dtype=dtype)  # the weak one is unsure in proportion to |x|
    result = pd.cascade(weak, strong, x, budget=0.5, costs=(2.0, 7.0))
    assert result.deferred.tolist() == [True, False, True, False]
    assert torch.equal(strong.seen, x[[0, 2]])
    assert result.cost == 4 * 2 + 2 * 7
    torch.testing.assert_close(result.uncertainty, (x.square() + 0.25).sqrt().squeeze(-1))
    assert result.mean.dtype == dtype
    y = x + torch.tensor([[1.0], [2.0], [3.0], [4.0]], dtype=dtype)
    assert result.rmse(y) == pytest.approx(7.5**0.5, rel=1e-6)
    each = torch.where(result.deferred, strong(x).log_prob(y), weak(x).log_prob(y))
    torch.testing.assert_close(result.log_prob(y), each)
    with pytest.raises(pd.PyroDropoutError, match=r"accuracy\(y\) is for classes"):
        result.accuracy(y)
    with pytest.raises(pd.PyroDropoutError, match="probs is for classes"):
        result.probs  # noqa: B018


def test_the_strong_model_mends_what_the_weak_one_does_not_know() -> None:
    """Weak logits say nothing of half of the inputs, and say so; strong ones are right on all."""
    x = torch.tensor([[4.0], [0.0], [-4.0], [0.01]])
    y = torch.tensor([0, 1, 1, 1])
    weak = Asked(pd.Categorical(), 0.0, outputs=2)

    def strong(x: Tensor) -> pd.Prediction:
        labels = {4.0: 0, 0.0: 1, -4.0: 1, 0.01: 1}
        own = torch.tensor([labels[round(v, 2)] for v in x[:, 0].tolist()])
        return made(9.0 * torch.nn.functional.one_hot(own, 2).float().unsqueeze(0), pd.Categorical())

    result = pd.cascade(weak, strong, x, threshold=0.5, uncertainty="entropy")
    assert result.deferred.tolist() == [False, True, False, True]
    assert result.accuracy(y) == 1.0
    assert result.probs.shape == (4, 2)
    alone = pd.cascade(weak, strong, x, threshold=10.0)
    assert alone.accuracy(y) == 0.5
    assert torch.equal(alone.log_prob(y), weak(x).log_prob(y))
    with pytest.raises(pd.PyroDropoutError, match="rmse"):
        result.rmse(y)


def test_a_strong_model_that_is_not_needed_is_not_called() -> None:
    def never(x: Tensor) -> pd.Prediction:
        raise AssertionError

    result = pd.cascade(Asked(pd.Gaussian(1.0), 0.1), never, torch.ones(3, 1), budget=0.0)
    assert result.strong is None
    assert result.cost == 3.0


def test_uncertainties() -> None:
    x = torch.tensor([[1.0], [3.0]])
    numbers = Asked(pd.Gaussian(1.0), 1.0, outputs=2)
    answer = numbers(x)
    options = {"std": answer.variance.sum(-1).sqrt(), "epistemic": answer.epistemic.sum(-1).sqrt()}
    for kind, exact in options.items():
        torch.testing.assert_close(pd.cascade(numbers, numbers, x, budget=0, uncertainty=kind).uncertainty, exact)
    own = pd.cascade(numbers, numbers, x, budget=0, uncertainty=lambda p: p.epistemic[:, 1])
    assert torch.equal(own.uncertainty, answer.epistemic[:, 1])
    coins = Asked(pd.Bernoulli(), 1.0, outputs=2)
    for kind in ("entropy", "mutual_information", "variation_ratio"):
        exact = getattr(coins(x), kind).sum(-1)
        assert torch.equal(pd.cascade(coins, coins, x, budget=0, uncertainty=kind).uncertainty, exact)
    both = pd.cascade(coins, coins, x, budget=0.5)
    assert both.accuracy(torch.tensor([[1, 0], [1, 1]])) == 0.75  # a logit of 0 is a no


@pytest.mark.usefixtures("unchecked_shapes")
def test_bad_input() -> None:
    model, x = Asked(pd.Gaussian(1.0), 1.0), torch.ones(3, 1)
    with pytest.raises(pd.PyroDropoutError, match="exactly one of budget and threshold"):
        pd.cascade(model, model, x)
    with pytest.raises(pd.ShapeError, match="x must hold at least one input"):
        pd.cascade(model, model, x[:0], budget=0.5)
    with pytest.raises(pd.ShapeError, match="costs must be two numbers"):
        pd.cascade(model, model, x, budget=0.5, costs=(1.0,))  # type: ignore[arg-type]
    with pytest.raises(pd.RangeError, match="costs must be zero or positive"):
        pd.cascade(model, model, x, budget=0.5, costs=(1.0, -1.0))
    with pytest.raises(pd.RangeError, match="uncertainty must be 'auto', 'entropy'"):
        pd.cascade(model, model, x, budget=0.5, uncertainty="doubt")
    with pytest.raises(pd.PyroDropoutError, match="entropy is for classes"):
        pd.cascade(model, model, x, budget=0.5, uncertainty="entropy")
    with pytest.raises(pd.ShapeError, match="for each of 3 inputs; got 2"):
        pd.cascade(model, model, x, budget=0.5, uncertainty=lambda p: torch.ones(2))
    with pytest.raises(pd.PyroDropoutError, match="weak must be a function of x that returns a Prediction of all 3"):
        pd.cascade(lambda x: x, model, x, budget=0.5)  # type: ignore[arg-type, return-value]
    with pytest.raises(pd.ShapeError, match="weak and strong must predict the same targets"):
        pd.cascade(model, Asked(pd.Gaussian(1.0), 1.0, outputs=2), x, budget=0.5)
