"""Why Gaussian guides lose: the table has every combination, the starts are what they are called, the rules judge."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jaxtyping
import pytest
import torch

import pyro_dropout as pd
from tests.models.test_scripts import FOLDER, loaded

script = loaded(FOLDER / "why_gaussian.py")


@pytest.mark.deep  # the script runs whole
def test_the_table_has_every_combination(tmp_path: Path) -> None:
    jaxtyping.config.update("jaxtyping_disable", True)  # checking shapes takes longer than the run
    path = script.main(["--quick", "--quiet", "--priors", "fixed", "learned", "--out", str(tmp_path)])
    jaxtyping.config.update("jaxtyping_disable", False)
    record = json.loads(path.read_text("utf-8"))
    (table,) = record["tables"]
    keys = [tuple(row[title] for title in ("guide", "prior", "start", "T", "read")) for row in table["rows"]]
    # dropout; and read twice: Laplace, three starts that are not trained, and all that are
    assert len(keys) == len(set(keys)) == 1 + 2 * (1 + 3 + 2 * (4 + 5))
    for row in table["rows"]:
        assert len(row) == 5 + 2 + 3  # both problems, and a ratio where there is a gap
        assert all(math.isfinite(value) for value in list(row.values())[5:])
    assert len(record["claims"]) == 6  # all changes but those of T


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


def test_a_change_is_judged_with_all_else_equal() -> None:
    said: list[tuple[str, str, str]] = []
    experiment = SimpleNamespace(claim=lambda *claim: said.append(claim))

    def scores(gain: float) -> dict[Any, Any]:
        keys = [("mean field", prior, "MAP", "1", how) for prior in script.PRIORS for how in script.READS]
        return {key: {"log p": gain * (key[1] == "learned") - (key[4] == "linearised")} for key in keys}

    script.judge(experiment, {"one": scores(1.0), "two": scores(0.01)})
    assert [(claim.split(" raises")[0], verdict) for claim, verdict, _ in said] == [
        ("a learned prior", "holds in part"),
        ("linearised reading", "does not hold"),
    ]
    assert said[0][2] == "2 of 4 gain more than 0.02 nats a point; the median is 0.01"
