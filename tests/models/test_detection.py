"""Whether odd inputs are noticed: the area under the ROC curve beside a count of pairs, and gradients beside sums."""

import math

import pytest
import torch
from experiments.detection import auroc, envelopes_overlap, loss_gradient, turned
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

import pyro_dropout as pd
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


def test_the_error_is_the_spread_over_new_inputs(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    odd, ordinary = (torch.randn(1000, count, generator=generator, dtype=dtype) for count in (60, 40))
    found = [auroc(1 + a, b) for a, b in zip(odd, ordinary, strict=True)]
    values, errors = (torch.tensor([each[k] for each in found]) for k in (0, 1))
    expected = torch.distributions.Normal(0, 1).cdf(torch.tensor(0.5**0.5)).item()  # P(1 + a > b)
    # 1,000 areas with a spread of 0.045: their mean is known to 0.0015, their spread to 2.3 %; four times that.
    assert values.mean().item() == pytest.approx(expected, abs=0.006)
    assert errors.square().mean().sqrt().item() == pytest.approx(values.std().item(), rel=0.09)


@pytest.mark.parametrize(
    ("odd", "message"),
    [(torch.tensor([]), "odd must have one number for each input"), (torch.tensor([1.0, math.nan]), "odd")],
)
def test_scores_must_be_numbers(odd: torch.Tensor, message: str) -> None:
    with pytest.raises(pd.PyroDropoutError, match=message):
        auroc(odd, torch.ones(3))
    with pytest.raises(pd.PyroDropoutError, match=message.replace("odd", "ordinary")):
        auroc(torch.ones(3), odd)


def test_the_gradient_at_the_mean_is_that_of_the_softmax(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = pd.BayesianNet(torch.nn.Linear(3, 4), likelihood=pd.Categorical()).to(dtype)
    guide = pd.AutoDropout(model, keep=0.5)
    x, y = torch.randn(5, 3, dtype=dtype), torch.tensor([0, 1, 2, 3, 0])
    found = loss_gradient(model, guide, x, y)
    w, b = guide.mean()["weight"].detach(), guide.mean()["bias"].detach()
    by_hand = ((x @ w.T + b).softmax(-1) - torch.nn.functional.one_hot(y, 4)) @ w
    torch.testing.assert_close(found, by_hand.to(dtype))
    assert not x.requires_grad


def test_the_gradient_over_draws_is_their_mean() -> None:
    """y ~ N(w·x, 1): the gradient is w(w·x - y), whose mean over two independent coins is a sum of four terms."""
    model = pd.BayesianNet(torch.nn.Linear(2, 1, bias=False))
    guide = pd.AutoDropout(model, keep=0.5)
    loc = guide.posterior("weight").locs[0].detach()
    x, y = torch.tensor([[1.0, -2.0]]), torch.tensor([[0.3]])
    draws = [loc * torch.tensor(kept) for kept in ([0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0])]
    expected = torch.stack([w * (x @ w.T - y) for w in draws]).mean(0)
    torch.manual_seed(0)
    found = loss_gradient(model, guide, x, y, draws=40_000)
    # One term is at most some units large, so the mean of 40,000 is known to better than 0.02.
    torch.testing.assert_close(found, expected, atol=0.08, rtol=0)
    single = loss_gradient(model, guide, x.repeat(50, 1), y.repeat(50, 1), draws=1)
    assert 2 <= len(single.unique(dim=0)) <= 4  # every point has a draw of its own, and there are four


def test_what_cannot_be_attacked_is_refused() -> None:
    model = pd.BayesianNet(torch.nn.Linear(2, 3), likelihood=pd.Categorical())
    guide = pd.AutoDropout(model)
    with pytest.raises(pd.PyroDropoutError, match="draws"):
        loss_gradient(model, guide, torch.zeros(4, 2), torch.zeros(4, dtype=torch.long), draws=0)
    with pytest.raises(pd.PyroDropoutError, match="x and y"):
        loss_gradient(model, guide, torch.zeros(4, 2), torch.zeros(3, dtype=torch.long))
    with pytest.raises(pd.PyroDropoutError, match="likelihood"):
        loss_gradient(lambda x: x, guide, torch.zeros(4, 2), torch.zeros(4, dtype=torch.long))


def test_a_quarter_turn_is_that_of_torch(dtype: torch.dtype) -> None:
    images = torch.rand(2, 3, 28, 28, generator=torch.Generator().manual_seed(0), dtype=dtype)
    found = turned(images, torch.tensor([0.0, 90.0, 180.0]))
    for k, turns in enumerate((0, 1, 2)):
        torch.testing.assert_close(found[:, k], images.rot90(turns, (2, 3)), atol=1e-4, rtol=0)


def test_an_oblong_image_turns_without_being_squeezed() -> None:
    image = torch.zeros(1, 1, 9, 15)
    image[..., 4, 4:11] = 1  # a bar of seven pixels through the centre
    upright = turned(image, torch.tensor([90.0]))[0, 0, 0]
    expected = torch.zeros(9, 15)
    expected[1:8, 7] = 1
    torch.testing.assert_close(upright, expected, atol=1e-4, rtol=0)


def test_envelopes_of_the_two_largest_inputs() -> None:
    spread = torch.linspace(-1, 1, 101)[:, None]
    f = torch.stack([3 + spread, spread, -5 + 0 * spread], -1)  # [2, 4] against [-1, 1]; the third never counts
    near = torch.stack([1.5 + spread, spread, 9 * spread - 20], -1)
    assert envelopes_overlap(torch.cat([f, near], 1)).tolist() == [False, True]
    assert envelopes_overlap(near, level=0.5).tolist() == [False]  # [1, 2] against [-0.5, 0.5]
    with pytest.raises(pd.RangeError, match="level"):
        envelopes_overlap(f, level=95)
    with pytest.raises(pd.ShapeError, match="images must have shape"):
        turned(f, torch.tensor([90.0]))
