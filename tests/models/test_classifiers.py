"""What is said of classifiers: areas beside counts of pairs, gradients beside sums, tables by hand, odd images."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from experiments.classifiers import (
    auroc,
    cascade_table,
    envelopes_overlap,
    error_table,
    loss_gradient,
    rejection_table,
    turned,
)
from experiments.odd_images import detection_table, odd_images
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score
from torch import nn

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


def test_a_quarter_turn_is_that_of_torch(dtype: torch.dtype) -> None:
    images = torch.rand(2, 3, 28, 28, generator=torch.Generator().manual_seed(0), dtype=dtype)
    found = turned(images, torch.tensor([0.0, 90.0, 180.0]))
    for k, turns in enumerate((0, 1, 2)):
        torch.testing.assert_close(found[:, k], images.rot90(turns, (2, 3)), atol=1e-4, rtol=0)


def test_envelopes_of_the_two_largest_inputs() -> None:
    spread = torch.linspace(-1, 1, 101)[:, None]
    f = torch.stack([3 + spread, spread, -5 + 0 * spread], -1)  # [2, 4] against [-1, 1]; the third never counts
    near = torch.stack([1.5 + spread, spread, 9 * spread - 20], -1)
    assert envelopes_overlap(torch.cat([f, near], 1)).tolist() == [False, True]
    assert envelopes_overlap(near, level=0.5).tolist() == [False]  # [1, 2] against [-0.5, 0.5]


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


def test_a_cascade_asks_about_all_inputs_once() -> None:
    torch.manual_seed(0)
    nets = [pd.BayesianNet(nn.Linear(2, 3), likelihood=pd.Categorical()) for _ in range(2)]
    guides = [pd.AutoDropout(net, keep=0.9) for net in nets]
    x, y = torch.randn(40, 2), torch.arange(40) % 3
    asked: list[tuple[int, int]] = []

    def ask(k: int, inputs: torch.Tensor) -> pd.prediction.Prediction:
        asked.append((k, len(inputs)))
        return pd.predict(nets[k], guides[k], inputs, samples=20, seed=0)

    rows, figure = cascade_table(lambda z: ask(0, z), lambda z: ask(1, z), x, y, budgets=(0.0, 0.5, 1.0), costs=(1, 4))
    assert asked == [(0, 40), (1, 20), (1, 20), (1, 40)]
    assert [row["cost"] for row in rows] == pytest.approx([0.25, 0.75, 1.25])
    alone = [(pd.predict(n, g, x, samples=20, seed=0).probs.argmax(-1) != y) for n, g in zip(nets, guides, strict=True)]
    for row, errors in ((rows[0], alone[0]), (rows[-1], alone[1])):
        expected = 100 * errors.double().mean().item()
        assert row["error % by entropy"] == pytest.approx(expected)
        assert row["error % by chance"] == pytest.approx(expected)
    assert figure.axes[0].get_xscale() == "log"


def test_every_image_keeps_its_pixels_and_is_shuffled_in_its_own_way() -> None:
    images = torch.arange(2 * 28 * 28.0).reshape(2, 1, 28, 28)
    images[1] = images[0]
    odd = odd_images(images, seed=3)
    for kind, each in odd.items():
        assert torch.equal(each.flatten(1).sort().values, images.flatten(1).sort().values), kind
        assert not torch.equal(each, images)
        assert torch.equal(each[0], each[1]) == (kind == "turned by 90°")
    assert torch.equal(odd["turned by 90°"][0, 0, 27], images[0, 0, :, 0])  # the first column is the last row
    whole = {tuple(part.flatten().tolist()) for row in images[0, 0].split(7, 0) for part in row.split(7, 1)}
    found = {
        tuple(part.flatten().tolist()) for row in odd["patches shuffled"][0, 0].split(7) for part in row.split(7, 1)
    }
    assert whole == found
    assert torch.equal(odd_images(images, seed=3)["pixels shuffled"], odd["pixels shuffled"])


def answer_with(probs: torch.Tensor, information: torch.Tensor | None = None) -> Any:
    entropy = -(probs * probs.log()).sum(-1)
    own = torch.zeros(len(probs)) if information is None else information
    return SimpleNamespace(probs=probs, entropy=entropy, mutual_information=own)


def sure(of_first: list[float]) -> torch.Tensor:
    return torch.tensor([[p, 1 - p] for p in of_first])


def test_areas_by_hand_and_no_information_in_a_single_network() -> None:
    digits = {"one": [answer_with(sure([0.9, 0.8])), answer_with(sure([0.9, 0.9]))]}
    odd = {"noise": {"one": [answer_with(sure([0.85, 0.6])), answer_with(sure([0.95, 0.95]))]}}
    (row,) = detection_table(digits, odd)  # without mutual information there is no row for it
    assert row["noise"] == pytest.approx((0.75 + 0.0) / 2)
    assert row["± noise"] == pytest.approx(0.375)  # the two runs are 0.75 apart: more than over images
    digits["two"] = [answer_with(sure([0.9, 0.8]), torch.tensor([0.1, 0.2]))]
    odd["noise"]["two"] = [answer_with(sure([0.9, 0.8]), torch.tensor([0.3, 0.4]))]
    assert [row["noise"] for row in detection_table(digits, odd)[1:]] == [0.5, 1.0]
