"""The comparison: scores against the answers themselves, failures as rows, and what is kept for the page."""

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoNormal
from torch import Tensor, nn

import pyro_dropout as pd
from pyro_dropout.comparison import compare as module
from pyro_dropout.comparison.exams import between, outside
from tests.contracts.student_t import HeavyTails

QUICK: Any = {"steps": 150, "lr": 0.02, "samples": 100, "compile": False, "progress": False}


def line(count: int = 40) -> tuple[Tensor, Tensor]:
    x = torch.linspace(-1, 1, count).unsqueeze(-1)
    return x, 2 * x + 0.1 * torch.randn(count, 1)


def linear_model(tau: float = 100.0) -> Any:
    return pd.BayesianNet(nn.Linear(1, 1), likelihood=pd.Gaussian(tau=tau))


# --- scores -----------------------------------------------------------------------------------------------------------


@pytest.mark.deep
def test_guides_can_be_read_linearised() -> None:
    train, test = line(), line()
    guides = {"drawn": pd.AutoMeanField, "straight": pd.AutoMeanField}
    found = pd.compare(linear_model(), guides, train, test, seeds=1, method={"straight": "linearised"}, **QUICK)
    answers = found.answers
    assert [type(answers[name]).__name__ for name in guides] == ["Prediction", "LinearisedPrediction"]
    row = found.rows[1]
    assert row.scores["log_lik"].values == pytest.approx([float(answers["straight"].log_prob(test[1]).mean())])
    assert {"crps", "coverage", "between", "khat"} <= set(row.scores)
    assert row.curve is not None
    assert found.settings["method"] == {"straight": "linearised"}
    with pytest.raises(pd.errors.PyroDropoutError, match="a name in method must be"):
        pd.compare(linear_model(), guides, train, test, method={"other": "linearised"}, **QUICK)
    with pytest.raises(pd.errors.PyroDropoutError, match="method must be 'mc' or 'linearised'"):
        pd.compare(linear_model(), guides, train, test, method="standard", **QUICK)


@pytest.mark.deep
def test_scores_are_those_of_the_trained_guides() -> None:
    train, test = line(), line()
    guides = {"mean field": lambda m: pd.AutoMeanField(m, init_scale=0.05), "dropout": pd.AutoDropout}
    found = pd.compare(linear_model(), guides, train, test, seeds=[3, 8], **{**QUICK, "steps": 800})
    assert [row.name for row in found.rows] == ["mean field", "dropout"]
    row = found.rows[0]
    assert len(row.trained) == 2
    assert row.note == ""
    answers = [pd.predict(m, g, test[0], samples=100, shared=True, seed=0) for m, g in row.trained]
    rmse = [float((a.mean - test[1]).square().mean().sqrt()) for a in answers]
    assert row.scores["rmse"].values == pytest.approx(rmse)
    assert row.scores["log_lik"].values == pytest.approx([float(a.log_prob(test[1]).mean()) for a in answers])
    assert row.scores["rmse"].error == pytest.approx(np.std(row.scores["rmse"].values, ddof=1) / math.sqrt(2))
    assert row.scores["parameters"].mean == 4
    # a linear model: uncertainty grows with the distance from the middle, threefold at three times the distance
    assert row.scores["outside"].mean > 1.5
    exact = pd.references.conjugate(linear_model(), *train)
    assert row.scores["elbo"].mean <= exact.log_evidence + 3
    assert row.scores["elbo"].mean == pytest.approx(float(exact.log_evidence), abs=3)


@pytest.mark.deep
@pytest.mark.parametrize("device", ["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
def test_what_is_asked_lies_where_the_data_lie(device: str) -> None:
    """Every score, the curve and the distance to a reference, on every device that there is."""
    train, test = (tuple(part.to(device) for part in line()) for _ in range(2))
    exact = pd.references.conjugate(linear_model().to(device), *train)
    model = linear_model().to(device)
    found = pd.compare(model, [pd.AutoMeanField], train, test, reference=exact, seeds=1, **QUICK)
    row = found.rows[1]
    assert row.note == ""
    assert {"between", "outside", "coverage", "crps", "khat", "d_w1"} <= set(row.scores)
    assert found.settings["reference"] == "GaussianPosterior"
    assert row.curve is not None
    assert (between(train[0]).device, outside(train[0]).device) == (train[0].device, train[0].device)
    found.plot()


def test_what_dropout_cannot_say_is_said() -> None:
    found = pd.compare(linear_model(), [pd.AutoDropout], line(), line(), seeds=1, **QUICK)
    row = found.rows[0]
    for key in ("elbo", "khat", "gap"):
        assert found.cell(row, key) == "undefined, σ = 0"
    assert math.isfinite(row.scores["objective"].mean)
    assert row.scores["rmse"].error is None


@pytest.mark.deep
@pytest.mark.parametrize("likelihood", [HeavyTails(), pd.Poisson()])
def test_numbers_that_are_not_normal_have_no_distance_to_a_reference(likelihood: pd.generative.Likelihood) -> None:
    x = torch.randn(20, 2)
    model = pd.BayesianNet(nn.Linear(2, 1), likelihood=likelihood)
    options = {**QUICK, "steps": 3, "reference": pd.AutoMeanField(model)}
    found = pd.compare(model, [pd.AutoMeanField], (x, x[:, :1] ** 2 // 1), (x, x[:, :1] ** 2 // 1), seeds=1, **options)
    assert [row.note for row in found.rows] == ["", ""]
    assert {"log_lik", "rmse"} <= set(found.columns)
    assert not {"d_mean", "d_std", "d_w1"} & set(found.columns)


# --- failures ---------------------------------------------------------------------------------------------------------


class Diverging(pd.AutoMeanField):
    """Starts where nothing is a number."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(torch.nan)


def refuse(model: Any) -> Any:
    raise pd.errors.RangeError("keep must lie in (0, 1]; got 7.")


@pytest.mark.parametrize("bad", [Diverging, refuse])
@pytest.mark.deep
def test_a_guide_that_fails_is_a_row_that_says_so(bad: Any, tmp_path: Path) -> None:
    found = pd.compare(linear_model(), {"good": pd.AutoMeanField, "bad": bad}, line(), line(), seeds=2, **QUICK)
    good, other = found.rows
    assert good.scores["rmse"].values
    assert other.scores == {}
    assert re.search(r"^diverged: the loss is nan at step 1|^failed: RangeError: keep", other.note)
    assert found.cell(other, "rmse") == "failed"
    assert other.note in str(found)
    assert found.ranking == ["good"]
    page = found.to_html(tmp_path / "page.html").read_text("utf-8")
    assert "keep must lie" in page or "diverged" in page


@pytest.mark.deep
def test_one_seed_that_diverges_leaves_the_others() -> None:
    def guide(model: Any) -> Any:
        made = pd.AutoMeanField(model)
        if torch.initial_seed() == 1:
            with torch.no_grad():
                next(made.parameters()).fill_(torch.nan)
        return made

    found = pd.compare(linear_model(), {"sometimes": guide}, line(), line(), seeds=3, **QUICK)
    assert found.rows[0].note == "diverged with 1 of 3 seeds; the others are scored."
    assert len(found.rows[0].scores["rmse"].values) == 2


@pytest.mark.deep
def test_what_cannot_be_a_fleet_is_trained_one_by_one() -> None:
    net = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1))
    found = pd.compare(pd.BayesianNet(net), [pd.AutoDropout], line(), line(), seeds=2, **QUICK)
    assert found.rows[0].note == ""
    assert len(found.rows[0].scores["rmse"].values) == 2


@pytest.mark.deep
@pytest.mark.parametrize("kind", ["module", "function"])
def test_seeds_trained_one_by_one_do_not_share_parameters(kind: str) -> None:
    """Guides that are not of this package keep their parameters in Pyro's store, under the same names for each seed."""

    def by_hand(model: Any) -> Any:
        def guide(*args: Any) -> None:
            for name, weight in model.net.named_parameters():
                loc = pyro.param(f"loc of {name}", lambda shape=weight.shape: torch.randn(shape))
                pyro.sample(name, dist.Normal(loc, 0.1).to_event(loc.dim()))

        return guide

    pyro.param("mine", torch.ones(()))
    make = AutoNormal if kind == "module" else by_hand
    options = {**QUICK, "steps": 3, "seeds": 2}
    (row,) = pd.compare(linear_model(), {"theirs": make}, line(), line(), **options).rows
    assert row.note == ""
    one, two = row.scores["rmse"].values
    assert one != two
    again = [pd.predict(*pair, line()[0], samples=20, shared=True, seed=0).mean for pair in row.trained]
    assert not torch.allclose(*again)
    assert list(pyro.get_param_store().keys()) == ["mine"]


# --- what is given ----------------------------------------------------------------------------------------------------


def test_seeds_start_from_weights_of_their_own_and_leave_the_model() -> None:
    model = linear_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = pd.compare(model, [pd.AutoMeanField], line(), line(), seeds=2, **{**QUICK, "steps": 1})
    one, two = (pair[1].posterior("weight").mean for pair in found.rows[0].trained)
    assert not torch.equal(one, two)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


# --- cells and probes -------------------------------------------------------------------------------------------------


def test_points_between_lie_in_the_hole_and_points_outside_do_not() -> None:
    x = torch.cat([torch.linspace(0, 1, 50), torch.linspace(3, 4, 50)]).unsqueeze(-1)
    found = between(x)
    assert ((found > 1.2) & (found < 2.8)).all()
    far = outside(x)
    assert ((far < -2.5) | (far > 6.5)).all()
    ring = torch.randn(400, 2)
    ring = ring / ring.norm(dim=1, keepdim=True)
    assert between(ring).norm(dim=1).max() < 0.6
    assert torch.allclose(outside(ring).norm(dim=1), torch.tensor(3.0), atol=0.4)


def test_a_reference_of_another_model_is_told() -> None:
    deep = nn.Sequential(nn.Linear(1, 4), nn.ReLU(), nn.Linear(4, 1))
    for model in (pd.BayesianNet(deep), pd.BayesianNet(nn.Linear(1, 1), likelihood=pd.Gaussian(1.0, learn=True))):
        with pytest.warns(UserWarning, match="sampled at T = 1"):
            module._warn_of_another_model(model)
    module._warn_of_another_model(pd.BayesianNet(deep, pd.Prior()))
