"""Predictions against exact ones: enumerated masks, linear networks, formulas of the kept samples; what a draw is."""

import math
import warnings
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoNormal
from scipy import stats
from torch import Tensor, nn
from torch.func import functional_call

import pyro_dropout as pd
from tests.networks.layers import Parts
from tests.oracles.predictions import F64, close_by_chance, enumerated, problem

# --- exact moments ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("shared", [False, True])
def test_everything_is_that_of_all_masks(dtype: torch.dtype, shared: bool, outputs: int) -> None:
    """Mean, variance, covariance and log-likelihood; some 300 comparisons at 4 standard errors: 2 % on correct code."""
    model, guide, x = problem(out=outputs, dtype=dtype)
    count = 20_000
    answer = pd.predict(model, guide, x, samples=count, shared=shared)
    f, probs = enumerated(guide, x, 0.7)
    mean = torch.einsum("s,snd->nd", probs, f)
    apart = f - mean
    variance, fourth = (torch.einsum("s,snd->nd", probs, apart**k) for k in (2, 4))
    assert answer.mean.dtype == dtype
    close_by_chance(answer.mean, mean, (variance / count).sqrt(), 4)
    close_by_chance(answer.epistemic, variance, ((fourth - variance**2) / count).sqrt(), 4)
    assert torch.allclose(answer.aleatoric, torch.full_like(answer.mean, 0.25))
    assert torch.allclose(answer.variance, answer.epistemic + 0.25)
    assert torch.allclose(answer.std**2, answer.variance)
    products = torch.einsum("sni,snj->snij", apart, apart)
    covariance = torch.einsum("s,snij->nij", probs, products)
    error = (torch.einsum("s,snij->nij", probs, (products - covariance) ** 2) / count).sqrt()
    close_by_chance(answer.covariance, covariance + torch.eye(outputs, dtype=F64) / 4, error, 4)
    y = torch.randn(5, outputs, dtype=dtype)
    density = torch.from_numpy(stats.norm.pdf(y.to(F64), f, 0.5)).prod(-1)
    likelihood = probs @ density
    error = (probs @ (density - likelihood) ** 2 / count).sqrt() / likelihood
    close_by_chance(answer.log_prob(y), likelihood.log(), error, 4)


@pytest.mark.thinned(2)
def test_moments_are_those_of_the_samples_whatever_the_blocks(dtype: torch.dtype) -> None:
    model, guide, x = problem(dtype=dtype)
    with torch.no_grad():  # far from zero, where sums of squares lose all digits
        guide.states["2/bias"].loc += 1e4
    for chunk, samples in ((3, 11), (7, 20), (10_000, 50)):
        answer = pd.predict(model, guide, x, samples=samples, chunk=chunk)
        f = answer.samples.to(F64)
        assert f.shape == (samples, 5, 1)
        assert torch.allclose(answer.mean.to(F64), f.mean(0), rtol=1e-6)
        assert torch.allclose(answer.epistemic.to(F64), f.var(0, correction=0), rtol=1e-5)


# --- what a draw is ---------------------------------------------------------------------------------------------------


def test_functions_are_shared_by_points_and_draws_for_points_are_not() -> None:
    model = pd.BayesianNet(nn.Linear(3, 1))
    guide = pd.AutoMeanField(model)
    x = torch.ones(4, 3)
    whole = pd.predict(model, guide, x, samples=25, shared=True, chunk=10).samples
    assert torch.allclose(whole, whole[:, :1].expand_as(whole), atol=1e-6)
    assert len(whole[:, 0].unique()) == 25
    own = pd.predict(model, guide, x, samples=25, chunk=10).samples
    assert len(own.unique()) == 100


def test_standard_is_one_pass_with_the_mean_weights() -> None:
    model, guide, x = problem()
    answer = pd.predict(model, guide, x, method="standard", samples=7)
    f = functional_call(model.net, guide.mean(), (x,))
    assert torch.allclose(answer.mean, f)
    assert answer.samples.shape == (1, 5, 1)
    assert answer.epistemic.abs().max() == 0
    y = torch.randn(5, 1)
    assert torch.allclose(answer.log_prob(y), model.likelihood.distribution(f).log_prob(y))


def test_concrete_dropout_flips_coins() -> None:
    model = pd.BayesianNet(nn.Linear(2, 1, bias=False))
    guide = pd.AutoConcreteDropout(model, keep=0.5, temperature=1.0)
    f = pd.predict(model, guide, torch.ones(1, 2), samples=200).samples
    assert len((f * 1e4).round().unique()) <= 4


def test_noise_of_the_network_makes_no_function_and_says_so() -> None:
    def read(net: Any, x: Tensor) -> Tensor:
        hidden = net.drop(net.first(x))
        return net.last(hidden) + hidden.mean(-1, keepdim=True)

    own = Parts(read, first=nn.Linear(2, 4), drop=nn.Dropout(0.3), last=nn.Linear(4, 1))
    model, guide = pd.from_dropout(own, tau=1.0)
    with pytest.warns(UserWarning, match="own noise .*'drop'.* is drawn for each point although shared=True"):
        pd.predict(model, guide, torch.randn(3, 2), samples=5, shared=True, seed=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pd.predict(model, guide, torch.randn(3, 2), samples=5, seed=0)


def test_noise_whose_signs_are_flipped_is_drawn_in_many_passes() -> None:
    model = pd.BayesianNet(nn.Sequential(nn.Conv1d(1, 1, 2, bias=False), nn.Flatten()))
    guide = pd.AutoMeanField(model, init=lambda name, shape: torch.zeros(shape))
    f = pd.predict(model, guide, torch.ones(1, 1, 2), samples=80).samples
    assert len(f.abs().unique()) >= 76  # some of float32's numbers meet


class Plain(nn.Module):
    """A model of one's own, which returns its outputs and uses a likelihood of the package."""

    def __init__(self) -> None:
        super().__init__()
        self.likelihood = pd.Gaussian(tau=4.0)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        weight = pyro.sample("W", dist.Normal(0.0, 1.0).expand([1, 2]).to_event(2))
        f = x @ weight.T
        self.likelihood(f, y)
        return f


def test_models_of_ones_own_and_deep_gps_are_predicted_too() -> None:
    model, deep = Plain(), pd.paper.DeepGP(2, [6], 1, nonlinearity="tanh")
    x, y = torch.randn(3, 2), torch.zeros(3, 1)
    for each in (model, deep):
        guide = pd.AutoDropout(each, keep=0.5)
        with pytest.raises(pd.errors.PyroDropoutError, match="call posterior"):
            pd.predict(each, guide, x)
        guide(x, y)
        for shared in (False, True):
            answer = pd.predict(each, guide, x, samples=20, shared=shared, seed=1)
            assert (answer.epistemic > 0).any()
            brute = each.likelihood.distribution(answer.samples).log_prob(y).logsumexp(0) - math.log(20)
            assert torch.allclose(answer.log_prob(y), brute, atol=1e-5)
    normal = AutoNormal(model)
    normal(x, y)
    with pytest.raises(pd.errors.PyroDropoutError, match="shared=True"):
        pd.predict(model, normal, x)
    assert pd.predict(model, normal, x, samples=20, shared=True).epistemic.min() > 0
    with pytest.raises(pd.errors.PyroDropoutError, match="has none"):
        pd.predict(model, normal, x, method="standard")


# --- densities and intervals ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("seed", [3, None])
@pytest.mark.thinned(3)
def test_log_prob_is_the_paper_s_logsumexp(dtype: torch.dtype, shared: bool, seed: int | None) -> None:
    model, guide, x = problem(dtype=dtype)
    y = torch.randn(5, 1, dtype=dtype)
    options: Any = {"samples": 25, "shared": shared, "seed": seed, "chunk": 11}
    kept = pd.predict(model, guide, x, **options)
    each = -2.0 * (y - kept.samples).square().squeeze(-1) + 0.5 * math.log(4 / (2 * math.pi))
    brute = each.to(F64).exp().mean(0).log()
    assert torch.allclose(kept.log_prob(y).to(F64), brute, atol=1e-5 if dtype == torch.float32 else 1e-12)
    answer = pd.predict(model, guide, x, keep_samples=False, **options)
    for ask in (lambda: answer.samples, lambda: answer.interval(0.9), lambda: answer.log_prob(y)):
        with pytest.raises(pd.errors.PyroDropoutError, match="keep_samples=True"):
            ask()


class Together(pd.generative.Likelihood):
    """Noise that is correlated between the targets of a point; with ``df``, with heavy tails."""

    root = torch.tensor([[1.0, 0.0], [0.8, 0.6]])

    def __init__(self, df: float | None = None) -> None:
        super().__init__()
        self.df = df

    def distribution(self, f: Tensor) -> dist.TorchDistribution:
        root = self.root.to(f)
        if self.df is None:
            return dist.MultivariateNormal(f, scale_tril=root)
        return dist.MultivariateStudentT(torch.tensor(self.df).to(f), f, root)


@pytest.mark.parametrize("method", ["mc", "linearised"])
@pytest.mark.parametrize("df", [None, 6.0])
def test_covariance_has_that_of_the_noise(df: float | None, method: str) -> None:
    """Of a linear network: Cov[y] = Cov[f] + Cov[noise]; that of a Student t is df/(df - 2) times its matrix."""
    model = pd.BayesianNet(nn.Linear(3, 2), likelihood=Together(df))
    guide, x = pd.AutoMeanField(model, init_scale=0.3), torch.randn(4, 3)
    how: Any = {"samples": 500, "seed": 0, "shared": True, "method": method}
    answer = pd.predict(model, guide, x, **how)
    noise = Together.root @ Together.root.T * (1.0 if df is None else df / (df - 2))
    spread = torch.stack([torch.cov(f.T, correction=0) for f in answer.samples.movedim(1, 0)])
    if method == "linearised":
        spread = 0.09 * (x.square().sum(-1) + 1)[:, None, None] * torch.eye(2)
    torch.testing.assert_close(answer.covariance, spread + noise, atol=0.02, rtol=0)


def test_covariance_of_noise_without_one_is_refused() -> None:
    class Shares(pd.generative.Likelihood):
        def distribution(self, f: Tensor) -> dist.Dirichlet:
            return dist.Dirichlet(f.exp())

    model = pd.BayesianNet(nn.Linear(3, 2), likelihood=Shares())
    answer = pd.predict(model, pd.AutoMeanField(model), torch.randn(4, 3), samples=10, seed=0)
    with pytest.raises(pd.errors.NotAvailableError, match="depend on each other, and Dirichlet has no covariance"):
        _ = answer.covariance


def test_covariance_of_classes_is_that_of_indicators() -> None:
    model, guide, x = problem(pd.Categorical(), out=3)
    answer = pd.predict(model, guide, x, samples=40)
    draws = torch.eye(3, dtype=F64)  # all values of y, with their probabilities
    for n in range(5):
        p = answer.probs[n].to(F64)
        exact = torch.einsum("c,ci,cj->ij", p, draws - p, draws - p)
        torch.testing.assert_close(answer.covariance[n].to(F64), exact, atol=1e-6, rtol=0)


def test_interval_inverts_the_distribution_function(dtype: torch.dtype) -> None:
    """Where each draw has a noise of its own; those of other likelihoods are among the tests of tails."""
    model, guide, x = problem(pd.HeteroscedasticGaussian(), out=2, dtype=dtype)
    answer = pd.predict(model, guide, x, samples=40)
    f = answer.samples.to(F64)
    for end, level in zip(answer.interval(0.8), (0.1, 0.9), strict=True):
        assert end.shape == answer.mean.shape
        below = stats.norm.cdf(end.double(), f[..., :1], torch.exp(-0.5 * f[..., 1:])).mean(0)
        np.testing.assert_allclose(below, level, atol=1e-6 if dtype == torch.float32 else 1e-9)


# --- classes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.thinned(3)
def test_what_is_said_of_classes(dtype: torch.dtype, keep: bool) -> None:
    model, guide, x = problem(pd.Categorical(), out=3, dtype=dtype)
    answer = pd.predict(model, guide, x, samples=60, seed=5, keep_samples=keep, chunk=35)
    p = pd.predict(model, guide, x, samples=60, seed=5, chunk=35).samples.to(F64).softmax(-1)
    mean = p.mean(0)
    entropy = -(mean * mean.log()).sum(-1)
    near: Any = {"atol": 1e-6}
    assert torch.allclose(answer.probs.to(F64), mean, **near)
    assert torch.allclose(answer.entropy.to(F64), entropy, **near)
    assert torch.allclose(answer.mutual_information.to(F64), entropy + (p * p.log()).sum(-1).mean(0), **near)
    votes = torch.stack([(p.argmax(-1) == c).sum(0) for c in range(3)], -1)
    assert torch.allclose(answer.variation_ratio.to(F64), 1 - votes.amax(-1).to(F64) / 60, **near)
    assert torch.allclose(answer.variance.to(F64), mean * (1 - mean), **near)
    assert torch.allclose(answer.epistemic.to(F64), p.var(0, correction=0), **near)
    y = torch.tensor([0, 1, 2, 1, 0])
    if keep:
        assert torch.allclose(answer.log_prob(y).to(F64), mean[torch.arange(5), y].log(), atol=1e-5)
    with pytest.raises(pd.errors.PyroDropoutError, match=r"interval\(\) is for numbers.*use probs"):
        answer.interval(0.9)


def test_what_is_said_of_yes_and_no() -> None:
    model, guide, x = problem(pd.Bernoulli(), out=2)
    answer = pd.predict(model, guide, x, samples=60)
    p = answer.samples.to(F64).sigmoid()
    both = torch.stack([p, 1 - p], -1)
    entropy = -(both.mean(0) * both.mean(0).log()).sum(-1)
    own = -(both * both.log()).sum(-1).mean(0)
    assert torch.allclose(answer.probs.to(F64), p.mean(0), atol=1e-6)
    assert torch.allclose(answer.entropy.to(F64), entropy, atol=1e-6)
    assert torch.allclose(answer.mutual_information.to(F64), entropy - own, atol=1e-6)
    yes = (p > 0.5).double().mean(0)
    assert torch.allclose(answer.variation_ratio.to(F64), torch.minimum(yes, 1 - yes), atol=1e-6)
