"""One bar for a whole comparison."""

from typing import Any

import pytest
import torch
from torch import nn

import pyro_dropout as pd
from pyro_dropout.comparison.trained import WholeBar

X = torch.linspace(-1, 1, 20).unsqueeze(-1)


@pytest.mark.deep
def test_a_comparison_shows_one_bar(capsys: pytest.CaptureFixture[str]) -> None:
    guides = {"dropout": "dropout", "ensemble": lambda model: pd.Ensemble(model, members=2)}
    how: Any = {"steps": 5, "seeds": 2, "samples": 10, "compile": False}
    pd.compare(pd.BayesianNet(nn.Linear(1, 1)), guides, (X, X), (X, X), **how)
    shown = capsys.readouterr().err
    assert "compare: " in shown
    assert "step/s" not in shown  # no bar of a training


def test_the_bar_ends_where_the_guides_end() -> None:
    whole = WholeBar(guides=2, steps=10, shown=False)
    with whole.part("a"):
        whole.update(5)
        assert whole.done == pytest.approx(0.5)
    assert whole.done == pytest.approx(1.0)
    with whole.part("b"):
        whole.update(99)
        assert whole.done == pytest.approx(2.0)
