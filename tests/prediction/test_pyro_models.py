"""Twenty Pyro models that know nothing of this package: what is said of them is what their own traces say.

The oracle is a plain loop over draws that conditions the model and reads Pyro's own log_prob.
"""

import math
import warnings
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoDelta, AutoMultivariateNormal, AutoNormal
from pyro.poutine.util import site_is_subsample
from torch import Tensor

import pyro_dropout as pd
from pyro_dropout.judging.diagnostics import arviz_export
from tests.oracles.predictions import close_by_chance
from tests.prediction.pyro_models import CASES, F64, Case, X, Y

DRAWS = 40
TOLD = pytest.mark.filterwarnings("ignore:k̂ is above 0.7", "ignore:Estimated shape parameter")
GUIDES: dict[str, Any] = {
    "AutoNormal": AutoNormal,
    "AutoMultivariateNormal": AutoMultivariateNormal,
    "AutoMeanField": pd.AutoMeanField,
}
EVERY = pytest.mark.parametrize("name", CASES)
pytestmark = pytest.mark.usefixtures("in_float64")


def posed(name: str, kind: str | None = None) -> tuple[Case, Any, Any]:
    """A case, its model, and a guide that has met it; guides of three kinds take turns."""
    pyro.clear_param_store()  # in which two guides of one class of Pyro's have the same names
    case = CASES[name]
    model = case.make()
    kind = kind or list(GUIDES)[list(CASES).index(name) % len(GUIDES)]
    guide = GUIDES[kind](model, init_scale=0.2)
    guide(*case.args, **case.kwargs)
    return case, model, guide


def traced(model: Any, draw: dict[str, Tensor], args: Any, kwargs: Any) -> Any:
    trace = poutine.trace(poutine.condition(model, data=draw)).get_trace(*args, **kwargs)
    trace.compute_log_prob()
    return trace


def drawn(data: Any, t: int) -> dict[str, Tensor]:
    """The t-th draw in what went to ArviZ."""
    return {str(name): torch.tensor(value.values[0, t]) for name, value in data["posterior"].data_vars.items()}


def kept(guide: Any, case: Case, count: int = DRAWS) -> pd.prediction.SampledPosterior:
    """Some draws of a guide, as a posterior that has these and no others."""
    rows = [poutine.trace(guide).get_trace(*case.args, **case.kwargs) for _ in range(count)]
    sites = {name: site for name, site in rows[0].nodes.items() if site["type"] == "sample"}
    latent = [n for n, site in sites.items() if not site["infer"].get("is_auxiliary") and not site_is_subsample(site)]
    return pd.prediction.SampledPosterior(
        {n: torch.stack([r.nodes[n]["value"] for r in rows]).detach()[None] for n in latent}
    )


# --- densities --------------------------------------------------------------------------------------------------------


@EVERY
@pytest.mark.thinned(4)
def test_log_likelihoods_and_lp_are_those_of_the_trace(name: str) -> None:
    case, model, guide = posed(name)
    data = pd.to_arviz(model, guide, *case.args, samples=DRAWS, seed=0, **case.kwargs)
    assert set(data["log_likelihood"].data_vars) == set(case.observed)
    assert set(data["posterior_predictive"].data_vars) == set(data["observed_data"].data_vars) == set(case.observed)
    for t in range(DRAWS):
        trace = traced(model, drawn(data, t), case.args, case.kwargs)
        assert data["sample_stats"]["lp"].values[0, t] == pytest.approx(trace.log_prob_sum().item(), abs=1e-6)
        for site in case.observed:
            node = trace.nodes[site]
            each = node["fn"].log_prob(node["value"])
            each = each if node["mask"] is None else torch.where(node["mask"], each, 0.0)
            found = data["log_likelihood"][site].values[0, t]
            np.testing.assert_allclose(found, each.detach().numpy(), atol=1e-6)
            assert data["observed_data"][site].shape == node["value"].shape
            assert data["posterior_predictive"][site].shape == (1, DRAWS, *node["value"].shape)


@EVERY
@pytest.mark.thinned(4)
def test_log_q_is_that_of_the_guide(name: str) -> None:
    """In a coordinate where q is a Gaussian: ratios of two draws' densities, against scipy-free formulas of Pyro's."""
    case, model, guide = posed(name, "AutoNormal")
    data = pd.to_arviz(model, guide, *case.args, samples=5, seed=0, **case.kwargs)
    for t in range(5):
        draw, total = drawn(data, t), 0.0
        with torch.no_grad():
            for site, prior in guide.prototype_trace.iter_stochastic_nodes():
                to = torch.distributions.biject_to(prior["fn"].support)
                z = to.inv(draw[site])
                loc, scale = getattr(guide.locs, site), getattr(guide.scales, site)
                total += float(dist.Normal(loc, scale).log_prob(z).sum() - to.log_abs_det_jacobian(z, draw[site]).sum())
        assert data["sample_stats"]["log_q"].values[0, t] == pytest.approx(total, abs=1e-6)


@TOLD
@pytest.mark.parametrize("name", [name for name in CASES if name != "scaled"])  # ArviZ knows no scales
@pytest.mark.thinned(8)
def test_leave_one_out_is_arvizs(name: str) -> None:
    """az.loo and pd.loo on the same draws; masked points, which ArviZ has as zeros, are no terms of ours."""
    case, model, guide = posed(name)
    options: Any = {"samples": 100, "seed": 3, **case.kwargs}
    data = pd.to_arviz(model, guide, *case.args, **options)
    az = arviz_export.arviz()
    for site in case.observed:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # ArviZ warns of sites that are one point
            theirs = az.loo(data, pointwise=True, var_name=site)
        which = {} if len(case.observed) == 1 else {"site": site}
        mine = pd.loo(model, guide, *case.args, approximate=False, **options, **which)
        elpd = theirs.elpd_loo if hasattr(theirs, "elpd_loo") else theirs.elpd
        each = np.asarray(theirs.loo_i if hasattr(theirs, "loo_i") else theirs.elpd_i).ravel()
        seen = case.args[1].numpy() if name == "masked" else each == each
        assert mine.elpd == pytest.approx(float(elpd), abs=1e-6)
        assert mine.se == pytest.approx((len(each[seen]) * each[seen].var()) ** 0.5, abs=1e-6)
        np.testing.assert_allclose(mine.pointwise.numpy(), each[seen], atol=1e-8)
        khat = mine.khat.numpy()
        tail = np.isfinite(khat)
        np.testing.assert_allclose(khat[tail], np.asarray(theirs.pareto_k).ravel()[seen][tail], rtol=1e-6)


@EVERY
@pytest.mark.thinned(8)
def test_the_bound_is_the_mean_of_lp_less_log_q(name: str) -> None:
    """Guides of Pyro: the very same draws, so to rounding; those of this package have formulas: 5.5 standard errors."""
    for kind, samples in (("AutoNormal", 50), ("AutoMeanField", 20)):
        case, model, guide = posed(name, kind)
        stats = pd.to_arviz(model, guide, *case.args, samples=samples, seed=0, **case.kwargs)["sample_stats"]
        ratios = (stats["lp"] - stats["log_q"]).values[0]
        report = pd.judging.elbo_report(model, guide, *case.args, samples=samples, seed=0, **case.kwargs)
        assert report.elbo is not None
        near = 1e-6 if kind == "AutoNormal" else 5.5 * (report.standard_error + ratios.std() / samples**0.5)
        assert report.elbo == pytest.approx(ratios.mean(), abs=near)


# --- predictions ------------------------------------------------------------------------------------------------------


def replicated(model: Any, posterior: pd.prediction.SampledPosterior, case: Case, times: int) -> dict[str, Tensor]:
    """Every observed site drawn ``times`` times with each draw: {site: (times, draws, ...)}."""
    found: dict[str, list[Tensor]] = {site: [] for site in case.observed}
    for _ in range(times):
        for t in range(posterior.num_draws):
            draw = {name: value[0, t] for name, value in posterior.weights.items()}
            trace = poutine.trace(poutine.condition(model, data=draw)).get_trace(*case.question, **case.blind_kwargs)
            for site in case.observed:
                found[site].append(trace.nodes[site]["value"].detach())
    return {site: torch.stack(values).unflatten(0, (times, -1)) for site, values in found.items()}


@EVERY
@pytest.mark.thinned(8)
def test_moments_are_those_of_many_draws(name: str) -> None:
    """Within 4 standard errors, some 300 numbers in all: about 2 % to fail on correct code, and this seed does not."""
    case, model, guide = posed(name)
    count, times = 20, 10
    posterior = kept(guide, case, count)
    found = pd.predict(model, posterior, *case.question, samples=count, seed=0, **case.blind_kwargs)
    found = found if isinstance(found, dict) else {case.observed[0]: found}
    assert set(found) == set(case.observed)
    for site, y in replicated(model, posterior, case, times).items():
        answer = found[site]
        if name == "classes":
            y = torch.nn.functional.one_hot(y, 3)
        y = y.to(F64).flatten(0, 1)
        n = len(y)
        # Sites that come after drawn ones, and moments that are drawn themselves, have errors of their own.
        own = n if name not in ("walk", "stretched") else count if name == "walk" else count * 64
        variance, fourth = y.var(0), (y - y.mean(0)).pow(4).mean(0)
        close_by_chance(answer.mean, y.mean(0), (variance * (1 / n + 1 / own)).sqrt(), 4)
        error = ((fourth - variance**2).clamp_min(0) * (1 / n + 1 / own)).sqrt() + variance * 2 / count
        close_by_chance(answer.variance, variance, error, 4)
        torch.testing.assert_close(answer.variance, answer.epistemic + answer.aleatoric)
        torch.testing.assert_close(answer.std.square(), answer.variance)
        assert answer.samples.shape[0] == count


@EVERY
@pytest.mark.thinned(4)
def test_log_prob_is_a_logsumexp_over_draws(name: str) -> None:
    case, model, guide = posed(name)
    posterior = kept(guide, case)
    for blind in (True, False):
        args, kwargs = (case.question, case.blind_kwargs) if blind else (case.args, case.kwargs)
        found = pd.predict(model, posterior, *args, samples=DRAWS, seed=0, **kwargs)
        site = case.observed[0]
        answer = found[site] if isinstance(found, dict) else found
        data = poutine.trace(model).get_trace(*case.args, **case.kwargs).nodes[site]["value"]
        each = []
        for t in range(DRAWS):
            draw = {name: value[0, t] for name, value in posterior.weights.items()}
            each.append(traced(model, draw, case.args, case.kwargs).nodes[site]["fn"].log_prob(data).detach())
        expected = torch.logsumexp(torch.stack(each), 0) - math.log(DRAWS)
        torch.testing.assert_close(answer.log_prob(data), expected, atol=1e-9, rtol=1e-9)


def test_intervals_hold_their_share() -> None:
    """Of mixtures of normals by their distribution function, exactly; of others by quantiles of the draws."""
    case, model, guide = posed("line")
    answer = pd.predict(model, guide, X, samples=200, seed=0)
    for level, end in ((0.05, answer.interval(0.9)[0]), (0.95, answer.interval(0.9)[1])):
        below = torch.stack([p.cdf(end) for p in answer.parts]).mean(0)
        torch.testing.assert_close(below, torch.full_like(below, level), atol=1e-8, rtol=0)
    case, model, guide = posed("counts")
    answer = pd.predict(model, guide, X, samples=200, seed=0, **case.blind_kwargs)
    low, high = answer.interval(0.9)
    np.testing.assert_allclose(low.numpy(), np.quantile(answer.samples.numpy(), 0.05, axis=0))
    np.testing.assert_allclose(high.numpy(), np.quantile(answer.samples.numpy(), 0.95, axis=0))


def test_classes_have_what_classes_have() -> None:
    case, model, guide = posed("classes")
    answer = pd.predict(model, guide, X, samples=50, seed=0)
    p = torch.stack([part.probs for part in answer.parts])
    torch.testing.assert_close(answer.probs, p.mean(0))
    assert answer.entropy.shape == answer.mutual_information.shape == answer.variation_ratio.shape == (12,)
    assert pd.judging.brier(answer, case.args[1]).shape == (12,)
    case, model, guide = posed("coins")
    answer = pd.predict(model, guide, X, samples=50, seed=0)
    assert answer.probs.shape == answer.entropy.shape == answer.mutual_information.shape == (12,)
    torch.testing.assert_close(pd.judging.brier(answer, case.args[1]), (answer.probs - case.args[1]).square())
    assert 0 <= pd.ece(answer, case.args[1]) <= 1
    with pytest.raises(pd.errors.NotAvailableError, match=r"interval\(\) is for numbers; .* of Bernoulli"):
        answer.interval()


def test_scores_take_them_too() -> None:
    """The same numbers as of a network's prediction with the same parts."""
    _, model, guide = posed("line")
    answer = pd.predict(model, guide, X, samples=40, seed=0)
    f = torch.stack([torch.stack([p.loc, -2 * p.scale.log()], -1) for p in answer.parts])
    like = pd.HeteroscedasticGaussian()
    from pyro_dropout.generative.likelihoods.moments import block_sums

    twin = pd.prediction.Prediction(like, block_sums(like, f), 40, f, f)
    y = Y.unsqueeze(-1)
    torch.testing.assert_close(pd.crps(answer, Y), pd.crps(twin, y)[:, 0])
    torch.testing.assert_close(pd.judging.pit(answer, Y), pd.judging.pit(twin, y)[:, 0])
    assert pd.coverage(answer, Y, 0.9) == pd.coverage(twin, y, 0.9)
    assert pd.ece(answer, Y) == pytest.approx(pd.ece(twin, y))
    near = pd.judging.predictive_distance(answer, answer)
    assert (near.mean, near.std) == (0.0, 0.0)
    assert near.wasserstein == pytest.approx(0.0, abs=1e-9)


# --- what is refused, and what is not looked at -----------------------------------------------------------------------


def test_a_module_whose_likelihood_is_not_used_is_asked_by_its_trace() -> None:
    case, model, guide = posed("module", "AutoNormal")
    before = pd.to_arviz(model, guide, *case.args, samples=30, seed=0)
    model.likelihood = pd.Gaussian(tau=1e4)
    after = pd.to_arviz(model, guide, *case.args, samples=30, seed=0)
    np.testing.assert_array_equal(after["log_likelihood"]["obs"].values, before["log_likelihood"]["obs"].values)
    assert pd.predict(model, guide, X, samples=10).mean.shape == (12,)


def mistakes() -> dict[str, Any]:
    """What is said of a mistake, as a pattern, and the mistake."""
    (case, model, guide), blind, other, counts = (
        posed("line"),
        AutoNormal(CASES["line"].make()),
        *map(posed, ("unplated", "counts")),
    )
    blind(X)
    return {
        r"missing a required argument: 'x'": lambda: pd.to_arviz(model, guide),
        "observes nothing with these arguments": lambda: pd.khat(model, guide, X, samples=30),
        "site 'obs' is observed here, but is latent": lambda: pd.to_arviz(model, blind, *case.args, samples=30),
        "the posterior has all sites of the model": lambda: pd.predict(model, blind, X, samples=3),
        "samples none of the posterior's sites": lambda: pd.predict(model, other[2], X, samples=3),
        r"site 'theta' has shape \(12,\)": lambda: pd.predict(*posed("schools")[1:], X[:5] + 2, samples=3),
        "does not take compile=True": lambda: pd.predict(model, guide, X, samples=3, compile=True),
        "y must lie in the support of site 'obs', Poisson": lambda: pd.predict(
            *counts[1:], X, samples=3, **counts[0].blind_kwargs
        ).log_prob(Y - 10),
        "'slope': it is a point": lambda: pd.khat(model, AutoDelta(model), *case.args, samples=30),
    }


def test_mistakes_are_told() -> None:
    for said, mistake in mistakes().items():
        with pytest.raises(pd.errors.PyroDropoutError, match=said):
            mistake()


@pytest.mark.parametrize("given", [False, True], ids=["subsample_size", "subsample"])
def test_a_plate_that_draws_a_subsample_is_refused(given: bool) -> None:
    """Its rows differ from draw to draw; one that shows all points answers as a plain one does."""

    def model(x: Tensor, y: Tensor | None = None, shown: int = 4) -> None:
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        how: Any = {"subsample": torch.randperm(len(x))[:shown]} if given else {"subsample_size": shown}
        with pyro.plate("data", len(x), **how) as rows:
            pyro.sample("obs", dist.Normal(mu * x[rows], 1.0), obs=None if y is None else y[rows])

    guide, quick = AutoNormal(model), {"steps": 2, "compile": False, "progress": False}
    pd.fit(model, guide, X, Y, **quick)
    pair = {"normal": AutoNormal, "mean field": pd.AutoMeanField}
    for ask in (
        lambda: pd.to_arviz(model, guide, X, Y),
        lambda: pd.nuts(model, X, Y, progress=False),
        lambda: pd.predict(model, guide, X, samples=3),
        lambda: pd.predict(model, guide, X, Y, samples=3),
        lambda: pd.compare(model, pair, (X, Y), (X, Y), seeds=1, samples=10, **quick),
        lambda: pd.compare(model, pair, (X, Y, 12), (X, Y), seeds=1, samples=10, **quick),
        lambda: pd.sbc(model, lambda *_: guide, X, Y, replications=1, progress=False),
    ):
        with pytest.raises(
            pd.errors.PyroDropoutError, match="plate 'data' draws 4 of 12 points; here all of them are needed"
        ):
            ask()
    if not given:
        answer = pd.predict(model, guide, X, shown=len(X), samples=3, seed=0)
        assert answer.mean.shape == (12,)


def test_forgotten_data_are_refused_and_factors_are_data() -> None:
    """Without data the posterior is the prior; a factor, data inside the model, or a bare density are asked for."""

    def forgotten(x: Tensor, y: Tensor | None = None) -> None:
        mu = pyro.deterministic("mu", 2.0 * pyro.sample("slope", dist.Normal(0.0, 1.0)))
        with pyro.plate("data", len(x)):
            pyro.sample("obs", dist.Normal(mu * x, 1.0), obs=y)

    def by_factor(x: Tensor) -> None:
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        pyro.factor("likelihood", dist.Normal(mu * x, 1.0).log_prob(Y).sum())

    def inside(x: Tensor) -> None:
        forgotten(x, Y)

    def density() -> None:
        pyro.sample("z", dist.Normal(0.0, 1.0))

    quick: Any = {"compile": False, "progress": False}
    net = pd.BayesianNet(torch.nn.Linear(1, 1))

    def ways(model: Any, *args: Tensor) -> list[Any]:
        guide = pd.AutoMeanField(model)
        svi = pd.SVI(model, AutoNormal(model), pyro.optim.Adam({"lr": 0.1}), compile=False)
        return [
            lambda: pd.fit(model, guide, *args, steps=2, **quick),
            lambda: svi.step(*args),
            lambda: pd.nuts(model, *args, samples=2, warmup=2, chains=1, **quick),
        ]

    steps = pd.SVI(net, pd.AutoMeanField(net), pyro.optim.Adam({"lr": 0.1}), compile=False)
    for ask in [*ways(forgotten, X), lambda: steps.step(X.unsqueeze(-1))]:
        with pytest.raises(pd.errors.PyroDropoutError, match="the model observes nothing with these arguments"):
            ask()
    for model, args in ((by_factor, (X,)), (inside, (X,)), (forgotten, (X, Y)), (density, ())):
        pyro.clear_param_store()
        for ask in ways(model, *args):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # two draws of one chain
                ask()


def test_deterministic_sites_are_among_the_variables_of_the_posterior() -> None:
    def line(x: Tensor, y: Tensor | None = None) -> None:
        slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        mean = pyro.deterministic("mean", slope * x)
        with pyro.plate("points", len(x)):
            pyro.sample("obs", dist.Normal(mean, 0.5), obs=y)

    x = torch.linspace(-1.0, 1.0, 5)
    guide = pd.AutoMeanField(line)
    guide(x, x)
    assert pd.predict(line, guide, x, samples=50, seed=0).site == "obs"
    values = pd.to_arviz(line, guide, x, x, samples=20, seed=0)["posterior"]
    assert values["mean"].dims == ("chain", "draw", "mean_dim_0")
    np.testing.assert_allclose(values["mean"], values["slope"].values[..., None] * x.numpy(), rtol=1e-6)
