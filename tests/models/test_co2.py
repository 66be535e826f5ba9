"""The two series of the paper: the models are its objective, and scores are those of closed forms."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

import pyro_dropout as pd
from tests.models.test_scripts import FOLDER, loaded

pytestmark = pytest.mark.deep  # the script runs whole, which takes a minute

co2 = loaded(FOLDER / "co2.py")


# --- the model --------------------------------------------------------------------------------------------------------


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
    options: Any = {"optim": "sgd", "schedule": pd.training.inverse_decay(), "compile": False, "progress": False}
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


solar = loaded(FOLDER / "solar.py")
N = 30


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
    gp = pd.generative.GP("se", tau=4.0, length_scale=0.1).fit(x, y, steps=0)
    model = SimpleNamespace(likelihood=pd.Gaussian(4.0))
    args = SimpleNamespace(samples=4000, seed=0)
    return data, gp, model, args, questions.ask(model, pd.references.gp_posterior(gp), args)


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
