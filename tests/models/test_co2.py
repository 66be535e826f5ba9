"""CO₂ beyond the data: the script runs, its objective is the paper's, and its rules judge as they say."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jaxtyping
import pytest
import torch
from torch import Tensor
from torch.func import functional_call

import pyro_dropout as pd
from tests.models.test_scripts import FOLDER, loaded, picture_size

pytestmark = pytest.mark.deep  # the script runs whole, which takes a minute

co2 = loaded(FOLDER / "co2.py")
N = 30


def states(folder: Path) -> dict[Path, int]:
    """When each checkpoint was written."""
    return {file.relative_to(folder / "parts"): file.stat().st_mtime_ns for file in folder.glob("parts/**/step-*")}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("co2")
    jaxtyping.config.update("jaxtyping_disable", True)  # checking shapes takes longer than the run
    asked = ["--quick", "--quiet", "--steps", "4", "--gp-steps", "4", "--samples", "20", "--out", str(folder)]
    asked += ["--checkpoints", str(folder / "parts")]
    assert co2.main([*asked, "--parts", "guides", "4"]) is None
    before = states(folder)
    assert {file.parts[0] for file in before} == {"guides", "4"}
    path = co2.main(asked)  # learns what is left, and joins it all
    assert {file: state for file, state in states(folder).items() if file in before} == before
    jaxtyping.config.update("jaxtyping_disable", False)
    return json.loads(path.read_text("utf-8")), folder


def test_the_table_has_every_posterior_and_finite_numbers(found: tuple[dict[str, Any], Path]) -> None:
    (table,) = found[0]["tables"]
    names = [row["posterior"] for row in table["rows"]]
    # MC dropout, standard dropout, the GP, other guides, those with learned priors, dropout beside them, and ensembles
    assert len(names) == len(set(names)) == 8 + 8 + 1 + 5 + 3 + 1 + 2
    assert sum(name.startswith("MC") for name in names) == sum(name.startswith("standard") for name in names) == 8
    assert {"GP", *co2.OTHERS, *co2.LEARNED, *co2.ADAM, *co2.SCALED} <= set(names)
    for row in table["rows"]:
        assert list(row)[1:5] == ["std on data", "at 2.5", "at 3.72", "at 10"]
        assert all(math.isfinite(value) for name, value in row.items() if name != "posterior")
        assert 0 <= row["in ±2σ"] <= 1
        certain = row["posterior"].startswith("standard")
        assert (row["at 3.72"] == 0) == certain
        assert row["error / σ"] * 0.1 == pytest.approx(row["RMSE after"], rel=1e-4) or not certain


def test_the_papers_six_claims_two_more_and_the_figures(
    found: tuple[dict[str, Any], Path],
) -> None:
    claims = found[0]["claims"]
    assert len({each["claim"] for each in claims}) == 8
    assert all("{" not in each["number"] and "nan" not in each["number"] for each in claims)
    assert [each["file"] for each in found[0]["figures"]] == ["co2.png", "co2_std.png", "co2_guides.png"]
    for each in found[0]["figures"]:
        width, height, pixels = picture_size(found[1] / each["file"])
        assert min(width, height) >= 400
        assert pixels > 20_000


# --- the model --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "expected"), [("ReLU", torch.relu), ("TanH", torch.tanh)])
def test_an_activation_and_its_gradient(kind: str, expected: Any) -> None:
    x = torch.linspace(-40, 40, 81, requires_grad=True)
    value, oracle = co2.Activation(kind)(x), expected(x)
    assert torch.equal(value, oracle)
    gradients = [torch.autograd.grad(each.sum(), x)[0] for each in (value, oracle)]
    assert torch.equal(*gradients)


@pytest.mark.parametrize("dropped", [0.1, 0.2])
def test_every_weight_and_bias_has_the_papers_weight_decay(dropped: float) -> None:
    net = co2.model(4, 6, "ReLU", dropped, N)
    guide = co2.guide(net, dropped)
    torch.nn.init.normal_(guide.states["2/bias"].loc)
    kl = pd.ELBO().parts(net, guide, torch.zeros(N, 1), torch.zeros(N, 1))["kl"]
    kl.backward()
    locs = {name: p for name, p in guide.named_parameters() if name.endswith("loc")}
    assert len(locs) == 10  # five weights and five biases
    for name, loc in locs.items():  # minus the ELBO is Nτ times eq. 3, whose λ‖M‖² has the gradient 2λM
        assert torch.allclose(loc.grad, 2 * N * co2.TAU * co2.LAMBDA * loc, rtol=1e-5), name
    assert type(guide.posterior("0.weight")).__name__ == "Delta"  # the only input is never dropped
    assert guide.posterior("2.weight").probs[..., 0].unique().item() == pytest.approx(1 - dropped)


def objective(weights: list[Tensor], kind: str, x: Tensor, y: Tensor) -> Tensor:
    """Eq. 3 without dropout, written out."""
    h = x
    for k in range(0, len(weights), 2):
        h = h @ weights[k].T + weights[k + 1]
        if k < len(weights) - 2:
            h = torch.tanh(h) if kind == "TanH" else torch.relu(h)
    return (y - h).square().sum() / (2 * len(x)) + 1e-6 * sum(w.square().sum() for w in weights)


def test_a_fleet_takes_the_steps_of_sgd_on_the_papers_objective() -> None:
    x = torch.linspace(-1, 1, N)[:, None]
    y, none = torch.sin(3 * x), 1e-12  # keep rounds to 1 in float32: nothing random is left

    def build(kind: str) -> Any:
        torch.manual_seed(3)
        net = co2.model(1, 8, kind, none, N)
        return net, co2.guide(net, none)

    fleet = pd.Fleet(build, {"kind": co2.KINDS})
    starts = [[p.detach().clone() for p in guide.parameters()] for _, guide in fleet]
    rate = co2.RATE / (co2.TAU * N)
    options: Any = {"optim": "sgd", "schedule": pd.inverse_decay(), "compile": False, "progress": False}
    fleet.fit(x, y, steps=25, lr=rate, **options)
    for kind, weights, (_, guide) in zip(co2.KINDS, starts, fleet, strict=True):
        velocity = [torch.zeros_like(w) for w in weights]
        first = [w.clone() for w in weights]
        for t in range(25):
            free = [w.requires_grad_() for w in weights]
            gradients = torch.autograd.grad(objective(free, kind, x, y), free)
            velocity = [0.9 * v + g for v, g in zip(velocity, gradients, strict=True)]
            step = 0.01 * (1 + 1e-4 * t) ** -0.25
            weights = [(w - step * v).detach() for w, v in zip(free, velocity, strict=True)]
        assert max((w - start).abs().max() for w, start in zip(weights, first, strict=True)) > 1e-2
        for learned, oracle in zip(guide.parameters(), weights, strict=True):
            assert torch.allclose(learned, oracle, atol=2e-5)


# --- the answers ------------------------------------------------------------------------------------------------------


def test_scores_of_standard_dropout_by_hand() -> None:
    data = co2.co2_paper()
    net = co2.model(4, 6, "ReLU", 0.1, len(data.x))
    guide = co2.guide(net, 0.1)
    questions = co2.Questions(data)
    answer = questions.ask(net, guide, SimpleNamespace(samples=5, seed=0), method="standard")
    f = functional_call(net.net, guide.mean(), (data.test_x,)).detach()
    error = f - data.test_y
    assert answer.row["RMSE after"] == pytest.approx(error.square().mean().sqrt().item(), rel=1e-4)
    assert answer.row["in ±2σ"] == pytest.approx((error.abs() < 0.2).float().mean().item())
    log_p = torch.distributions.Normal(f, 0.1).log_prob(data.test_y).mean().item()
    assert answer.row["log p after"] == pytest.approx(log_p, rel=1e-4)
    assert torch.equal(questions.x[questions.points, 0], torch.tensor([2.5, 3.72, 10.0]))
    ahead = questions.x[questions.ahead]
    assert ahead.min() > data.x.max()
    assert ahead.max() <= 3.72


def test_how_far_apart_two_answers_are() -> None:
    one = SimpleNamespace(mean=torch.tensor([0.0, 0.0, 9.0]), spread=torch.tensor([1.0, 1.0, 1.0]))
    other = SimpleNamespace(mean=torch.tensor([1.0, -1.0, 0.0]), spread=torch.tensor([1.0, 1.0, 4.0]))
    assert co2.apart(one, other, torch.tensor([0, 1])) == pytest.approx((1.0, 1.0))
    assert co2.apart(one, other, torch.tensor([2])) == pytest.approx((9 / math.sqrt(8.5), 4.0))


def verdicts(relu: Any, tanh: Any, held: float = 0.1, deeper: float = 1.0, more: float = 1.0) -> list[bool]:
    """Which claims pass for all networks, when std of f is ``relu(x)`` or ``tanh(x)``."""
    questions = co2.Questions(co2.co2_paper())
    x = questions.x[:, 0]

    def answer(key: Any) -> Any:
        spread = (
            (relu if key[1] == "ReLU" else tanh)(x) * (deeper if key[0] == 5 else 1) * (more if key[2] == 0.2 else 1)
        )
        f = spread * torch.randn(200, len(x))
        row = {"in ±2σ": held, "error / σ": 5.0}
        at = dict(zip((co2.NEAR, co2.FAR, co2.LIMIT), spread[questions.points].tolist(), strict=True))
        return SimpleNamespace(f=f, mean=torch.zeros_like(x), spread=spread, at=at, row=row)

    keys = [(d, k, p) for d in co2.DEPTHS for k in co2.KINDS for p in co2.DROPPED]
    mc = {key: answer(key) for key in keys}
    return [all(rule(row) for row in rows) for _, rows, rule, _ in co2.judged(mc, mc, questions)]


def test_each_rule_says_no_to_its_opposite() -> None:
    grows, stays = (lambda x: 0.1 + x.abs()), torch.ones_like
    assert verdicts(grows, stays) == [True] * 6
    assert verdicts(grows, stays, held=0.9) == [False, True, True, True, True, True]
    assert verdicts(stays, stays) == [True, False, True, True, True, True]
    assert verdicts(grows, grows) == [True, True, False, True, True, True]
    assert verdicts(grows, stays, deeper=1.5) == [True, True, True, False, True, True]
    assert verdicts(grows, stays, more=0.6) == [True, True, True, True, False, True]
