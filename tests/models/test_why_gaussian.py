"""Why Gaussian guides lose: every combination has a row, starts are what they are called, and changes are compared."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import pyro_dropout as pd
from tests.models.test_scripts import FOLDER, loaded

script = loaded(FOLDER / "why_gaussian.py")


def test_the_starts_are_what_they_are_called() -> None:
    torch.manual_seed(0)
    x = torch.linspace(-1, 1, 30).unsqueeze(-1)
    problem = script.Problem(x, torch.sin(3 * x), x, x, 25.0, x[:0])
    quiet: Any = {"compile": False, "progress": False, "seed": 0}
    net, known = script.started(problem, SimpleNamespace(seed=0, width=4, steps=25), quiet)
    point = known["MAP"].mean()
    for name, starts in script.STARTS.items():
        for start in starts:
            mine = script.model(net, 25.0, learn=True)
            made = script.guide(name, mine, start, known)
            assert type(made) is (pd.AutoLowRank if name == "low rank" else pd.AutoMeanField)
            assert made.model is mine
            at = known["SWAG"].mean() if start == "SWAG" else point
            same = all(torch.allclose(value, at[site]) for site, value in made.mean().items())
            assert same == (start in ("MAP", "Laplace", "SWAG"))
            if start == "0.1":
                assert made.posterior("2.weight").stddev[0, 0].item() == pytest.approx(0.1, rel=1e-3)
            pd.fit(mine, made, problem.x, problem.y, steps=1, **quiet)  # each can be trained on
