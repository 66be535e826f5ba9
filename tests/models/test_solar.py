"""Solar irradiance with gaps: the script runs, nobody learns from the gaps, and the rules judge as they say."""

import dataclasses
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import pyro_dropout as pd
from tests.models.test_scripts import FOLDER, loaded, picture_size

pytestmark = pytest.mark.deep  # the script runs whole, which takes a minute

solar = loaded(FOLDER / "solar.py")
N = 30


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("solar")
    path = solar.main(["--quick", "--quiet", "--out", str(folder)])
    return json.loads(path.read_text("utf-8")), folder


def test_the_table_has_every_posterior_and_finite_numbers(found: tuple[dict[str, Any], Path]) -> None:
    (table,) = found[0]["tables"]
    names = [row["posterior"] for row in table["rows"]]
    dropout = ["MC dropout, λ = 5e-07", "MC dropout, λ = 5e-06", "MC dropout, λ = 0.05"]
    others = ["concrete", "multiplicative", "mean field", "row mixture", "low rank"]
    assert names == [*dropout, *others, *solar.SCALED, "GP"]
    for row in table["rows"]:
        assert all(math.isfinite(value) for name, value in row.items() if name != "posterior")
        assert 0 <= row["in ±2 std of f"] <= row["in ±2σ"] <= 1  # the noise can only add
        assert row["noise 1/√τ"] > 0


def test_the_claims_name_their_numbers_and_the_figures_show_something(found: tuple[dict[str, Any], Path]) -> None:
    rows = {row["posterior"]: row for row in found[0]["tables"][0]["rows"]}
    claims = found[0]["claims"]
    assert len({each["claim"] for each in claims}) == 5
    assert f"GP: {rows['GP']['in ±2σ']:.2f}" in claims[1]["number"]
    assert (claims[1]["verdict"] == "holds") == (rows["GP"]["in ±2σ"] > 0.995)
    assert [each["file"] for each in found[0]["figures"]] == ["solar.png", "solar_guides.png"]
    for each in found[0]["figures"]:
        width, height, pixels = picture_size(found[1] / each["file"])
        assert min(width, height) >= 400
        assert pixels > 20_000


# --- the model and the data -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decay", solar.LAMBDAS)
def test_every_weight_and_bias_has_the_weight_decay_of_its_replica(decay: float) -> None:
    net = solar.model(6, decay, N)
    guide = solar.guide(net)
    torch.nn.init.normal_(guide.states["2/bias"].loc)
    pd.ELBO().parts(net, guide, torch.zeros(N, 1), torch.zeros(N, 1))["kl"].backward()
    locs = {name: p for name, p in guide.named_parameters() if name.endswith("loc")}
    assert len(locs) == 12  # six weights and six biases
    for name, loc in locs.items():  # minus the ELBO is Nτ times eq. 3, whose λ‖M‖² has the gradient 2λM
        assert torch.allclose(loc.grad, 2 * N * solar.TAU * decay * loc, rtol=1e-5), name
    assert type(guide.posterior("0.weight")).__name__ == "Delta"  # the only input is never dropped


@pytest.mark.parametrize(("name", "variance"), [("2/fan-in", 2 / 64), ("N(0, 2)", 2.0)])
def test_the_ensembles_have_priors_of_their_own(name: str, variance: float) -> None:
    data = solar.solar()
    net = solar.model(64, solar.LAMBDAS[0], N).net
    (scaled,) = (value for key, value in solar.SCALED.items() if name in key)
    how = {"members": 2, "steps": 2, "compile": False, "progress": False, "seed": 0}
    model, ensemble = solar.anchored_ensemble(net, data.x, data.y, scaled=scaled, tau=100.0, **how)
    scales = {name: scale.item() ** 2 for name, scale in model.prior.scales(net).items()}
    later = {name for name in scales if name.endswith("weight") and name != "0.weight"}
    assert len(later) == 5
    assert scales == pytest.approx({name: variance if name in later else 1.0 for name in scales})
    assert ensemble.anchored
    assert ensemble.points


def test_what_measures_the_noise_was_neither_learned_nor_in_a_gap() -> None:
    data = solar.solar()
    questions = solar.Questions(data)
    parts = (questions.learned, questions.held, questions.gaps)
    learned, held, gaps = (set(questions.x[part, 0].tolist()) for part in parts)
    assert learned | held == set(data.x[:, 0].tolist())
    assert gaps == set(data.test_x[:, 0].tolist())
    assert len(learned) + len(held) + len(gaps) == len(learned | held | gaps)
    assert len(held) == pytest.approx(len(data.x) / 11, abs=1)
    target = dict(zip(data.x[:, 0].tolist(), data.y[:, 0].tolist(), strict=True))
    for part in parts[:2]:
        assert [target[x] for x in questions.x[part, 0].tolist()] == questions.y[part, 0].tolist()


# --- the answers ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def process() -> Any:
    """A GP of which everything is known in closed form, on the data, with a noise that is too large on purpose."""
    data = solar.solar()
    questions = solar.Questions(data)
    x, y = questions.x[questions.learned], questions.y[questions.learned]
    gp = pd.GP("se", tau=4.0, length_scale=0.1).fit(x, y, steps=0)
    model = SimpleNamespace(likelihood=pd.Gaussian(4.0))
    args = SimpleNamespace(samples=4000, seed=0)
    return data, gp, model, args, questions.ask(model, pd.gp_posterior(gp), args)


def test_scores_in_the_gaps_in_closed_form(process: Any) -> None:
    data, gp, _, _, answer = process
    mean, variance = gp.predict(data.test_x, noise=False)
    error = (mean - data.test_y).double()
    noise = answer.row["noise 1/√τ"]
    std = (variance.double() + noise**2).sqrt()
    log_p = torch.distributions.Normal(mean.double(), std).log_prob(data.test_y.double()).mean().item()
    assert answer.row["RMSE in gaps"] == pytest.approx(error.square().mean().sqrt().item(), abs=0.03)
    assert answer.row["log p in gaps"] == pytest.approx(log_p, abs=0.05)
    for column, wide in (("in ±2σ", std), ("in ±2 std of f", variance.sqrt())):
        low, high = ((error.abs() <= factor * wide).double().mean().item() for factor in (1.9, 2.1))
        assert low <= answer.row[column] <= high  # 4000 draws know a std to about one per cent


def test_the_noise_is_the_most_probable_one_on_the_points_held_back(process: Any) -> None:
    data, gp, _, _, answer = process
    questions = solar.Questions(data)
    mean, variance = gp.predict(questions.x[questions.held], noise=False)

    def score(noise: float) -> float:
        p = torch.distributions.Normal(mean.double(), (variance.double() + noise**2).sqrt())
        return p.log_prob(questions.y[questions.held].double()).mean().item()

    measured = answer.row["noise 1/√τ"]
    best = max((k / 200 for k in range(2, 300)), key=score)
    assert measured == pytest.approx(best, rel=0.1)
    assert measured != pytest.approx(0.5, rel=0.05)  # the noise that it was given


def test_nothing_in_the_gaps_moves_the_noise_or_the_answer(process: Any) -> None:
    data, gp, model, args, answer = process
    other = solar.Questions(dataclasses.replace(data, test_y=data.test_y + 3))
    moved = other.ask(model, pd.gp_posterior(gp), args)
    assert moved.row["noise 1/√τ"] == answer.row["noise 1/√τ"]
    assert torch.equal(moved.mean, answer.mean)
    assert torch.equal(moved.std, answer.std)
    assert moved.row["RMSE in gaps"] > 2 > answer.row["RMSE in gaps"]


def row(error: float, held: float, ratio: float = 2.0) -> dict[str, float]:
    return {"RMSE in gaps": error, "in ±2σ": held, "in gaps / on data": ratio}


def test_each_rule_says_no_to_its_opposite() -> None:
    def passed(gp: Any, *dropout: Any, ensemble: float = 0.95) -> list[list[bool]]:
        judged = solar.judged(gp, dropout, [row(0.3, ensemble)], 0.9)
        return [[rule(each[column]) for each in rows] for _, rows, column, rule, _ in judged]

    assert passed(row(0.3, 1.0), row(0.4, 0.8)) == [[True, True], [True], [True], [True], [True]]
    assert passed(row(0.5, 0.95), row(0.4, 0.95, 1.0)) == [[False, True], [False], [False], [False], [True]]
    assert passed(row(0.3, 1.0), row(0.4, 0.8), row(9.0, 0.95, 1.0))[2:4] == [[True, False], [True, False]]
    assert [passed(row(0.3, 1.0), row(0.4, 0.8), ensemble=held)[4] for held in (0.89, 0.91)] == [[False], [True]]
