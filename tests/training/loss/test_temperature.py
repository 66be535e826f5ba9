"""The temperature of the KL: a factor on it, right at every step however steps are taken."""

import math
from collections.abc import Callable
from typing import Any

import pyro
import pytest
import torch
from torch import Tensor, nn

import pyro_dropout as pd

F64 = torch.float64
X = torch.linspace(-1, 1, 12, dtype=F64).unsqueeze(-1)
Y = 3 * X + 1
RATE, STEPS = 0.05, 25


def pair(seed: int = 0) -> tuple[pd.BayesianNet, Any]:
    """A line with points for weights, whose training has no noise."""
    torch.manual_seed(seed)
    model = pd.BayesianNet(nn.Linear(1, 1).double(), likelihood=pd.Gaussian(tau=0.2))
    return model, pd.AutoDropout(model, keep=1.0)


def warm() -> pd.ELBO:
    return pd.ELBO(temperature=pd.training.warm_up(20))


def by_hand(heat: Callable[[int], float]) -> Tensor:
    """The weights that Adam finds with the KL times ``heat`` of the number of steps done."""
    w = [value.clone().requires_grad_() for value in pair()[1].mean().values()]
    optimiser = torch.optim.Adam(w, lr=RATE)
    for done in range(STEPS):
        loss = 0.1 * (Y - X @ w[0].T - w[1]).square().sum() + heat(done) * 0.5 * sum(v.square().sum() for v in w)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return torch.cat([v.detach().flatten() for v in w])


def found(guide: Any) -> Tensor:
    return torch.cat([v.detach().flatten() for v in guide.mean().values()])


def by_fit(compile: bool) -> Tensor:
    model, guide = pair()
    pd.fit(model, guide, X, Y, steps=STEPS, lr=RATE, loss=warm(), compile=compile, progress=False)
    return found(guide)


def by_svi(compile: bool | None) -> Tensor:
    """Pyro's own SVI, which does not compile, or ours."""
    model, guide = pair()
    parts = model, guide, pyro.optim.Adam({"lr": RATE}), warm()
    svi = pyro.infer.SVI(*parts) if compile is None else pd.SVI(*parts, compile=compile)
    for _ in range(STEPS):
        svi.step(X, Y)
        svi.evaluate_loss(X, Y)  # no step
    return found(guide)


def by_fleet(compile: bool) -> Tensor:
    fleet = pd.Fleet(pair, {"seed": [1, 0]})
    fleet.fit(X, Y, steps=STEPS, lr=RATE, loss=warm(), compile=compile, progress=False)
    return found(fleet[1][1])


def by_ensemble(compile: bool) -> Tensor:
    model, _ = pair()
    ensemble = pd.Ensemble(model, lambda m: pd.AutoDropout(m, keep=1.0), members=2, anchored=False, start="module")
    pd.fit(model, ensemble, X, Y, steps=STEPS, lr=RATE, loss=warm(), compile=compile, progress=False)
    return found(ensemble)  # both members are the same


WAYS = {
    "fit": by_fit,
    "pyro": lambda compile: by_svi(None),
    "SVI": by_svi,
    "fleet": by_fleet,
    "ensemble": by_ensemble,
}


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.deep)], ids=["eager", "compiled"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.thinned(2)
def test_a_schedule_is_right_at_every_step(way: str, compile: bool) -> None:
    expected = by_hand(lambda done: min(1.0, (done + 1) / 20))
    assert torch.allclose(WAYS[way](compile), expected, atol=1e-7)
    for wrong in (0.05, 1.0):  # held fixed at the first step, or left out
        assert not torch.allclose(by_hand(lambda done, wrong=wrong: wrong), expected, atol=1e-3)


def test_parts_hold_the_kl_itself_and_the_loss_its_multiple() -> None:
    model = pd.BayesianNet(nn.Linear(1, 1).double())
    guide = pd.AutoMeanField(model, init_scale=1e-9)
    parts = pd.ELBO().parts(model, guide, X, Y)
    for heat in (0.0, 0.1, 1.0, lambda done: torch.full_like(done, 0.1), lambda done: 2):
        elbo = pd.ELBO(temperature=heat)  # type: ignore[arg-type]
        factor = float(heat(torch.zeros(()))) if callable(heat) else heat
        assert torch.isclose(elbo.parts(model, guide, X, Y)["kl"], parts["kl"])
        assert torch.isclose(elbo.differentiable_loss(model, guide, X, Y), parts["nll"] + factor * parts["kl"])


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), "cold", lambda done: torch.ones(2), lambda done: None])
def test_a_temperature_that_is_none_is_refused(wrong: Any) -> None:
    with pytest.raises(pd.errors.PyroDropoutError, match="temperature"):
        pd.ELBO(temperature=wrong)


# --- tempered priors --------------------------------------------------------------------------------------------------


def deep(prior: pd.Prior | None) -> pd.BayesianNet:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 20), nn.ReLU(), nn.Linear(20, 2)).double()
    return pd.BayesianNet(net, prior, pd.Gaussian(2.0))


def at(model: Any, guide: Any, x: Tensor, y: Tensor, **how: Any) -> float:
    torch.manual_seed(1)
    return float(pd.ELBO(per_example=False, **how).differentiable_loss(model, guide, x, y).detach())


def test_a_point_is_penalised_without_the_width() -> None:
    x, y = torch.randn(7, 3, dtype=F64), torch.randn(7, 2, dtype=F64)
    both = [deep(prior) for prior in (None, pd.Prior(width_scaled=False))]
    default, plain = (at(model, pd.AutoDropout(model, keep=1.0), x, y) for model in both)
    assert default == pytest.approx(plain)
    full = at(both[0], pd.AutoDropout(both[0], keep=1.0), x, y, temperature=1.0)
    assert full == pytest.approx(at(both[0], pd.AutoDropout(deep(pd.Prior()), keep=1.0), x, y, temperature=1.0))
    assert full > default


@pytest.mark.parametrize("make", [pd.AutoMeanField, lambda model: pd.AutoLowRank(model, rank=2, per="net")])
@pytest.mark.parametrize("count", [7, 40_000])
def test_the_kl_weighs_less_where_weights_outnumber_the_data(count: int, make: Any) -> None:
    model = deep(None)
    guide = make(model)
    x, y = torch.randn(count, 3, dtype=F64), torch.randn(count, 2, dtype=F64)
    guide(x, y)
    torch.manual_seed(1)
    parts = {
        name: float(value.detach()) for name, value in pd.ELBO(per_example=False).parts(model, guide, x, y).items()
    }
    numbers = sum(value.numel() for value in model.net.parameters())
    share = min(1.0, math.sqrt(count / numbers) / 4)
    assert (share == 1.0) == (count > 1000)
    assert at(model, guide, x, y) == pytest.approx(parts["nll"] + share * parts["kl"])
    # A mini-batch counts as all data.
    torch.manual_seed(1)
    whole = float(pd.ELBO(per_example=False).differentiable_loss(model, guide, x, y, 10**6).detach())
    torch.manual_seed(1)
    again = pd.ELBO(per_example=False).parts(model, guide, x, y, 10**6)
    assert whole == pytest.approx(float(sum(again.values()).detach()))


@pytest.mark.parametrize(
    ("hidden", "shares"), {0: (None, None), 1: (2.5, 5), 2: (2.5, 20), 3: (2.5, 45), 4: (2.5, 20)}.items()
)
def test_members_have_a_share_that_depends_on_the_depth(hidden: int, shares: tuple[float | None, ...]) -> None:
    net = nn.Sequential(*[nn.Linear(3, 3) for _ in range(hidden + 1)])
    how = pd.BayesianNet(net).tempered("0.weight", 40)
    assert how is not None
    assert (how.weights, how.anchored) == shares


def test_anchored_members_have_the_temperature_of_the_prior() -> None:
    """Not the weaker penalty of points: a member is a draw of the posterior."""
    x, y = torch.randn(7, 3, dtype=F64), torch.randn(7, 2, dtype=F64)
    model, plain = (deep(pd.Prior(width_scaled="all", tempered=tempered)) for tempered in (True, False))
    numbers = sum(value.numel() for value in model.net.parameters())
    cold, full = pd.ELBO(per_example=False, temperature=7 / (8 * numbers)), pd.ELBO(per_example=False, temperature=1.0)
    for first, second in (((model, None), (plain, cold)), ((model, full), (plain, None))):
        losses = []
        for own, loss in (first, second):
            ensemble = pd.Ensemble(own, members=2, seed=0)
            how: Any = {"compile": False, "progress": False, "seed": 0}
            losses.append(pd.fit(own, ensemble, x, y, steps=3, loss=loss, **how).losses)
        torch.testing.assert_close(*losses)


def test_the_curvature_of_all_weights_is_at_the_maximum_of_the_posterior() -> None:
    model = deep(None)
    x, y = torch.randn(30, 3, dtype=F64), torch.randn(30, 2, dtype=F64)
    losses = [at(model, pd.guides.AutoLaplace(model, structure), x, y) for structure in ("full", "last")]
    assert losses[0] == pytest.approx(at(model, pd.guides.AutoLaplace(model, "last"), x, y, temperature=1.0))
    assert losses[0] > losses[1]


def test_the_point_of_a_last_layer_has_eight_times_the_penalty_of_points() -> None:
    x, y = torch.randn(30, 3, dtype=F64), torch.randn(30, 2, dtype=F64)
    for width, times in ((20, 8), (4, 4)):  # at most the prior in full
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, 2)).double()
        model = pd.BayesianNet(net, None, pd.Gaussian(2.0))
        points, last = (
            at(model, q, x, y) for q in (pd.AutoDropout(model, keep=1.0), pd.guides.AutoLaplace(model, "last"))
        )
        penalty = 0.5 * float(net[2].weight.detach().square().sum())  # as N(0, 1) has it
        assert last - points == pytest.approx((times - 1) * penalty)
