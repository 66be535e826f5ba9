"""The comparison of Pyro models that are not networks: which function is a model, its scores, its own parameters."""

import math
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
from torch import Tensor

import pyro_dropout as pd
from pyro_dropout.comparison.folder import write_folder
from tests.prediction.pyro_models import CASES, GROUPS, X, Y, coins, line, two_sites

pytestmark = pytest.mark.usefixtures("in_float64")

QUICK: Any = {"steps": 60, "lr": 0.1, "samples": 40, "seeds": 1, "compile": False, "progress": False}


@pytest.mark.deep
def test_a_line_is_judged_by_its_site() -> None:
    guides = {"normal": AutoNormal, "full": AutoMultivariateNormal, "mean field": pd.AutoMeanField}
    found = pd.compare(line, guides, (X, Y), (X + 0.05, Y + 0.07), **{**QUICK, "seeds": 2})
    assert [row.note for row in found.rows] == ["", "", ""]
    for row in found.rows:
        assert {"log_lik", "rmse", "crps", "coverage", "ece", "elbo", "khat", "objective"} <= set(row.scores)
        assert row.scores["rmse"].mean < 0.6
        assert len(row.trained) == 2
        answer = pd.predict(*row.trained[0], X + 0.05, samples=40, seed=0)
        assert row.scores["log_lik"].values[0] == pytest.approx(float(answer.log_prob(Y + 0.07).mean()), abs=1e-9)
    plt.close(found.plot())


@pytest.mark.deep
def test_parameters_of_a_model_are_trained_for_each_row() -> None:
    def learned(x: Tensor, y: Tensor | None = None) -> None:
        scale = pyro.param("scale", torch.tensor(3.0), constraint=dist.constraints.positive)
        slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)):
            pyro.sample("obs", dist.Normal(slope * x, scale), obs=y)

    short = pd.compare(learned, {"a": AutoNormal}, (X, Y), (X, Y), **{**QUICK, "steps": 1})
    both = pd.compare(learned, {"a": AutoNormal, "b": AutoNormal}, (X, Y), (X, Y), **QUICK)
    first, second = (pd.predict(*row.trained[0], X, samples=5).aleatoric.mean().item() for row in both.rows)
    assert first == pytest.approx(second, rel=0.1)
    assert pd.predict(*short.rows[0].trained[0], X, samples=5).aleatoric.mean() > 2 * first
    assert len(pyro.get_param_store()) == 0


@pytest.mark.deep
def test_classes_counts_and_several_sites() -> None:
    found = pd.compare(coins, [AutoNormal], CASES["coins"].args, CASES["coins"].args, **QUICK)
    assert {"accuracy", "brier", "ece", "log_lik"} <= set(found.columns)
    assert "rmse" not in found.columns
    plt.close(found.plot())
    counts = CASES["counts"]
    data = {"x": X, **counts.kwargs}
    found = pd.compare(counts.make(), [AutoNormal], data, data, **QUICK)
    assert found.rows[0].note == ""
    assert {"rmse", "crps", "coverage"} <= set(found.columns)
    plt.close(found.plot())
    found = pd.compare(two_sites, [AutoNormal], (X, Y, -Y), (X, Y, -Y), **QUICK)
    assert found.rows[0].note == ""
    assert set(found.columns) & {"rmse", "crps", "log_lik", "elbo"} == {"log_lik", "elbo"}
    assert found.rows[0].answer is None
    assert math.isfinite(found.rows[0].scores["log_lik"].mean)


@pytest.mark.deep
def test_every_posterior_has_a_file_of_its_own(tmp_path: Path) -> None:
    guides = dict.fromkeys(["a b", "a-b", "A/B"], pd.AutoMeanField)
    found = pd.compare(line, guides, (X, Y), (X, Y), **{**QUICK, "steps": 1, "seeds": 1})
    files, complaints = write_folder(found, tmp_path / "all", 30, 0)
    assert complaints == []
    assert {"posteriors/a-b.nc", "posteriors/a-b-2.nc", "posteriors/A-B-3.nc"} <= set(files)


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore:chains disagree")
def test_the_sampler_is_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    from pyro_dropout.comparison import compare as comparison

    quick: Any = {"samples": 60, "warmup": 60, "chains": 2, "compile": False}
    monkeypatch.setattr(comparison, "nuts", lambda *args, **given: pd.nuts(*args, **{**given, **quick}))
    found = pd.compare(line, [AutoNormal], (X, Y), (X, Y), reference="nuts", **QUICK)
    assert found.rows[0].name == "reference"
    assert found.rows[1].scores["d_w1"].mean < 0.3


def test_what_cannot_be_asked_is_a_row_that_says_so() -> None:
    schools = CASES["schools"]
    found = pd.compare(schools.make(), [AutoNormal], schools.args, (X[:3] + 2, Y[:3]), **QUICK)
    assert "not scored: ShapeError: site 'theta' has shape (12,) in the posterior" in found.rows[0].note


def test_data_that_do_not_suit_the_model_are_told_before_training() -> None:
    with pytest.raises(
        pd.errors.PyroDropoutError, match=r"test: model must be a Pyro model that takes the arguments given"
    ):
        pd.compare(line, [AutoNormal], (X, Y), (X, Y, GROUPS), **QUICK)
    with pytest.raises(pd.errors.PyroDropoutError, match=r"same sites; got \['first', 'second'\] and \['first'\]"):
        pd.compare(two_sites, [AutoNormal], (X, Y, Y), (X, Y), **QUICK)
