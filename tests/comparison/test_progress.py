"""One bar for a whole comparison, and the estimate before it."""

from typing import Any

import pytest
import torch
from torch import nn

import pyro_dropout as pd
from pyro_dropout.comparison import progress
from pyro_dropout.comparison.progress import Share, WholeBar, estimate
from pyro_dropout.generative.model_call import ModelCall

X = torch.linspace(-1, 1, 20).unsqueeze(-1)
OPTIONS: Any = {"steps": 50, "lr": 0.01, "batch_size": None, "loss": None, "compile": False}


def build(seed: int) -> Any:
    torch.manual_seed(seed)
    model = pd.BayesianNet(nn.Linear(1, 1))
    return model, pd.AutoMeanField(model)


@pytest.mark.deep
def test_a_comparison_says_how_long_it_takes_and_shows_one_bar(capsys: pytest.CaptureFixture[str]) -> None:
    guides = {"dropout": "dropout", "ensemble": lambda model: pd.Ensemble(model, members=2)}
    how: Any = {"steps": 5, "seeds": 2, "samples": 10, "compile": False}
    told = pd.compare(build(0)[0], guides, (X, X), (X, X), **how)
    shown = capsys.readouterr().err
    assert "2 guides, 2 seeds each: about " in shown
    assert "step/s" not in shown  # no bar of a training
    quiet = pd.compare(build(0)[0], guides, (X, X), (X, X), progress=False, **how)
    assert capsys.readouterr().err == ""
    # Timing a few steps first changes no result.
    assert [told.cell(row, "log_lik") for row in told.rows] == [quiet.cell(row, "log_lik") for row in quiet.rows]


def test_the_bar_ends_where_the_shares_end() -> None:
    whole = WholeBar({"a": Share(10.0), "b": Share(30.0, runs=3)}, steps=10, shown=False)
    with whole.part("a"):
        whole.update(5)
        assert whole.done == pytest.approx(5.0)
    assert whole.done == pytest.approx(10.0)
    with whole.part("b"):
        whole.update(15)
        assert whole.done == pytest.approx(25.0)
        whole.update(99)
        assert whole.done == pytest.approx(40.0)


def test_a_guide_that_fails_costs_nothing_and_random_numbers_stay() -> None:
    def broken(seed: int) -> Any:
        raise RuntimeError("no")

    before = torch.random.get_rng_state()
    assert estimate(broken, [0], ModelCall(None, (X, X)), OPTIONS, fleet=True).seconds == 0.0
    assert estimate(build, [0], ModelCall(None, (X, X)), OPTIONS, fleet=True).seconds > 0.0
    assert torch.equal(before, torch.random.get_rng_state())


def test_the_estimate_grows_with_steps_and_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(*_: Any, **__: Any) -> pd.History:
        return pd.History(torch.zeros(6), steps=6, seconds=0.6)

    monkeypatch.setattr(progress, "fit", timed)
    monkeypatch.setattr(progress.time, "perf_counter", iter([0.0, 1.0] * 3).__next__)
    call = ModelCall(None, (X, X))
    first = estimate(build, [0], call, OPTIONS, fleet=True).seconds
    longer = estimate(build, [0], call, {**OPTIONS, "steps": 1050}, fleet=True).seconds
    assert longer - first == pytest.approx(100.0)
    apart = estimate(build, [0, 1], call, OPTIONS, fleet=False)
    assert apart.runs == 2
    assert apart.seconds > first
