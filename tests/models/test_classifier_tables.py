"""Tables of what a classifier's answers are worth, beside sums by hand."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from experiments.classifier_tables import cascade_table, detection_row, error_table, rejection_table
from torch import nn

import pyro_dropout as pd


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
    with pytest.raises(pd.RangeError, match="at least two seeds of each model, for an error; 'net' has 1"):
        error_table({"net": [(right, right)]}, y)


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
    with pytest.raises(pd.RangeError, match="shares of inputs kept"):
        rejection_table({"a": {"good": (uncertainty, mistake)}}, shares=(95,))


def test_a_cascade_asks_about_all_inputs_once() -> None:
    torch.manual_seed(0)
    nets = [pd.BayesianNet(nn.Linear(2, 3), likelihood=pd.Categorical()) for _ in range(2)]
    guides = [pd.AutoDropout(net, keep=0.9) for net in nets]
    x, y = torch.randn(40, 2), torch.arange(40) % 3
    asked: list[tuple[int, int]] = []

    def ask(k: int, inputs: torch.Tensor) -> pd.Prediction:
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
    with pytest.raises(pd.ShapeError, match="budgets"):
        cascade_table(lambda z: ask(0, z), lambda z: ask(1, z), x, y, budgets=())


def test_misled_inputs_are_told_apart_only_where_there_are_enough() -> None:
    calm, moved = {"u": torch.tensor([1.0, 2.0, 3.0])}, {"u": torch.tensor([0.0, 4.0, 5.0])}
    misled = torch.tensor([True, False, True])
    row = detection_row(calm, moved, misled, fewest=2)
    assert row == {"misled": 2, "u": 3.0, "AUROC, u": pytest.approx(2 / 3), "misled, u": 0.5}
    assert detection_row(calm, moved, torch.tensor([False, False, True]), fewest=1)["misled, u"] == 1.0
    assert detection_row(calm, moved, misled, fewest=3)["misled, u"] == 0.5
