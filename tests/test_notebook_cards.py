"""What a notebook shows: small tables with true facts, and pictures."""

from typing import Any

import pytest
import torch
from torch import nn

import pyro_dropout as pd

X = torch.linspace(-1, 1, 12).unsqueeze(-1)
QUIET: Any = {"steps": 3, "compile": False, "progress": False}


def trained(make: Any = pd.AutoMeanField, likelihood: Any = None, y: Any = X) -> Any:
    outputs = 3 if isinstance(likelihood, pd.Categorical) else 1
    model = pd.BayesianNet(nn.Linear(1, outputs), likelihood=likelihood or pd.Gaussian(tau=4.0))
    guide = make(model)
    return model, guide, pd.fit(model, guide, X, y, **QUIET)


def test_a_guide_says_what_it_is_and_how_it_was_trained() -> None:
    model, guide, history = trained()
    assert repr(guide) == f"AutoMeanField(sites: 2, parameters: 4, trained: {history.summary})"
    assert "<th>parameters</th><td>4</td>" in guide._repr_html_()
    fresh = pd.AutoMeanField(model)
    assert repr(fresh) == "AutoMeanField(sites: 2, parameters: 4)"
    fresh.load_state_dict(guide.state_dict())
    assert "trained" not in repr(fresh)


@pytest.mark.parametrize("change", ["load", "train"])
def test_a_guide_forgets_its_training_when_its_parameters_change(change: str) -> None:
    model, guide, _ = trained()
    if change == "load":
        guide.load_state_dict(pd.AutoMeanField(model).state_dict())
    else:
        with torch.no_grad():
            next(guide.parameters()).add_(1.0)
    assert "trained" not in repr(guide)


def test_a_history_is_a_picture() -> None:
    assert "data:image/png;base64," in trained()[2]._repr_html_()


def test_a_comparison_is_a_table_of_scores_in_lines() -> None:
    model = pd.BayesianNet(nn.Linear(1, 1))
    found = pd.compare(model, {"a <b>": pd.AutoMeanField}, (X, X), (X, X), seeds=2, samples=20, **QUIET)
    assert repr(found).startswith("Comparison(a <b>; 12 training and 12 test points; ")
    page = found._repr_html_()
    assert "<th>a &lt;b&gt;</th>" in page
    assert "test log-lik." in page
