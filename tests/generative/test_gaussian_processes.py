"""The models of sections 3.1 and 4.6 against numpy networks, closed-form kernels, conjugate posteriors and scipy."""

import copy
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pyro
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Predictive, Trace_ELBO
from pyro.infer.autoguide import AutoDelta, AutoNormal
from pyro.optim import Adam
from scipy import special, stats
from torch import Tensor, nn

from pyro_dropout.generative.finite_rank_normal import FiniteRankNormal
from pyro_dropout.generative.gaussian_processes import DeepGP, FiniteRankGP
from pyro_dropout.generative.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian
from pyro_dropout.mathematics.covariance import ArcCosine, Layered
from pyro_dropout.mathematics.distributions import BernoulliMixture
from pyro_dropout.mathematics.errors import PyroDropoutError, RangeError, ShapeError
from pyro_dropout.mathematics.finite_rank import finite_rank_features, finite_rank_log_marginal
from pyro_dropout.mathematics.per_data_point import PerDataPoint

NUMPY: dict[str, Callable[[Any], Any]] = {"relu": lambda a: np.maximum(a, 0), "tanh": np.tanh}
POINTS = torch.tensor([[-1.0, 0.5], [0.3, -0.2], [1.5, 1.0], [0.0, 0.0], [-0.4, -2.0]])
WIDTHS = [6, 4, 3]  # more and fewer units than points: both ways in which function space is drawn
LENGTH, BIAS_LENGTH = 0.8, 1.3
SCALES = {"length_scale": LENGTH, "bias_length_scale": BIAS_LENGTH}
UPPER = np.triu_indices(len(POINTS))


def functions(model: nn.Module, count: int, x: Tensor = POINTS) -> np.ndarray:
    """Draws of f from the prior, (count, N, D)."""
    with torch.no_grad(), pyro.plate("draws", count, dim=-2):
        return model(x).double().numpy()


def numpy_functions(name: str, depth: int, shared: bool, count: int, outputs: int) -> np.ndarray:
    """The same draws, from the definition of the network."""
    rng, act, x = np.random.default_rng(7), NUMPY[name], POINTS.numpy().astype(float)
    weight = rng.normal(size=(count, WIDTHS[0], 2)) / LENGTH
    phi = act(np.einsum("nq,skq->snk", x, weight) + rng.normal(size=(count, 1, WIDTHS[0])) / BIAS_LENGTH)
    phi /= math.sqrt(WIDTHS[0])
    for below, width in itertools.pairwise(WIDTHS[:depth]):
        h = phi @ rng.normal(size=(count, below, width))
        if shared:
            h = h @ (rng.normal(size=(count, width, width)) / LENGTH)
        phi = act(h + rng.normal(size=(count, 1, width)) / BIAS_LENGTH) / math.sqrt(width)
    return phi @ rng.normal(size=(count, WIDTHS[depth - 1], outputs))


def moments(f: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Second moments between points, and fourth ones between outputs, each with its standard error."""
    second = np.einsum("sid,sjd->sij", f, f)[:, *UPPER] / f.shape[-1]
    fourth = f[..., 0] ** 2 * f[..., 1] ** 2
    each = np.concatenate([second, fourth], axis=1)
    return each.mean(0), each.std(0) / math.sqrt(len(f))


@pytest.mark.parametrize("name", ["relu", "tanh"])
@pytest.mark.parametrize(("depth", "shared"), [(1, False), (2, False), (3, False), (2, True), (3, True)])
@pytest.mark.parametrize(("space", "scaling"), [("weight", "features"), ("weight", "prior"), ("function", "features")])
def test_both_spaces_have_the_prior_of_the_network(
    name: str, depth: int, shared: bool, space: Any, scaling: Any
) -> None:
    # 20 comparisons at 4 standard errors: fails on correct code with probability 0.0013.
    model = DeepGP(
        2, WIDTHS[:depth], 2, nonlinearity=name, space=space, scaling=scaling, shared_covariance=shared, **SCALES
    )
    ours, our_error = moments(functions(model, 20_000))
    oracle, error = moments(numpy_functions(name, depth, shared, 20_000, 2))
    print(f"largest difference: {(np.abs(ours - oracle) / np.hypot(our_error, error)).max():.2f} standard errors")
    np.testing.assert_array_less(np.abs(ours - oracle), 4 * np.hypot(our_error, error))


@pytest.mark.parametrize(
    ("space", "depth", "count", "outputs"), [("weight", 1, 1000, 30), ("weight", 2, 24, 300), ("function", 2, 500, 20)]
)
def test_wide_layers_have_the_closed_form_covariance(space: Any, depth: int, count: int, outputs: int) -> None:
    # 15 comparisons at 4 standard errors: fails on correct code with probability below 0.001.
    width = 2000
    kernel: Any = ArcCosine(2, **SCALES)
    kernel = Layered(ArcCosine(1, bias_length_scale=BIAS_LENGTH), kernel) if depth == 2 else kernel
    exact = kernel(POINTS).detach().numpy()[UPPER]
    model = DeepGP(2, [width] * depth, outputs, space=space, **SCALES)
    f = np.concatenate([functions(model, 4) for _ in range(count // 4)])
    each = np.einsum("sid,sjd->sij", f, f)[:, *UPPER] / outputs
    error = each.std(0) / math.sqrt(count)
    np.testing.assert_array_less(np.abs(each.mean(0) - exact), 4 * error + 5 * exact / width)
    assert (error < 0.05 * exact + 0.01).all(), "the test has lost its power"


def one_trace(scaling: str, space: str) -> tuple[Any, Tensor, Tensor, float]:
    """A trace of the model, and of it the features Φ, the targets and τ, in float64."""
    x, y = torch.randn(9, 2).double(), torch.randn(9, 3).double()
    model = FiniteRankGP(
        2, 5, 3, nonlinearity="tanh", space=space, scaling=scaling, jitter=1e-3, likelihood=Gaussian(2.5), **SCALES
    ).double()
    trace = poutine.trace(model).get_trace(x, y)
    trace.compute_log_prob()
    values = {name: trace.nodes[name]["value"] for name in ("W1", "b1")}
    return trace, finite_rank_features(x, values["W1"], values["b1"], "tanh"), y, model.likelihood.tau.item()


@pytest.mark.parametrize("scaling", ["features", "prior"])
def test_weights_integrate_out_to_the_finite_rank_marginal(scaling: str) -> None:
    trace, features, y, tau = one_trace(scaling, "weight")
    phi = features.numpy()
    w2 = trace.nodes["W2"]["value"].numpy() * (math.sqrt(5) if scaling == "prior" else 1.0)
    precision = tau * phi.T @ phi + np.eye(5)
    # p(y) = p(y | w) p(w) / p(w | y), at any w
    joint = float(trace.nodes["y"]["log_prob_sum"] + trace.nodes["W2"]["log_prob_sum"])
    joint -= 3 * 5 * math.log(5) / 2 if scaling == "prior" else 0.0  # densities of w, not of w/√K
    posterior = sum(
        stats.multivariate_normal.logpdf(
            w2[d], np.linalg.solve(precision, tau * phi.T @ y[:, d].numpy()), np.linalg.inv(precision)
        )
        for d in range(3)
    )
    evidence = finite_rank_log_marginal(y, features, tau).item()
    assert joint - posterior == pytest.approx(evidence, rel=1e-9)
    direct = stats.multivariate_normal(np.zeros(9), phi @ phi.T + np.eye(9) / tau)
    assert direct.logpdf(y.numpy().T).sum() == pytest.approx(evidence, rel=1e-9)


def test_function_values_integrate_out_to_the_same_marginal() -> None:
    trace, features, y, tau = one_trace("features", "function")
    phi = features.numpy()
    covariance = phi @ phi.T
    covariance += 1e-3 * np.diag(covariance).mean() * np.eye(9)
    posterior = np.linalg.inv(np.linalg.inv(covariance) + tau * np.eye(9))
    f = trace.nodes["F"]["value"].numpy()
    joint = float(trace.nodes["y"]["log_prob_sum"] + trace.nodes["F"]["log_prob_sum"])
    joint -= sum(
        stats.multivariate_normal.logpdf(f[:, d], tau * posterior @ y[:, d].numpy(), posterior) for d in range(3)
    )
    direct = stats.multivariate_normal(np.zeros(9), covariance + np.eye(9) / tau)
    assert joint == pytest.approx(direct.logpdf(y.numpy().T).sum(), rel=1e-8)


@pytest.mark.parametrize("space", ["weight", "function"])
def test_depth_one_is_the_finite_rank_gp(space: Any) -> None:
    y = torch.randn(5, 2)
    traces = []
    for model in (DeepGP(2, [7], 2, space=space, **SCALES), FiniteRankGP(2, 7, 2, space=space, **SCALES)):
        pyro.set_rng_seed(0)
        traces.append(poutine.trace(model).get_trace(POINTS, y))
    deep, single = traces
    torch.testing.assert_close(deep.nodes["_RETURN"]["value"], single.nodes["_RETURN"]["value"], rtol=0, atol=0)
    assert deep.log_prob_sum() == single.log_prob_sum()
    assert ("F1" in deep.nodes, "F" in single.nodes) == (space == "function",) * 2


@pytest.mark.parametrize("units", [3, 12])
def test_the_finite_rank_normal_is_a_normal(units: int, dtype: torch.dtype) -> None:
    phi = torch.randn(2, 1, 8, units, dtype=torch.float64)
    normal = FiniteRankNormal(phi.to(dtype), 4, jitter=1e-4)
    value = normal.rsample((6,))
    assert value.shape == (6, 2, 1, 8, 4)
    assert value.dtype == dtype
    density = normal.log_prob(value)
    assert density.shape == (6, 2, 1)
    for b in range(2):
        covariance = (phi[b, 0] @ phi[b, 0].mT).numpy()
        covariance += 1e-4 * np.diag(covariance).mean() * np.eye(8)
        np.testing.assert_allclose(normal.variance[b, 0, :, 1], np.diag(covariance), rtol=1e-5)
        oracle = stats.multivariate_normal(np.zeros(8), covariance)
        expected = oracle.logpdf(value[:, b, 0].double().numpy().swapaxes(-1, -2)).sum(-1)
        # the errors of float32 features and values meet 1/ε = 10⁴
        np.testing.assert_allclose(density[:, b, 0], expected, rtol=1e-9 if dtype == torch.float64 else 0.05)
    assert normal.mean.shape == normal.variance.shape == (2, 1, 8, 4)
    wider = normal.expand((5, 2, 1))
    assert wider.rsample().shape == (5, 2, 1, 8, 4)
    torch.testing.assert_close(wider.log_prob(value[:5]), density[:5])


def test_dead_units_leave_a_density(dtype: torch.dtype) -> None:
    normal = FiniteRankNormal(torch.zeros(4, 3, dtype=dtype), 1)
    assert torch.isfinite(normal.log_prob(normal.sample()))


@pytest.mark.parametrize("space", ["weight", "function"])
@pytest.mark.parametrize("shared", [False, True])
def test_stock_svi_trains_with_vectorised_particles(space: Any, shared: bool) -> None:
    x = torch.linspace(-2, 2, 12).unsqueeze(-1)
    model = DeepGP(1, [8, 5], 1, nonlinearity="tanh", space=space, shared_covariance=shared, jitter=0.1)
    guide = AutoNormal(model)
    svi = SVI(model, guide, Adam({"lr": 0.02}), Trace_ELBO(num_particles=3, vectorize_particles=True))
    losses = [svi.step(x, torch.sin(2 * x)) for _ in range(80)]
    assert np.isfinite(losses).all()
    assert np.mean(losses[-20:]) < np.mean(losses[:20])


@pytest.mark.parametrize("space", ["weight", "function"])
@pytest.mark.parametrize("shared", [False, True])
def test_particles_have_the_loss_of_one(space: Any, shared: bool) -> None:
    y = torch.randn(5, 2)
    model = DeepGP(2, WIDTHS, 2, space=space, shared_covariance=shared, output_bias=True, mean=nn.Linear(2, 2))
    guide = AutoDelta(model)  # every particle is the same
    one = Trace_ELBO().loss(model, guide, POINTS, y, 50 if space == "weight" else 5)
    many = Trace_ELBO(num_particles=4, vectorize_particles=True)
    assert many.loss(model, guide, POINTS, y, 50 if space == "weight" else 5) == pytest.approx(one, rel=1e-5)


@pytest.mark.parametrize("space", ["weight", "function"])
@pytest.mark.parametrize("likelihood", [Gaussian(4.0), Categorical()])
def test_parallel_prediction_is_the_sequential_one(space: Any, likelihood: Any) -> None:
    model = DeepGP(2, WIDTHS, 3, space=space, output_bias=True, likelihood=likelihood)
    guide = AutoNormal(model)
    guide(POINTS, torch.zeros(5).long() if isinstance(likelihood, Categorical) else torch.zeros(5, 3))
    sites = ["_RETURN", "y", "W1", "b2"]
    from_guide = [
        Predictive(model, guide=guide, num_samples=4, parallel=parallel, return_sites=sites)(POINTS)
        for parallel in (True, False)
    ]
    assert {k: v.shape for k, v in from_guide[0].items()} == {k: v.shape for k, v in from_guide[1].items()}
    assert from_guide[0]["_RETURN"].shape == (4, 5, 3)
    samples = Predictive(guide, num_samples=4)(POINTS)
    assert samples["W1"].shape == (4, 6, 2), "without a place for the plate: the guide has none"
    alone = Predictive(model, samples, return_sites=["_RETURN"])(POINTS)["_RETURN"]
    for given in (samples, {name: value.unsqueeze(1) for name, value in samples.items()}):
        together = Predictive(model, given, return_sites=["_RETURN"], parallel=True)(POINTS)["_RETURN"]
        torch.testing.assert_close(together, alone)


@pytest.mark.parametrize("space", ["weight", "function"])
def test_parallel_draws_have_the_sequential_distribution(space: Any) -> None:
    # A Kolmogorov-Smirnov test at each of 5 points, each at level 1e-4: fails on correct code with probability 5e-4.
    model = DeepGP(2, WIDTHS[:2], 1, space=space)
    draws = [
        Predictive(model, num_samples=500, parallel=parallel, return_sites=["y"])(POINTS)["y"].squeeze(-1).numpy()
        for parallel in (True, False)
    ]
    assert draws[0].shape == draws[1].shape == (500, 5)
    assert min(stats.ks_2samp(draws[0][:, n], draws[1][:, n]).pvalue for n in range(5)) > 1e-4


@pytest.mark.parametrize("space", ["weight", "function"])
def test_classes_come_from_the_softmax_of_f(space: Any) -> None:
    y = torch.tensor([0, 2, 1, 1, 0])
    model = FiniteRankGP(2, 10, 3, space=space, likelihood=Categorical())
    trace = poutine.trace(model).get_trace(POINTS, y)
    trace.compute_log_prob()
    logits = special.log_softmax(trace.nodes["_RETURN"]["value"].numpy(), axis=1)
    assert trace.nodes["y"]["log_prob_sum"].item() == pytest.approx(logits[np.arange(5), y].sum(), rel=1e-5)
    assert poutine.trace(model).get_trace(POINTS).nodes["y"]["value"].shape == (5,)


def test_other_likelihoods_fit_too() -> None:
    pairs = FiniteRankGP(2, 4, 2, likelihood=HeteroscedasticGaussian())
    assert pairs(POINTS, torch.randn(5, 1)).shape == (5, 2)
    coins = DeepGP(2, [4], 1, likelihood=Bernoulli())
    assert coins(POINTS, torch.tensor([0, 1, 1, 0, 1])).shape == (5, 1)


@pytest.mark.parametrize("space", ["weight", "function"])
def test_a_model_has_the_type_that_it_is_moved_to(space: Any, dtype: torch.dtype) -> None:
    model = DeepGP(2, WIDTHS, 2, space=space, mean=nn.Linear(2, 2), output_bias=True).to(dtype)
    trace = poutine.trace(model).get_trace(POINTS.to(dtype), torch.randn(5, 2, dtype=dtype))
    values = [node["value"] for name, node in trace.iter_stochastic_nodes() if name != "data"]
    assert {value.dtype for value in values} == {dtype}
    assert trace.nodes["_RETURN"]["value"].dtype == trace.log_prob_sum().dtype == dtype


def test_sites_say_what_guides_want_to_know() -> None:
    model = DeepGP(2, [6, 4], 3, shared_covariance=True, output_bias=True)
    trace = poutine.trace(model).get_trace(POINTS)
    shapes = {"W1": (6, 2), "b1": (6,), "W2": (4, 6), "W2_inner": (4, 4), "b2": (4,), "W3": (3, 4), "b_out": (3,)}
    assert model.sites == shapes
    for name, shape in shapes.items():
        node = trace.nodes[name]
        assert node["value"].shape == node["fn"].event_shape == shape
        expected = {"row_dim": 1, "kind": "weight"} if len(shape) == 2 else {"kind": "bias"}
        assert {key: node["infer"][key] for key in expected} == expected
    assert set(DeepGP(2, [6, 4], 3).sites) == {"W1", "b1", "W2", "b2", "W3"}


def test_priors_are_as_wide_as_they_are_told() -> None:
    scales = torch.tensor([0.5, 4.0])
    model = DeepGP(
        2, [9, 4], 1, scaling="prior", shared_covariance=True, length_scale=[scales, 5.0], bias_length_scale=[2.0, 8.0],
        output_bias=True,
    )  # fmt: skip
    trace = poutine.trace(model).get_trace(POINTS)
    expected = {"W1": [2.0, 0.25], "b1": 0.5, "W2": 1 / 3, "W2_inner": 0.2, "b2": 0.125, "W3": 0.5, "b_out": 0.125}
    for name, std in expected.items():
        found = trace.nodes[name]["fn"].stddev
        torch.testing.assert_close(found, torch.tensor(std).expand(found.shape))


def test_layers_have_nonlinearities_of_their_own() -> None:
    weights = {"W1": torch.randn(3, 2), "b1": torch.randn(3), "W2": torch.randn(2, 3), "b2": torch.randn(2)}
    weights["W3"] = torch.randn(1, 2)
    model = DeepGP(2, [3, 2], 1, nonlinearity=["cos", torch.sigmoid])
    w = {name: value.numpy().astype(float) for name, value in weights.items()}
    first = np.cos(POINTS.numpy() @ w["W1"].T + w["b1"]) / math.sqrt(3)
    expected = special.expit(first @ w["W2"].T + w["b2"]) / math.sqrt(2) @ w["W3"].T
    np.testing.assert_allclose(poutine.condition(model, weights)(POINTS), expected, rtol=1e-4, atol=1e-6)


def test_mini_batches_are_scaled_up() -> None:
    model, y = FiniteRankGP(2, 6, 1), torch.randn(5, 1)
    sums = []
    for num_data in (None, 50):
        pyro.set_rng_seed(1)
        trace = poutine.trace(model).get_trace(POINTS, y, num_data)
        trace.compute_log_prob()
        sums.append(trace.nodes["y"]["log_prob_sum"].item())
    assert sums[1] == pytest.approx(10 * sums[0], rel=1e-6)


def test_a_mean_function_is_added_and_trained() -> None:
    plain = FiniteRankGP(2, 6, 1, mean=lambda x: 100 + x[:, :1])
    trace = poutine.trace(plain).get_trace(POINTS)
    without = {name: trace.nodes[name]["value"] for name in ("W1", "b1", "W2")}
    f = poutine.condition(FiniteRankGP(2, 6, 1), without)(POINTS)
    torch.testing.assert_close(trace.nodes["_RETURN"]["value"], f + 100 + POINTS[:, :1])
    model = FiniteRankGP(2, 6, 1, mean=nn.Linear(2, 1), likelihood=Gaussian(10.0))
    svi = SVI(model, AutoNormal(model), Adam({"lr": 0.05}), Trace_ELBO())
    start = model.mean.bias.item()
    for _ in range(50):
        svi.step(POINTS, 3 * POINTS[:, :1] - 20)
    assert model.mean.bias.item() < start - 0.5, "the mean does not move"
    twin = copy.deepcopy(model)
    names = {name for name in pyro.get_param_store() if "mean" in name}
    poutine.trace(twin).get_trace(POINTS)
    new = {name for name in pyro.get_param_store() if "mean" in name} - names
    assert len(new) == 2, "a copy must not share parameters with the original"


@pytest.mark.parametrize("particles", [1, 3])
def test_draws_for_each_data_point_are_repeated_points(particles: int) -> None:
    # With keep=1 and scale=0 every draw is the mean, so the stand-ins can be used as they are.
    model = DeepGP(2, [6, 4], 3, output_bias=True)
    plain, marked = {}, {}
    for site, shape in model.sites.items():
        plain[site] = torch.randn(shape)
        value = plain[site] if particles == 1 else plain[site].expand(particles, 1, *shape)
        marked[site] = value.clone() if site == "W1" and particles == 1 else value
    for site in ("W1", "W2", "W3"):
        recipe = PerDataPoint(site, BernoulliMixture(plain[site], keep=1.0))
        marked[site] = recipe.mark(marked[site].clone())
    expected = poutine.condition(model, plain)(POINTS)
    with poutine.trace() as tape:
        f = poutine.condition(model, marked)(POINTS)
    torch.testing.assert_close(
        f, expected.expand(particles, 5, 3).squeeze(0) if particles == 1 else expected.expand(3, 5, 3)
    )
    assert tape.trace.nodes["y"]["value"].shape == f.shape
    if particles > 1:
        marked["b1"] = torch.randn(particles, 1, 6)
        with pytest.raises(PyroDropoutError, match="'b1' has shared draws"):
            poutine.condition(model, marked)(POINTS)
    with pytest.raises(PyroDropoutError, match="function space has one W1"):
        poutine.condition(DeepGP(2, [6, 4], 3, space="function"), {"W1": marked["W1"]})(POINTS)


GOOD: dict[str, Any] = {"in_features": 2, "widths": [3, 4], "out_features": 1}


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("bad", "error", "says"),
    [
        ({"in_features": 0}, RangeError, "in_features must be a whole number"),
        ({"out_features": 1.5}, RangeError, "out_features must be a whole number"),
        ({"widths": []}, RangeError, "widths must be a list of at least one"),
        ({"widths": 5}, RangeError, "widths must be a list of at least one"),
        ({"widths": "53"}, RangeError, "widths must be a list of at least one"),
        ({"widths": [3, -1]}, RangeError, "widths must be a whole number of at least 1; got -1"),
        ({"nonlinearity": "gelu"}, RangeError, "nonlinearity must be one of relu"),
        ({"nonlinearity": ["relu"]}, RangeError, "nonlinearity must be one value, or a list of 2; got a list of 1"),
        ({"space": "phase"}, RangeError, "space must be 'weight' or 'function'; got 'phase'"),
        ({"scaling": "none"}, RangeError, "scaling must be 'features' or 'prior'; got 'none'"),
        ({"length_scale": 0.0}, RangeError, "length_scale must be positive"),
        ({"length_scale": 1e-60}, RangeError, "length_scale must be positive"),
        ({"length_scale": torch.ones(3)}, ShapeError, r"length_scale must have shape \(\) or \(2,\) for W1"),
        ({"length_scale": [1.0, 1.0]}, RangeError, "length_scale must be one value, or a list of 1"),
        ({"bias_length_scale": -1}, RangeError, "bias_length_scale must be positive"),
        ({"bias_length_scale": [1.0]}, RangeError, "bias_length_scale must be one value, or a list of 2"),
        ({"jitter": 0.0}, RangeError, "jitter must be positive"),
        ({"mean": 3.0}, RangeError, "mean must be a function of x; got float 3.0"),
        ({"likelihood": "gaussian"}, RangeError, "likelihood must be one of pyro_dropout's; got str"),
    ],
)
def test_the_constructor_says_what_is_wrong(bad: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        DeepGP(**{**GOOD, **bad})


@pytest.mark.usefixtures("unchecked_shapes")
def test_a_call_says_what_is_wrong() -> None:
    model = DeepGP(**GOOD)
    with pytest.raises(RangeError, match="width must be a whole number"):
        FiniteRankGP(2, 0, 1)
    for x in (torch.zeros(5), torch.zeros(5, 3), torch.zeros(1, 5, 2)):
        with pytest.raises(ShapeError, match=r"x must have shape \(N, 2\)"):
            model(x)
    with pytest.raises(RangeError, match=r"x must be of the model's type torch.float32; got torch.float64"):
        model(POINTS.double())
    with pytest.raises(ShapeError, match="y must have shape"):
        model(POINTS, torch.zeros(5))
    with pytest.raises(ShapeError, match=r"mean\(x\) must have shape \(5, 1\); got \(5, 3\)"):
        DeepGP(**GOOD, mean=nn.Linear(2, 3))(POINTS)
    with pytest.raises(RangeError, match="num_data must be the number of points in x, 5, in function space; got 50"):
        DeepGP(**GOOD, space="function")(POINTS, torch.zeros(5, 1), 50)
