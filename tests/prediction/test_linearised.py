"""Linearised predictions: against closed forms, against draws of a narrow posterior, and for networks of all kinds."""

import functools
import itertools
import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pyro.infer.autoguide import AutoNormal
from scipy import integrate, stats
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import pyro_dropout as pd
from pyro_dropout.generative.likelihoods.moments import (
    Nodes,
    outputs_of,
)
from pyro_dropout.mathematics.normal import sigmoid_moments
from pyro_dropout.prediction.linearised_prediction import LinearisedPrediction
from tests.contracts.guides import GUIDES
from tests.networks.layers import Output

F64 = torch.float64


def linearised(model: Any, posterior: Any, x: Any, **options: Any) -> LinearisedPrediction:
    found: LinearisedPrediction = pd.predict(model, posterior, x, method="linearised", **options)
    return found


def mlp(out: int = 2, dtype: torch.dtype = F64) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, out)).to(dtype)


# --- closed forms -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GUIDES)
def test_a_linear_model_is_exact(name: str) -> None:
    """f = Wx + b is linear in its weights, so that the covariance is that of the guide itself."""
    torch.manual_seed(0)
    model = pd.BayesianNet(nn.Linear(3, 2).to(F64), likelihood=pd.Gaussian(tau=torch.tensor([4.0, 2.0])))
    guide, x = GUIDES[name](model), torch.randn(5, 3, dtype=F64)
    answer = linearised(model, guide, x, shared=True)
    q = guide.mean()
    assert torch.allclose(answer.mean, x @ q["weight"].T + q["bias"], atol=1e-12)
    # Σ of (W, b) by unit rows; ∂f_d/∂W_ek = δ_de x_k
    unit = torch.eye(8, dtype=F64)
    root = guide.covariance_root({"weight": unit[:, :6].reshape(8, 2, 3), "bias": unit[:, 6:]})
    jacobian = torch.cat(
        [torch.einsum("de,nk->ndek", torch.eye(2, dtype=F64), x).flatten(2), unit[6:, 6:].expand(5, 2, 2)], -1
    )
    f = torch.einsum("nda,ab,meb->ndme", jacobian, root @ root.T, jacobian)
    noise = torch.einsum(
        "nm,de,d->ndme", torch.eye(5, dtype=F64), torch.eye(2, dtype=F64), torch.tensor([0.25, 0.5], dtype=F64)
    )
    assert torch.allclose(answer.joint_covariance, f + noise, atol=1e-10)
    own = torch.einsum("ndne->nde", f + noise)
    assert torch.allclose(answer.covariance, own, atol=1e-10)
    assert torch.allclose(answer.variance, own.diagonal(dim1=1, dim2=2), atol=1e-10)
    assert torch.allclose(answer.aleatoric, torch.tensor([0.25, 0.5], dtype=F64).expand(5, 2))
    y = torch.randn(5, 2, dtype=F64)
    density = [stats.multivariate_normal(m, c).logpdf(t) for m, c, t in zip(answer.mean, own, y, strict=True)]
    assert np.allclose(answer.log_prob(y), density, atol=1e-10)
    low, high = answer.interval(0.9)
    assert np.allclose([low, high], stats.norm.ppf([[[0.05]], [[0.95]]], answer.mean, answer.std), atol=1e-8)


@pytest.mark.parametrize("name", ["dropout", "mean-field", "low-rank-net", "row-mixture"])
def test_a_narrow_posterior_is_that_of_draws(name: str) -> None:
    """The Jacobian of a small network: some 60 comparisons at 4 standard errors of 20,000 draws."""
    torch.manual_seed(1)
    model = pd.BayesianNet(mlp(), likelihood=pd.Gaussian(tau=4.0))
    guide = GUIDES[name](model, init_scale=1e-4, **({"spread": 1e-4} if name == "row-mixture" else {}))
    if name == "dropout":
        guide = pd.AutoDropout(model, keep=1 - 1e-9, scale=1e-4)
    x = torch.randn(5, 3, dtype=F64)
    answer, drawn = linearised(model, guide, x), pd.predict(model, guide, x, samples=20_000, shared=True, seed=0)
    assert bool(((answer.mean - drawn.mean).abs() <= 4 * (answer.epistemic / 20_000).sqrt() + 1e-7).all())
    assert torch.allclose(answer.epistemic, drawn.epistemic, rtol=4 * math.sqrt(2 / 20_000))
    spread = torch.einsum("ni,nj->nij", answer.epistemic.sqrt(), answer.epistemic.sqrt())
    assert bool(((answer.covariance - drawn.covariance).abs() <= 5 * spread * math.sqrt(2 / 20_000)).all())


# --- likelihoods: against integrals, and against many draws of the Gaussian -------------------------------------------

MEANS = torch.tensor([[0.3, -1.2], [-4.0, 2.0], [8.0, 0.0]], dtype=F64)
COVARIANCES = torch.tensor([[[0.5, 0.3], [0.3, 0.4]], [[4.0, -1.5], [-1.5, 1.0]], [[30.0, 2.0], [2.0, 0.2]]], dtype=F64)


def gaussian_draws(count: int = 200_000) -> Tensor:
    z = torch.randn(count, 1, 2, dtype=F64, generator=torch.Generator().manual_seed(0))
    return MEANS + (torch.linalg.cholesky(COVARIANCES) @ z.unsqueeze(-1)).squeeze(-1)


@pytest.mark.parametrize(
    ("likelihood", "y"),
    [
        (pd.HeteroscedasticGaussian(), torch.tensor([[0.5], [-3.0], [20.0]], dtype=F64)),
        (pd.Categorical(), torch.tensor([0, 1, 1])),
        (pd.Bernoulli(), torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]], dtype=F64)),
        (pd.Gaussian(tau=2.0), torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]], dtype=F64)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_moments_and_densities_are_those_of_draws(likelihood: Any, y: Tensor) -> None:
    """Each against 200,000 draws of f at 5 standard errors, some 40 comparisons: wrong in one of 4e4 runs."""
    f, nodes = gaussian_draws(), Nodes(4096, 0)
    found = outputs_of(likelihood, nodes).moments(MEANS, COVARIANCES)
    p = likelihood.distribution(f)
    means = p.probs if isinstance(likelihood, pd.Categorical) else p.mean
    noise = means * (1 - means) if isinstance(likelihood, pd.Categorical) else p.variance
    square = (means - found["mean"]).square()
    density = p.log_prob(y).exp()
    products = torch.einsum("tni,tnj->tnij", means - found["mean"], means - found["mean"])
    shown = {"mean": means, "spread": square, "noise": noise}
    got = dict(found)
    if not isinstance(likelihood, pd.Categorical):
        shown["products"], got["products"] = products, outputs_of(likelihood, nodes).products(MEANS, COVARIANCES)
    if "votes" in found:
        odds = f if isinstance(likelihood, pd.Bernoulli) else f - f.flip(-1)
        shown["votes"] = (odds > 0).to(F64)
        shown["surprise"] = p.base_dist.entropy() if isinstance(likelihood, pd.Bernoulli) else p.entropy()
    shown["density"] = density
    got["density"] = outputs_of(likelihood, nodes).log_prob(MEANS, COVARIANCES, y).exp()
    for name, each in shown.items():
        error = each.std(0) / len(each) ** 0.5
        assert bool(((each.mean(0) - got[name]).abs() <= 5 * error + 2e-3 * got[name].abs()).all()), name


def test_one_target_is_exact() -> None:
    """log p(y) of coins, counts and a learned noise, by scipy's quadrature, also where y is all but impossible."""
    for mean, std in ((0.3, 0.01), (2.0, 0.9), (-5.0, 10.0), (-30.0, 2.0)):
        m, s = torch.tensor(mean, dtype=F64), torch.tensor(std, dtype=F64)
        # The sigmoid is a step where f is wide, so the integral is cut there.
        cut = sorted({mean - 12 * std, mean + 12 * std, *(c for c in (-8.0, 0.0, 8.0) if abs(c - mean) < 12 * std)})
        of = functools.partial(lambda f, m, s: stats.norm.pdf(f, m, s) / (1 + np.exp(-f)), m=mean, s=std)
        parts = [integrate.quad(of, a, b, epsabs=0, epsrel=1e-11)[0] for a, b in itertools.pairwise(cut)]
        one = outputs_of(pd.Bernoulli(), Nodes(2, 0)).log_prob(
            m.reshape(1, 1), s.reshape(1, 1, 1) ** 2, torch.ones(1, 1)
        )
        assert math.isclose(float(one), math.log(sum(parts)), rel_tol=1e-9)
        assert math.isclose(float(sigmoid_moments(m, s)[0]), sum(parts), rel_tol=1e-5)
    f = np.linspace(-30, 30, 600_001)
    for likelihood, y, mean, covariance in (
        (pd.Poisson(), 3.0, [0.0], [[1.0]]),
        (pd.Poisson(), 20_000.0, [3.0], [[0.25]]),
        (pd.Counts(2.0), 2_000.0, [3.0], [[0.25]]),
        (pd.HeteroscedasticGaussian(), 0.5, [0.3, -1.0], [[0.5, 0.3], [0.3, 0.4]]),
        (pd.HeteroscedasticGaussian(), 40.0, [0.0, 2.0], [[1e-4, 0.0], [0.0, 0.5]]),
    ):
        m, c = torch.tensor([mean], dtype=F64), torch.tensor([covariance], dtype=F64)
        target = torch.tensor([[y]], dtype=F64)
        found = outputs_of(likelihood, Nodes(2, 0)).log_prob(m, c, target).item()
        width = math.sqrt(covariance[-1][-1])
        given = stats.norm.logpdf(f, mean[-1], width)
        if isinstance(likelihood, pd.Poisson):
            each = stats.poisson.logpmf(y, np.exp(f)) + given
        elif isinstance(likelihood, pd.Counts):
            each = stats.nbinom.logpmf(y, 2.0, 2.0 / (2.0 + np.exp(f))) + given
        else:
            slope = covariance[0][1] / covariance[1][1]
            variance = covariance[0][0] - slope * covariance[0][1] + np.exp(-f)
            each = stats.norm.logpdf(y, mean[0] + slope * (f - mean[1]), np.sqrt(variance)) + given
        expected = each.max() + math.log(np.trapezoid(np.exp(each - each.max()), f))
        assert math.isclose(found, expected, rel_tol=1e-9, abs_tol=1e-9)


# --- what comes back is a Prediction ----------------------------------------------------------------------------------


def test_scores_of_numbers_are_exact() -> None:
    torch.manual_seed(0)
    model = pd.BayesianNet(mlp(1), likelihood=pd.Gaussian(tau=4.0))
    x, y = torch.randn(30, 3, dtype=F64), torch.randn(30, 1, dtype=F64)
    answer = linearised(model, pd.AutoMeanField(model, init_scale=0.3), x, seed=0)
    z = (y - answer.mean) / answer.std
    crps = answer.std * (
        z * (2 * torch.special.ndtr(z) - 1)
        + 2 * torch.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
        - 1 / math.sqrt(math.pi)
    )
    assert torch.allclose(pd.crps(answer, y), crps, rtol=1e-6)
    assert torch.allclose(pd.judging.pit(answer, y).flatten(), torch.special.ndtr(z).flatten(), atol=1e-9)
    assert torch.allclose(pd.crps(answer, y, method="sample", seed=0).mean(), pd.crps(answer, y).mean(), rtol=0.1)
    assert 0 < pd.judging.refit_tau(answer, y) < 4
    noisy = pd.BayesianNet(mlp(2), likelihood=pd.HeteroscedasticGaussian())
    wide = linearised(noisy, pd.AutoMeanField(noisy, init_scale=0.2), x, seed=0, samples=4000)
    low, high = wide.interval(0.8)
    drawn = pd.predict(noisy, pd.AutoMeanField(noisy, init_scale=1e-6), x, samples=10)
    assert bool((low < drawn.mean).all() and (drawn.mean < high).all())
    draws = torch.stack([wide.draw_targets(...)[:, n] for n in range(3)], 1)
    inside = ((draws > low[:3]) & (draws < high[:3])).double().mean()
    assert abs(float(inside) - 0.8) < 0.02


def test_samples_have_the_covariance_and_the_seed_is_restored() -> None:
    model = pd.BayesianNet(mlp(2))
    guide, x = pd.AutoMeanField(model, init_scale=0.3), torch.randn(3, 3, dtype=F64)
    before = torch.random.get_rng_state()
    for shared in (False, True):
        answer = linearised(model, guide, x, samples=40_000, seed=3, shared=shared)
        f = answer.samples.flatten(1)
        covariance = linearised(model, guide, x, shared=True).joint_covariance.reshape(6, 6) - torch.eye(6, dtype=F64)
        if not shared:
            covariance = torch.block_diag(*(covariance[k : k + 2, k : k + 2] for k in (0, 2, 4)))
        size = covariance.diagonal().sqrt()
        assert bool(((f.T.cov() - covariance).abs() <= 6 * torch.outer(size, size) * math.sqrt(2 / 40_000)).all())
    answer = linearised(model, guide, x, samples=10, seed=3, keep_samples=False)
    with pytest.raises(pd.errors.PyroDropoutError, match="samples were not kept"):
        _ = answer.samples
    with pytest.raises(pd.errors.PyroDropoutError, match="shared=True"):
        _ = answer.joint_covariance
    torch.random.set_rng_state(before)
    linearised(model, guide, x, seed=3)
    assert torch.equal(torch.random.get_rng_state(), before)


# --- networks of all kinds --------------------------------------------------------------------------------------------


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(5, 3), nn.Linear(4, 2)

    def forward(self, ids: Tensor, value: Tensor, gain: float = 1.0) -> Tensor:
        return self.last(torch.cat([self.table(ids).mean(1), gain * value], -1)).tanh()


def in_place(net: nn.Module, x: Tensor) -> Tensor:
    """Writes into a tensor without a point's dimension, which vmap refuses."""
    held = torch.zeros(x.shape, dtype=x.dtype)
    held[:, :2] = net(x).sin()
    return held[:, :2] * x[:, :1]


def averaged(net: nn.Module, x: Tensor) -> Tensor:
    """Each output depends on all points."""
    return (net(x) - x.mean()).tanh().cumsum(0)


TIED = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
TIED[2].weight = TIED[0].weight
IMAGES = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3))
NETWORKS: dict[str, tuple[nn.Module, Any, dict[str, Any]]] = {
    "images": (IMAGES, torch.randn(4, 1, 4, 4), {}),
    "dict": (TwoInputs(), {"ids": torch.randint(5, (4, 6)), "value": torch.randn(4, 1), "gain": 2.0}, {}),
    "in place": (Output(nn.Linear(3, 2), in_place), torch.randn(4, 3), {}),
    "tied": (TIED, torch.randn(4, 3), {}),
    "whole batch": (Output(nn.Linear(3, 2), averaged), torch.randn(4, 3), {"whole_batch": True}),
    "only": (mlp(dtype=torch.float32), torch.randn(4, 3), {"only": "2.*"}),
    "bfloat16": (mlp(dtype=torch.bfloat16), torch.randn(4, 3, dtype=torch.bfloat16), {}),
}


@pytest.mark.parametrize("kind", NETWORKS)
def test_jacobians_are_those_of_finite_differences(kind: str) -> None:
    """f at the mean and E|J σ|² by one weight at a time: central differences of the network itself."""
    net, x, options = NETWORKS[kind]
    half = kind == "bfloat16"
    model = pd.BayesianNet(net if half else net.to(F64), **options)
    doubled = (lambda t: t) if half else (lambda t: t.to(F64) if t.is_floating_point() else t)
    if isinstance(x, dict):
        x = {k: doubled(v) if isinstance(v, Tensor) else v for k, v in x.items()}
    else:
        x = tuple(map(doubled, x)) if isinstance(x, tuple) else doubled(x)
    guide = pd.AutoMeanField(model, init_scale=0.2)
    answer = linearised(model, guide, x, seed=0)
    net.eval()
    weights = guide.mean()
    with torch.no_grad():
        assert torch.allclose(answer.mean, model.evaluate(weights, x).to(answer.mean))
        if half:  # differences of bfloat16 are too coarse
            assert answer.epistemic.dtype == torch.float32
            assert bool((answer.epistemic > 0).all())
            return
        variance = torch.zeros_like(answer.mean)
        for name, value in weights.items():
            for k in range(value.numel()):
                moved = []
                for sign in (-1, 1):
                    other = value.clone()
                    other.view(-1)[k] += sign * 1e-5
                    moved.append(model.evaluate({**weights, name: other}, x))
                variance += (0.2 * (moved[1] - moved[0]) / 2e-5).square()
    assert torch.allclose(answer.epistemic, variance, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("outputs", [pd.Gaussian(tau=4.0), pd.HeteroscedasticGaussian()], ids=["given", "learned"])
@pytest.mark.parametrize("kind", ["mean-field", "dropout-dropped-bias", "low-rank-net", "full-rank", "full", "kron"])
def test_the_last_layer_needs_no_jacobian(kind: str, outputs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What enters the last layer gives the same as Jacobians do, also in raw units."""
    torch.manual_seed(0)
    x, y = 20 + 5 * torch.randn(30, 3, dtype=F64), 1e3 + 50 * torch.randn(30, 1, dtype=F64)
    net = pd.BayesianNet(
        mlp(2 if isinstance(outputs, pd.HeteroscedasticGaussian) else 1), likelihood=outputs, only="2.*"
    )
    model = pd.Standardised(net, x, y)
    if kind in GUIDES:
        guide = GUIDES[kind](net)
    else:
        monkeypatch.setattr("pyro_dropout.guides.laplace.MOST", 0 if kind == "kron" else 100)
        with warnings.catch_warnings(action="ignore"):  # the point is not a maximum
            guide = pd.laplace(model, model, x, y, structure="last")
    quick = linearised(model, guide, x)
    monkeypatch.setattr("pyro_dropout.prediction.linearised._last_layer", lambda *args, **kwargs: None)
    slow = linearised(model, guide, x)
    assert torch.allclose(quick.mean, slow.mean)
    assert torch.allclose(quick.covariance, slow.covariance, rtol=1e-9)
    assert torch.allclose(quick.log_prob(y), slow.log_prob(y))


def test_blocks_and_loaders_give_the_same() -> None:
    model = pd.BayesianNet(mlp(3), likelihood=pd.Categorical())
    guide, x = pd.AutoDropout(model, keep=0.7), torch.randn(7, 3, dtype=F64)
    whole = linearised(model, guide, x, seed=0)
    for other in (
        linearised(model, guide, x, seed=0, chunk=2),
        linearised(model, guide, DataLoader(TensorDataset(x), batch_size=3), seed=0),
    ):
        assert torch.allclose(whole.probs, other.probs, atol=1e-12)
        assert torch.allclose(whole.samples, other.samples, atol=1e-12)


def test_an_ensemble_is_the_mixture_of_its_members() -> None:
    torch.manual_seed(0)
    model = pd.BayesianNet(mlp(1), likelihood=pd.Gaussian(tau=4.0))
    x, y = torch.randn(6, 3, dtype=F64), torch.randn(6, 1, dtype=F64)
    ensemble = pd.Ensemble(model, lambda m: pd.AutoMeanField(m, init_scale=0.2), members=3, seed=0)
    answer = linearised(model, ensemble, x, seed=0, samples=3000)
    each = []
    for member in range(3):
        with ensemble.as_member(member) as guide:
            each.append(linearised(model, guide, x))
    means = torch.stack([one.mean for one in each])
    assert torch.allclose(answer.mean, means.mean(0))
    inner = torch.stack([one.epistemic for one in each]).mean(0)
    assert torch.allclose(answer.epistemic, inner + means.var(0, correction=0))
    assert torch.allclose(answer.log_prob(y), torch.stack([one.log_prob(y) for one in each]).exp().mean(0).log())
    assert answer.members == 3
    assert answer.distribution_at(...).mean.shape == (3, 6, 1)
    assert torch.allclose(answer.samples.var(0), answer.epistemic, rtol=0.2)
    points = pd.Ensemble(model, members=3, seed=0)
    assert torch.allclose(linearised(model, points, x).variance, pd.predict(model, points, x).variance)


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_what_cannot_be_linearised_is_refused_by_name() -> None:
    model = pd.BayesianNet(nn.Linear(3, 1))
    x = torch.randn(4, 3)
    sampled = pd.prediction.SampledPosterior({"weight": torch.zeros(1, 5, 1, 3), "bias": torch.zeros(1, 5, 1)})
    own = AutoNormal(model)
    own(x, torch.zeros(4, 1))
    exact = pd.references.conjugate(pd.BayesianNet(nn.Linear(3, 1)), x, torch.zeros(4, 1))
    for posterior in (sampled, own, exact):
        with pytest.raises(
            pd.errors.PyroDropoutError, match=rf"E\[w\] and Cov\[w\].*{type(posterior).__name__} has none"
        ):
            linearised(model, posterior, x)
    with pytest.raises(pd.errors.PyroDropoutError, match="the posterior has the sites"):
        linearised(model, pd.AutoMeanField(pd.BayesianNet(mlp(dtype=torch.float32))), x)
    noisy = pd.BayesianNet(Output(nn.Linear(3, 1), lambda net, x: F.dropout(net(x), 0.5, training=True)))
    with pytest.raises(pd.errors.PyroDropoutError, match="same output for the same weights"):
        linearised(noisy, pd.AutoMeanField(noisy), x)


def test_what_is_too_large_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    model = pd.BayesianNet(nn.Sequential(nn.Linear(3, 2), nn.Tanh()))
    x, guide = torch.randn(40, 3), pd.AutoMeanField(model)
    for most, message, options in (
        (15, "Jacobian .* would have 16 numbers", {}),
        (600, "covariances .* would have 160 numbers", {}),
        (8000, "all points with shared=True would have", {"shared": True}),
    ):
        monkeypatch.setattr("pyro_dropout.prediction.linearised._MOST", most)
        with pytest.raises(pd.errors.PyroDropoutError, match=message):
            linearised(model, guide, x, **options)


@pytest.mark.parametrize("link", ["log", "logit"])
def test_targets_on_another_scale_have_the_density_of_a_transformed_normal(link: Any) -> None:
    """Exact, also far out: two outputs are one normal together, and quasi-random points would miss its tail."""
    model = pd.BayesianNet(nn.Linear(3, 2), likelihood=pd.Transformed(pd.Gaussian(torch.tensor([4.0, 9.0])), link))
    answer = linearised(model, pd.AutoMeanField(model, init_scale=0.4), torch.randn(5, 3))
    mean, covariance = (part[0].double() for part in answer.outputs)
    z = mean + torch.tensor([0.5, 4.0, -4.0, 6.0, -6.0], dtype=F64).unsqueeze(-1)
    y, slope = (z.exp(), -z) if link == "log" else (z.sigmoid(), -z.sigmoid().log() - (-z).sigmoid().log())
    normal = torch.distributions.MultivariateNormal(mean, covariance + torch.diag(torch.tensor([0.25, 1 / 9]).double()))
    torch.testing.assert_close(answer.log_prob(y).double(), normal.log_prob(z) + slope.sum(-1), rtol=1e-3, atol=1e-3)
