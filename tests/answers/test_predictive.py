"""Predictions against exact ones: enumerated masks, linear networks, and formulas applied to the kept samples."""

import itertools
import math
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoNormal
from scipy import optimize, stats
from torch import Tensor, nn
from torch.func import functional_call

import pyro_dropout as pd
from pyro_dropout.answers import weight_draws
from tests.oracles.memory import peak_allocated

F64 = torch.float64
# A comparison with an exact number fails on correct code with probability 4e-8; there are fewer than 100 in this file.
SIGMAS = 5.5


def hidden_net(out: int = 1, dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, out)).to(dtype)


def problem(likelihood: Any = None, out: int = 1, dtype: torch.dtype = torch.float32) -> tuple[Any, Any, Tensor]:
    model = pd.BayesianNet(hidden_net(out, dtype), likelihood=likelihood or pd.Gaussian(tau=4.0))
    return model, pd.AutoDropout(model, keep=0.7), torch.randn(5, 2, dtype=dtype)


def close_by_chance(found: Tensor, exact: Tensor, error: Tensor) -> None:
    score = (found.to(F64) - exact).abs() / (error + 1e-6 * (1 + exact.abs()))
    assert score.max() < SIGMAS


# --- exact moments ----------------------------------------------------------------------------------------------------


def enumerated(guide: Any, x: Tensor, keep: float) -> tuple[Tensor, Tensor]:
    """Outputs under all 2⁵ masks of a net 2-3-1, (32, N), with their probabilities."""
    m1, m2 = (guide.posterior(name).loc.detach().to(F64) for name in ("0.weight", "2.weight"))
    b1, b2 = (guide.posterior(name).v.detach().to(F64) for name in ("0.bias", "2.bias"))
    masks = torch.tensor(list(itertools.product([0.0, 1.0], repeat=5)), dtype=F64)
    h = torch.tanh(torch.einsum("sq,kq,nq->snk", masks[:, :2], m1, x.to(F64)) + b1)
    f = torch.einsum("sk,k,snk->sn", masks[:, 2:], m2[0], h) + b2
    return f, (masks * keep + (1 - masks) * (1 - keep)).prod(-1)


@pytest.mark.parametrize("shared", [False, True])
def test_moments_are_those_of_all_masks(dtype: torch.dtype, shared: bool) -> None:
    model, guide, x = problem(dtype=dtype)
    count = 20_000
    answer = pd.predict(model, guide, x, samples=count, shared=shared)
    f, probs = enumerated(guide, x, 0.7)
    mean = probs @ f
    variance, fourth = probs @ (f - mean) ** 2, probs @ (f - mean) ** 4
    assert answer.mean.dtype == dtype
    close_by_chance(answer.mean[:, 0], mean, (variance / count).sqrt())
    close_by_chance(answer.epistemic[:, 0], variance, ((fourth - variance**2) / count).sqrt())
    assert torch.allclose(answer.aleatoric, torch.full_like(answer.mean, 0.25))
    assert torch.allclose(answer.variance, answer.epistemic + 0.25)
    assert torch.allclose(answer.std**2, answer.variance)


@pytest.mark.parametrize("shared", [False, True])
def test_a_linear_mean_field_net_is_a_gaussian(dtype: torch.dtype, shared: bool) -> None:
    model = pd.BayesianNet(nn.Linear(4, 2).to(dtype), likelihood=pd.Gaussian(tau=2.0))
    guide = pd.AutoMeanField(model, init_scale=0.5)
    x = torch.randn(3, 4, dtype=dtype)
    count = 20_000
    answer = pd.predict(model, guide, x, samples=count, shared=shared)
    weight, bias = guide.posterior("weight"), guide.posterior("bias")
    mean = (x @ weight.mean.T + bias.mean).detach().to(F64)
    variance = (x**2 @ weight.variance.T + bias.variance).detach().to(F64)
    close_by_chance(answer.mean, mean, (variance / count).sqrt())
    close_by_chance(answer.epistemic, variance, variance * math.sqrt(2 / count))


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


def test_noise_of_its_own_is_averaged() -> None:
    model, guide, x = problem(pd.HeteroscedasticGaussian(), out=4)
    answer = pd.predict(model, guide, x, samples=30)
    mean, log_tau = answer.samples.chunk(2, -1)
    assert torch.allclose(answer.mean, mean.mean(0), atol=1e-6)
    assert torch.allclose(answer.aleatoric, (-log_tau).exp().mean(0), atol=1e-6)
    model, guide, x = problem(pd.Poisson(), out=2)
    answer = pd.predict(model, guide, x, samples=30)
    assert torch.allclose(answer.mean, answer.samples.exp().mean(0))
    assert torch.allclose(answer.aleatoric, answer.mean)


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
    again = pd.predict(model, guide, x, method="standard", keep_samples=False)
    assert torch.allclose(again.log_prob(y), answer.log_prob(y))


def test_concrete_dropout_flips_coins() -> None:
    model = pd.BayesianNet(nn.Linear(2, 1, bias=False))
    guide = pd.AutoConcreteDropout(model, keep=0.5, temperature=1.0)
    f = pd.predict(model, guide, torch.ones(1, 2), samples=200).samples
    assert len((f * 1e4).round().unique()) <= 4


def test_noise_whose_signs_are_flipped_is_drawn_in_many_passes() -> None:
    model = pd.BayesianNet(nn.Sequential(nn.Conv1d(1, 1, 2, bias=False), nn.Flatten()))
    guide = pd.AutoMeanField(model, init=lambda name, shape: torch.zeros(shape))
    f = pd.predict(model, guide, torch.ones(1, 1, 2), samples=200).samples
    assert len(f.abs().unique()) >= 190  # some of float32's numbers meet


def test_plain_models_and_deep_gps_are_predicted_too() -> None:
    def model(x: Tensor, y: Tensor | None = None) -> Tensor:
        weight = pyro.sample("W", dist.Normal(0.0, 1.0).expand([1, 2]).to_event(2))
        f = x @ weight.T
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(f, 0.5).to_event(1), obs=y)
        return f

    model.likelihood = pd.Gaussian(tau=4.0)  # type: ignore[attr-defined]
    deep = pd.DeepGP(2, [6], 1, nonlinearity="tanh")
    x, y = torch.randn(3, 2), torch.zeros(3, 1)
    for each in (model, deep):
        guide = pd.AutoDropout(each, keep=0.5)
        with pytest.raises(pd.PyroDropoutError, match="call posterior"):
            pd.predict(each, guide, x)
        guide(x, y)
        for shared in (False, True):
            answer = pd.predict(each, guide, x, samples=20, shared=shared, seed=1, keep_samples=False)
            kept = pd.predict(each, guide, x, samples=20, shared=shared, seed=1)
            assert (kept.epistemic > 0).any()
            assert torch.allclose(answer.log_prob(y), kept.log_prob(y), atol=1e-6)
    normal = AutoNormal(model)
    normal(x, y)
    with pytest.raises(pd.PyroDropoutError, match="shared=True"):
        pd.predict(model, normal, x)
    assert pd.predict(model, normal, x, samples=20, shared=True).epistemic.min() > 0
    with pytest.raises(pd.PyroDropoutError, match="has none"):
        pd.predict(model, normal, x, method="standard")


def test_words_are_data_points() -> None:
    model = pd.BayesianNet(
        nn.Sequential(nn.Embedding(5, 2), nn.Flatten(), nn.Linear(6, 3)), likelihood=pd.Categorical()
    )
    answer = pd.predict(model, pd.AutoDropout(model, keep=0.5), torch.randint(5, (4, 3)), samples=10)
    assert torch.allclose(answer.probs.sum(-1), torch.ones(4))


# --- densities and intervals ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("seed", [3, None])
def test_log_prob_is_the_paper_s_logsumexp_kept_or_not(dtype: torch.dtype, shared: bool, seed: int | None) -> None:
    model, guide, x = problem(dtype=dtype)
    y = torch.randn(5, 1, dtype=dtype)
    state = torch.get_rng_state()
    options: Any = {"samples": 25, "shared": shared, "seed": seed, "chunk": 11}
    kept = pd.predict(model, guide, x, **options)
    each = -2.0 * (y - kept.samples).square().squeeze(-1) + 0.5 * math.log(4 / (2 * math.pi))
    brute = each.to(F64).exp().mean(0).log()
    assert torch.allclose(kept.log_prob(y).to(F64), brute, atol=1e-5 if dtype == torch.float32 else 1e-12)
    torch.set_rng_state(state)
    answer = pd.predict(model, guide, x, keep_samples=False, **options)
    after = torch.get_rng_state()
    for _ in range(2):
        assert torch.allclose(answer.log_prob(y), kept.log_prob(y), atol=1e-6)
    assert torch.equal(torch.get_rng_state(), after)
    with pytest.raises(pd.PyroDropoutError, match="keep_samples=True"):
        answer.samples  # noqa: B018
    with pytest.raises(pd.PyroDropoutError, match="keep_samples=True"):
        answer.interval(0.9)


def test_samples_are_kept_when_they_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    model, guide, x = problem()
    monkeypatch.setattr("pyro_dropout.answers.predictive._FEW", 50)
    assert "samples kept" in repr(pd.predict(model, guide, x, samples=10))
    assert "samples not kept" in repr(pd.predict(model, guide, x, samples=11))
    assert "samples kept" in repr(pd.predict(model, guide, x, samples=11, keep_samples=True))


def move_in_place(model: Any, guide: Any, x: Tensor) -> None:
    with torch.no_grad():
        guide.states["0/weight"].loc[0, 0] += 1e-6


def move_data(model: Any, guide: Any, x: Tensor) -> None:
    guide.states["0/weight"].loc.data[0, 0] += 1e-6  # which torch's version counter does not see


def swap_data(model: Any, guide: Any, x: Tensor) -> None:
    loc = guide.states["0/weight"].loc
    loc.data = loc.data.flip(0)


def swap_setting(model: Any, guide: Any, x: Tensor) -> None:
    model.likelihood.log_tau = model.likelihood.log_tau + 1


def move_points(model: Any, guide: Any, x: Tensor) -> None:
    x[0, 0] += 1


@pytest.mark.parametrize("change", [move_in_place, move_data, swap_data, swap_setting, move_points])
def test_what_has_changed_is_not_walked_again(change: Any) -> None:
    model, guide, x = problem()
    y = torch.zeros(5, 1)
    kept = pd.predict(model, guide, x, samples=10, seed=0)
    answer = pd.predict(model, guide, x, samples=10, seed=0, keep_samples=False)
    before = answer.log_prob(y)
    guide.states["0/weight"].loc.data = guide.states["0/weight"].loc.data.clone()  # nothing but the place has changed
    assert torch.equal(answer.log_prob(y), before)
    change(model, guide, x)
    with pytest.raises(pd.PyroDropoutError, match="changed since"):
        answer.log_prob(y)
    assert torch.allclose(kept.log_prob(y), before, atol=1e-6)


@pytest.mark.parametrize("heteroscedastic", [False, True])
def test_interval_inverts_the_distribution_function(dtype: torch.dtype, heteroscedastic: bool) -> None:
    likelihood = pd.HeteroscedasticGaussian() if heteroscedastic else pd.Gaussian(tau=100.0)
    model, guide, x = problem(likelihood, out=2, dtype=dtype)
    answer = pd.predict(model, guide, x, samples=40)
    low, high = answer.interval(0.8)
    f = answer.samples.to(F64)
    mean, scale = (f[..., :1], torch.exp(-0.5 * f[..., 1:])) if heteroscedastic else (f, torch.full_like(f, 0.1))
    assert low.shape == high.shape == answer.mean.shape
    for end, level in ((low, 0.1), (high, 0.9)):
        for n, d in itertools.product(range(5), range(mean.shape[-1])):
            m, s = mean[:, n, d].numpy(), scale[:, n, d].numpy()
            exact = optimize.brentq(lambda q: np.mean(stats.norm.cdf(q, m, s)) - level, -50, 50, xtol=1e-12)  # noqa: B023
            assert end[n, d].item() == pytest.approx(exact, abs=1e-6 if dtype == torch.float32 else 1e-9)


# --- classes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [True, False])
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
    assert torch.allclose(answer.log_prob(y).to(F64), mean[torch.arange(5), y].log(), atol=1e-5)
    with pytest.raises(pd.PyroDropoutError, match="Gaussian"):
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


@pytest.mark.parametrize("name", ["probs", "entropy", "mutual_information", "variation_ratio"])
def test_regression_has_no_classes(name: str) -> None:
    model, guide, x = problem()
    with pytest.raises(pd.PyroDropoutError, match=rf"{name} is for classes.*interval\(level\)"):
        getattr(pd.predict(model, guide, x, samples=2), name)


# --- how it runs ------------------------------------------------------------------------------------------------------


def test_a_seed_repeats_and_leaves_the_random_state() -> None:
    model, guide, x = problem()
    before = torch.get_rng_state()
    first, second = (pd.predict(model, guide, x, samples=9, seed=4).samples for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(pd.predict(model, guide, x, samples=9, seed=5).samples, first)
    one, two = (pd.predict(model, guide, x, samples=9).samples for _ in range(2))
    assert not torch.equal(one, two)
    torch.set_rng_state(before)
    assert torch.equal(pd.predict(model, guide, x, samples=9).samples, one)


def test_networks_are_in_evaluation_mode_and_put_back() -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Dropout(0.9), nn.Linear(3, 1))
    model = pd.BayesianNet(net)
    net[2].eval()
    modes = [module.training for module in model.modules()]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for shared in (False, True):
        answer = pd.predict(model, pd.AutoDropout(model, keep=1.0), torch.randn(6, 2), samples=3, shared=shared)
        assert answer.epistemic.max() < 1e-10  # nothing is dropped, by the guide or by the layer
        assert not answer.mean.requires_grad
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("shared", [False, True])
def test_when_memory_runs_out_the_blocks_are_halved(monkeypatch: pytest.MonkeyPatch, shared: bool) -> None:
    kind = weight_draws.WholeFunctions if shared else weight_draws.PerExample
    enough, run, tried = 13, kind.outputs, []

    def outputs(self: Any, weights: Any, x: Tensor, count: int) -> Tensor:
        tried.append(count * len(x))
        if tried[-1] > enough:
            torch.rand(3)  # random numbers that were used in vain
            raise torch.OutOfMemoryError("no memory")
        return run(self, weights, x, count)

    monkeypatch.setattr(kind, "outputs", outputs)
    model = pd.BayesianNet(nn.Linear(2, 1))
    guide, x, y = pd.AutoMeanField(model), torch.ones(7, 2), torch.zeros(7, 1)
    options: Any = {"samples": 30, "shared": shared, "seed": 1}
    answer = pd.predict(model, guide, x, chunk=64, **options)
    assert max(tried) > enough
    assert sum(rows for rows in tried if rows > enough) <= 2 * max(tried)  # what is left is not tried at full size
    f = answer.samples
    assert torch.allclose(answer.mean, f.mean(0), atol=1e-5)
    assert torch.allclose(answer.epistemic, f.var(0, correction=0), atol=1e-5)
    if shared:
        assert torch.allclose(f, f[:, :1].expand_as(f), atol=1e-6)
    assert len(f[:, 0].unique()) == 30
    streamed = pd.predict(model, guide, x, chunk=64, keep_samples=False, **options)
    assert torch.allclose(streamed.log_prob(y), answer.log_prob(y), atol=1e-6)
    enough = 0
    with pytest.raises(torch.OutOfMemoryError):
        pd.predict(model, guide, x, **options)


def test_memory_does_not_grow_with_the_draws() -> None:
    model, guide, _ = problem(pd.Categorical(), out=3)
    x = torch.randn(100, 2)

    def peak(samples: int) -> int:
        options: Any = {"samples": samples, "keep_samples": False, "chunk": 1000}
        y = torch.zeros(100, dtype=torch.long)
        return peak_allocated(lambda: pd.predict(model, guide, x, **options).log_prob(y))

    peak(10)
    assert peak(400) <= 1.05 * peak(20)


def test_a_bar_shows_how_far_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    model, guide, x = problem()
    pd.predict(model, guide, x, samples=4)
    assert capsys.readouterr().err == ""
    pd.predict(model, guide, x, samples=4, progress=True)
    assert "predict" in capsys.readouterr().err


def test_compiled_blocks_say_the_same() -> None:
    """Both runs estimate the same mean and variance: their difference is tested at 5.5 standard errors."""
    model, guide, x = problem()
    count = 4_000
    options: Any = {"samples": count, "compile": True, "seed": 2, "chunk": 10_000}
    answer = pd.predict(model, guide, x, keep_samples=False, **options)
    f, probs = enumerated(guide, x, 0.7)
    mean = probs @ f
    variance, fourth = probs @ (f - mean) ** 2, probs @ (f - mean) ** 4
    close_by_chance(answer.mean[:, 0], mean, (variance / count).sqrt())
    close_by_chance(answer.epistemic[:, 0], variance, ((fourth - variance**2) / count).sqrt())
    kept = pd.predict(model, guide, x, keep_samples=True, **options)
    assert torch.equal(kept.mean, answer.mean)
    assert len(kept.samples[:, 0].unique()) > 16  # masks are drawn anew by each draw, and by each block
    assert not torch.equal(kept.samples[:2000], kept.samples[2000:])
    y = torch.randn(5, 1)
    assert torch.allclose(answer.log_prob(y), kept.log_prob(y), atol=1e-6)


# --- what is refused --------------------------------------------------------------------------------------------------

X = torch.zeros(5, 2)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"x": [[1.0]]}, pd.ShapeError, "x must be a tensor"),
        ({"x": X.long()}, pd.RangeError, "x must be a floating-point"),
        ({"x": X * math.nan}, pd.RangeError, "x must be finite"),
        ({"x": X[:0]}, pd.ShapeError, "at least one data point"),
        ({"x": torch.tensor(1.0)}, pd.ShapeError, "at least one data point"),
        ({"samples": 0}, pd.RangeError, "samples"),
        ({"samples": 1.5}, pd.RangeError, "samples"),
        ({"chunk": 0}, pd.RangeError, "chunk"),
        ({"method": "mean"}, pd.RangeError, "method must be 'mc' or 'standard'"),
        ({"keep_samples": "no"}, pd.RangeError, "keep_samples must be"),
        ({"seed": 0.5}, pd.RangeError, "seed must be"),
        ({"model": lambda x: x}, pd.PyroDropoutError, "no likelihood"),
    ],
)
@pytest.mark.usefixtures("unchecked_shapes")
def test_mistakes_are_named(options: dict[str, Any], error: type[Exception], message: str) -> None:
    model, guide, _ = problem()
    given = {"model": model, "posterior": guide, "x": X, **options}
    with pytest.raises(error, match=message):
        pd.predict(given.pop("model"), given.pop("posterior"), given.pop("x"), **given)


@pytest.mark.usefixtures("unchecked_shapes")
def test_targets_that_do_not_fit_are_named() -> None:
    model, guide, x = problem()
    for keep in (True, False):
        answer = pd.predict(model, guide, x, samples=3, keep_samples=keep)
        with pytest.raises(pd.ShapeError, match="unsqueeze"):
            answer.log_prob(torch.zeros(5))
        with pytest.raises(pd.ShapeError, match="y must be a tensor"):
            answer.log_prob([0.0])  # type: ignore[arg-type]
    for level in (0, 1, 95, True):
        with pytest.raises(pd.RangeError, match="level"):
            pd.predict(model, guide, x, samples=3).interval(level)
    model, guide, x = problem(pd.Categorical(), out=3)
    answer = pd.predict(model, guide, x, samples=3)
    with pytest.raises(pd.RangeError, match="from 0 to 2"):
        answer.log_prob(torch.tensor([0, 1, 2, 3, 0]))


def test_a_model_must_return_its_outputs() -> None:
    def silent(x: Tensor) -> None:
        pyro.sample("W", dist.Normal(0.0, 1.0).expand([1, 2]).to_event(2))

    silent.likelihood = pd.Gaussian()  # type: ignore[attr-defined]
    guide = pd.AutoDropout(silent)
    guide(X)
    with pytest.raises(pd.ShapeError, match="returned NoneType"):
        pd.predict(silent, guide, X)
