"""One bar for a whole comparison."""

from typing import Any

import pytest
import torch
from torch import nn

import pyro_dropout as pd

X = torch.linspace(-1, 1, 20).unsqueeze(-1)


@pytest.mark.deep
def test_a_comparison_shows_one_bar(capsys: pytest.CaptureFixture[str]) -> None:
    guides = {"dropout": "dropout", "ensemble": lambda model: pd.Ensemble(model, members=2)}
    how: Any = {"steps": 5, "seeds": 2, "samples": 10, "compile": False}
    pd.compare(pd.BayesianNet(nn.Linear(1, 1)), guides, (X, X), (X, X), **how)
    shown = capsys.readouterr().err
    assert "compare: " in shown
    assert "step/s" not in shown  # no bar of a training
