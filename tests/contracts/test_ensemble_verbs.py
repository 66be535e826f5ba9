"""Every verb of the package with an ensemble: what it gives is right, and what cannot be is refused by name."""

import math
import warnings
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor, nn

import pyro_dropout as pd
from pyro_dropout.judging.diagnostics.arviz_export import arviz

F64 = torch.float64
TAU = 4.0
QUIET: dict[str, Any] = {"lr": 0.05, "compile": False, "progress": False}
X = torch.linspace(-1, 1, 12, dtype=F64).unsqueeze(-1)
Y = X**2 + 0.1 * torch.cos(20 * X)


def network(likelihood: Any = None, outputs: int = 1) -> pd.BayesianNet:
    net = nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, outputs)).double()
    return pd.BayesianNet(net, pd.Prior(), pd.Gaussian(TAU) if likelihood is None else likelihood)


def trained(guide: Any, members: int, anchored: bool, steps: int = 15) -> tuple[pd.BayesianNet, pd.Ensemble]:
    torch.manual_seed(0)
    model = network()
    ensemble = pd.Ensemble(model, guide, members, anchored, seed=1)
    pd.fit(model, ensemble, X, Y, steps=steps, **QUIET)
    return model, ensemble


@pytest.fixture(scope="module")
def points() -> tuple[pd.BayesianNet, pd.Ensemble]:
    return trained(None, 30, True)


@pytest.fixture(scope="module")
def spread() -> tuple[pd.BayesianNet, pd.Ensemble]:
    """Anchored members with a density: their priors were moved while they trained."""
    return trained(pd.AutoMeanField, 4, True)


@pytest.fixture(scope="module")
def dropout() -> tuple[pd.BayesianNet, pd.Ensemble]:
    return trained(lambda model: pd.AutoDropout(model, keep=0.8), 3, False, steps=3)


def plain(x: Tensor, y: Tensor | None = None) -> None:
    """A Pyro model that is not a network, with a constrained site."""
    slope = pyro.sample("slope", dist.Normal(x.new_zeros(()), 1.0))
    scale = pyro.sample("scale", dist.HalfNormal(x.new_ones(())))
    with pyro.plate("points", len(x)):
        pyro.sample("y", dist.Normal(slope * x, scale), obs=y)


@pytest.fixture(scope="module")
def pyro_ensemble() -> pd.Ensemble:
    ensemble = pd.Ensemble(plain, pd.AutoMeanField, members=3, seed=0)
    ensemble(X[:, 0], Y[:, 0])
    return ensemble


# --- predictions ------------------------------------------------------------------------------------------------------


def test_mean_weights_of_different_networks_are_refused(points: Any, dropout: Any, pyro_ensemble: pd.Ensemble) -> None:
    for model, ensemble, x in ((*points, X), (*dropout, X), (plain, pyro_ensemble, X[:, 0])):
        with pytest.raises(pd.errors.PyroDropoutError, match="does not take method='standard' with an ensemble"):
            pd.predict(model, ensemble, x, method="standard")
    model = network()
    alone = pd.Ensemble(model, members=1)
    torch.testing.assert_close(
        pd.predict(model, alone, X, method="standard").mean, pd.predict(model, alone, X, samples=1).mean
    )


def test_the_error_over_members_counts_those_that_were_used(points: Any, pyro_ensemble: pd.Ensemble) -> None:
    some = pd.predict(*points, X, samples=5)
    torch.testing.assert_close(some.error_over_members, (some.epistemic / 5).sqrt())
    every = pd.predict(*points, X, samples=1000)
    torch.testing.assert_close(every.error_over_members, (every.epistemic / 30).sqrt())
    with pytest.raises(pd.errors.PyroDropoutError, match="at least two"):
        _ = pd.predict(*points, X, samples=1).error_over_members
    assert not hasattr(pd.predict(*points, X, samples=1), "error_over_members")
    answer = pd.predict(plain, pyro_ensemble, X[:, 0], samples=50)
    torch.testing.assert_close(answer.error_over_members, (answer.epistemic / 3).sqrt())


def test_thompson_acts_on_one_member_at_a_time() -> None:
    """Four members of a linear reward, each with its own best arm; every one is followed as often."""
    model = pd.BayesianNet(nn.Linear(4, 1, bias=False))
    ensemble = pd.Ensemble(model, members=4)
    with torch.no_grad():
        next(iter(ensemble.parameters())).copy_(torch.eye(4).unsqueeze(1))
    chosen = torch.stack([pd.judging.thompson(model, ensemble, torch.eye(4), seed=k) for k in range(80)])
    assert chosen.bincount(minlength=4).tolist() == pytest.approx([20] * 4, abs=16)  # four standard deviations
    twice = pd.judging.thompson(model, ensemble, torch.eye(4).expand(3, 4, 4), seed=0)
    assert len(twice.unique()) == 1  # all contexts share the member


# --- the posterior of one site ----------------------------------------------------------------------------------------


def test_the_posterior_of_a_site_in_every_kind_of_ensemble(points: Any, spread: Any, dropout: Any) -> None:
    for _, ensemble in (points, spread, dropout):
        q, drawn = ensemble.posterior("0.weight"), ensemble.sample_weights(6000)["0.weight"]
        torch.testing.assert_close(q.mean, ensemble.mean()["0.weight"])
        torch.testing.assert_close(drawn.var(0), q.variance, rtol=0.15, atol=0.0)
        torch.testing.assert_close(q.sample((6000,)).var(0), q.variance, rtol=0.15, atol=0.0)
        with pytest.raises(pd.errors.PyroDropoutError, match="'nothing' is not a site"):
            ensemble.posterior("nothing")
    value = spread[1].sample_weights(3)["0.weight"]
    assert spread[1].posterior("0.weight").log_prob(value).shape == (3,)
    for _, ensemble in (points, dropout):
        with pytest.raises(pd.errors.SingularError):
            ensemble.posterior("0.weight").log_prob(value)


def test_moments_of_a_constrained_site_are_refused_and_its_draws_are_not(pyro_ensemble: pd.Ensemble) -> None:
    q = pyro_ensemble.posterior("scale")
    with pytest.raises(pd.errors.PyroDropoutError, match="no formula for its mean; take it from draws"):
        _ = q.mean
    drawn = q.sample((300,))
    assert drawn.shape == (300,)
    assert bool((drawn > 0).all())
    assert bool(q.log_prob(drawn).isfinite().all())


# --- bounds -----------------------------------------------------------------------------------------------------------


def by_hand(model: pd.BayesianNet, weights: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return log p(y | w) and log p(w) of each draw, (n,), from the numbers alone."""
    f = torch.tanh(X @ weights["0.weight"].mT + weights["0.bias"].unsqueeze(1))
    f = f @ weights["2.weight"].mT + weights["2.bias"].unsqueeze(1)
    scales = {"0.weight": 1.0, "0.bias": 1.0, "2.weight": 3**-0.5, "2.bias": 1.0}
    prior = [dist.Normal(0.0, scales[n]).log_prob(w).flatten(1).sum(1) for n, w in weights.items()]
    return dist.Normal(f, TAU**-0.5).log_prob(Y).sum((1, 2)), torch.stack(prior).sum(0)


def test_the_bound_of_anchored_members_is_that_of_the_models_own_prior(spread: Any) -> None:
    model, ensemble = spread
    report = pd.judging.elbo_report(model, ensemble, X, Y, samples=400, seed=0)
    own = ensemble.stacked()
    locs = {n: own[f"states.{n.replace('.', '/')}.loc"].detach() for n in model.sites}
    widths = {n: own[f"states.{n.replace('.', '/')}.log_scale"].detach().exp() for n in model.sites}
    numbers = torch.arange(4).repeat(1000)
    weights = {n: locs[n][numbers] + widths[n][numbers] * torch.randn_like(locs[n][numbers]) for n in locs}
    log_q = torch.stack(
        [
            torch.stack(
                [dist.Normal(locs[n][m], widths[n][m]).log_prob(w).flatten(1).sum(1) for n, w in weights.items()]
            )
            for m in range(4)
        ]
    ).sum(1)
    data, prior = by_hand(model, weights)
    each = data + prior - (torch.logsumexp(log_q, 0) - math.log(4))
    error = math.hypot(each.std().item() / 4000**0.5, report.standard_error)
    assert report.elbo == pytest.approx(each.mean().item(), abs=4 * error)
    assert report.kl_exact == pytest.approx((data - each).mean().item(), abs=4 * error)
    # Of the members alone, without the mixture, the bound would be lower by up to log 4.
    assert (data + prior - log_q[numbers, torch.arange(4000)]).mean() < each.mean()


def test_the_objective_of_points_is_the_mean_of_their_own(points: Any) -> None:
    model, ensemble = points
    report = pd.judging.elbo_report(model, ensemble, X, Y, seed=0)
    weights = ensemble.draws_at(torch.arange(30))
    data, prior = by_hand(model, weights)
    constant = sum(-0.5 * math.log(2 * math.pi) * w[0].numel() for w in weights.values()) + 1.5 * math.log(3)
    assert report.elbo is None
    assert report.nll == pytest.approx(-data.mean().item())  # every member once
    assert report.kl_large_k == pytest.approx(constant - prior.mean().item())
    assert "points" in report.why


def test_no_density_no_ratios_and_the_error_says_what_to_give(points: Any, dropout: Any) -> None:
    for model, ensemble in (points, dropout):
        for verb in (pd.khat, pd.loo):
            with pytest.raises(pd.errors.SingularError, match="members, with a density, such as AutoMeanField"):
                verb(model, ensemble, X, Y, samples=30)


def test_repeated_points_do_not_pass_for_draws(points: Any) -> None:
    """A tail that is fitted to copies of 30 functions would look short, however few functions there are."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        many, once = (pd.loo(*points, X, Y, samples=n, approximate=False, seed=0) for n in (1000, 30))
    torch.testing.assert_close(many.khat, once.khat)
    assert many.elpd == pytest.approx(once.elpd)
    model = network()
    with pytest.raises(pd.errors.RangeError, match="an ensemble of points must have 25 members, to fit a tail; got 6"):
        pd.loo(model, pd.Ensemble(model, members=6), X, Y, approximate=False)


def test_ranks_among_repeated_points_are_refused() -> None:
    model = network()

    def fit(model: Any, x: Tensor, y: Tensor) -> pd.Ensemble:
        return pd.Ensemble(model, members=5)

    with pytest.raises(pd.errors.RangeError, match=r"ranks among 99 could not be uniform.*samples=5"):
        pd.sbc(model, fit, X, replications=2, progress=False)
    found = pd.sbc(model, fit, X, replications=3, samples=5, progress=False)
    assert all(0 <= int(rank) <= 5 for ranks in found.ranks.values() for rank in ranks)


# --- ArviZ, and comparisons -------------------------------------------------------------------------------------------


def test_chains_are_members_in_their_order(points: Any, dropout: Any) -> None:
    data = pd.to_arviz(*points, X, Y, seed=0)
    chains = torch.tensor(data["posterior"]["2.bias"].values)
    torch.testing.assert_close(chains[:, 0], points[1].draws_at(torch.arange(30))["2.bias"])
    assert "points" in data["sample_stats"].attrs["log_q"]
    data = pd.to_arviz(*dropout, X, Y, samples=300, seed=0)
    drawn = torch.tensor(data["posterior"]["0.weight"].values)
    assert drawn.shape == (3, 100, 3, 1)
    kept = dropout[1].stacked()["states.0/weight.loc"].detach()
    assert all(bool(((rows == 0) | (rows == loc)).all()) for rows, loc in zip(drawn, kept, strict=True))
    rhat = arviz().rhat(data, var_names=["0.weight"])["0.weight"].values
    assert float(rhat.min()) > 1.1  # members that start apart have not found the same weights
