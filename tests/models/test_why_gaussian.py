"""Why Gaussian guides lose: every combination has a row, starts are what they are called, and changes are compared."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from experiments.summaries import compared

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


def test_a_change_is_compared_with_all_else_equal_by_problem_and_seed() -> None:
    def scores(gain: float) -> dict[Any, Any]:
        keys = [("mean field", prior, "MAP", "1", how) for prior in script.PRIORS for how in script.READS]
        return {key: {"log p": gain * (key[1] == "learned") - (key[4] == "linearised")} for key in keys}

    found = {0: {"one": scores(1.0), "two": scores(0.01)}, 1: {"one": scores(-0.5), "two": scores(0)}}
    rows = compared(found, script.CHANGES, list(script.STARTS))
    assert [(row["change"], row["problem"], row["comparisons"]) for row in rows] == [
        ("a learned prior", "one", 2), ("a learned prior", "two", 2),
        ("linearised reading", "one", 2), ("linearised reading", "two", 2),
    ]  # fmt: skip
    assert list(rows[0].values())[3:] == ["2, 0", "0, 2", "1, -0.5"]
    assert list(rows[1].values())[3:] == ["0, 0", "0, 0", "0.01, 0"]
    assert list(rows[2].values())[3:] == ["0, 0", "2, 2", "-1, -1"]
