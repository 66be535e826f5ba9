"""Fitting: what a history says, mini-batches, early stopping, and what happens when the loss is no number any more."""

import io
import math
import warnings
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import TraceEnum_ELBO
from torch import Tensor, nn
from tqdm.auto import tqdm

import pyro_dropout as pd
from pyro_dropout.engines import engine
from pyro_dropout.errors import UnfinishedTrainingWarning
from pyro_dropout.training.history import rise, still_falling
from pyro_dropout.training.loop import sharing_bar
from pyro_dropout.training.training_run import TrainingRun

QUIET: dict[str, Any] = {"compile": False, "progress": False}


def problem(points: int = 64) -> tuple[pd.BayesianNet, Any, Tensor, Tensor]:
    net = nn.Sequential(nn.Linear(1, 20), nn.ReLU(), nn.Linear(20, 1))
    model = pd.BayesianNet(net, likelihood=pd.Gaussian(tau=25.0))
    x = torch.linspace(-1, 1, points).unsqueeze(-1)
    return model, pd.AutoDropout(model, keep=0.95), x, x**2


HELD: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "some, Adam": lambda p: torch.optim.Adam(p[2:3], lr=0.02),
    "groups": lambda p: torch.optim.SGD([{"params": p[:1]}, {"params": p[1:3], "lr": 1e-5, "momentum": 0.5}], lr=1e-4),
    "groups of Adam": lambda p: torch.optim.Adam([{"params": p[1:2], "betas": (0.5, 0.9)}, {"params": p[:1]}], lr=0.02),
}


@pytest.mark.parametrize("compile", [False, "traced", pytest.param(True, marks=pytest.mark.deep)])
@pytest.mark.parametrize("held", HELD)
def test_an_optimiser_trains_what_it_holds_from_the_state_that_it_has(held: str, compile: Any) -> None:
    """Steps of torch's own optimiser, with a schedule and clipped gradients, as a loop by hand takes them."""
    found = []
    for by_hand in (True, False):
        torch.manual_seed(0)
        model, _, x, y = problem()
        guide = pd.AutoDropout(model, keep=1.0)  # steps without noise
        parameters = list(guide.parameters())
        optim = HELD[held](parameters)
        own = [p for group in optim.param_groups for p in group["params"]]
        rates = [group["lr"] for group in optim.param_groups]
        for p in own:  # one step before: it is warm
            p.grad = torch.full_like(p, 0.1)
        optim.step()
        optim.zero_grad()
        if by_hand:
            for t in range(3):
                pd.ELBO().differentiable_loss(model, guide, x, y).backward(inputs=own)
                torch.nn.utils.clip_grad_norm_(own, 5.0)
                for group, rate in zip(optim.param_groups, rates, strict=True):
                    group["lr"] = rate / (1 + t)
                optim.step()
                optim.zero_grad()
        else:
            how: Any = {"schedule": lambda t: 1 / (1 + t), "clip_norm": 5.0, "compile": compile, "progress": False}
            pd.fit(model, guide, x, y, steps=3, optim=optim, **how)
            assert [group["lr"] for group in optim.param_groups] == rates
            assert all(p.grad is None for p in parameters)
        found.append([p.detach().clone() for p in parameters])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("compile", [False, "traced", "auto"])
def test_what_a_fresh_optimiser_does_not_hold_stays(compile: Any) -> None:
    def model(x: Tensor, y: Tensor | None = None) -> None:
        scale = pyro.param("scale", torch.tensor(2.0))
        w = pyro.sample("w", pyro.distributions.Normal(torch.zeros(3), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("y", pyro.distributions.Normal(scale * (x @ w), 0.1), obs=y)

    pyro.clear_param_store()
    x = torch.randn(20, 3)
    guide: Any = pd.AutoMeanField(model)
    guide(x, x.sum(1))  # which makes its parameters
    before, optim = [p.detach().clone() for p in guide.parameters()], torch.optim.Adam(guide.parameters())
    pd.fit(model, guide, x, x.sum(1), steps=5, optim=optim, compile=compile, progress=False)
    assert pyro.param("scale").item() == 2.0
    assert not any(torch.equal(*pair) for pair in zip(before, guide.parameters(), strict=True))


DIVERGING: dict[str, tuple[dict[str, Any], str]] = {
    "data": ({"steps": 50}, r"the loss is inf at step 1\. The term of site 'y' is not finite"),
    "rate": ({"steps": 400, "lr": 1e6}, r"the loss is \w+ at step \d+\. .* Lower the learning rate"),
    "last step": ({"steps": 1, "lr": 3e38}, r"4 of 4 parameters are not finite after step 1\."),
    "early stopping": ({"steps": 10**6, "lr": 1e6, "patience": 2, "check_every": 30}, "the loss is"),
    # parameters and outputs stay finite; the squares of the outputs are beyond float32
    "likelihood": (
        {"steps": 2, "lr": 1e11, "clip_norm": 1.0, "seed": 0},
        r"the loss is inf at step 2\. The term of site 'y' is not finite\.",
    ),
}


@pytest.mark.parametrize("case", DIVERGING)
def test_a_divergence_is_named_and_nothing_is_lost(case: str) -> None:
    model, guide, x, y = problem()
    options, words = DIVERGING[case]
    targets = y.clone()
    if case == "data":
        targets[3] = 1e30  # its square is beyond float32
    if case == "early stopping":
        options = {**options, "validation": (x, y)}
    before = {name: value.clone() for name, value in guide.mean().items()}
    with pytest.raises(pd.errors.DivergedError, match=words):
        pd.fit(model, guide, x, targets, optim="sgd", **options, **QUIET)
    torch.testing.assert_close(guide.mean(), before)


def by_matrix(x: Tensor, y: Tensor) -> None:
    """Once its width is not finite, torch cannot factor the covariance."""
    w = pyro.sample("w", dist.Normal(torch.zeros(1), 1.0).to_event(1))
    covariance = torch.eye(len(x)) * pyro.param("width", torch.tensor(1.0))
    pyro.sample("y", dist.MultivariateNormal(x @ w, covariance + 0.01), obs=y.squeeze(-1))


def by_check(x: Tensor, y: Tensor) -> None:
    """Its own checks reject parameters that are not finite."""
    w = pyro.sample("w", dist.Normal(torch.zeros(1), 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(x @ w, pyro.param("width", torch.tensor(1.0)), validate_args=True), obs=y[:, 0])


@pytest.mark.parametrize("how", [False, "traced", "auto", "optimiser", "svi"])
@pytest.mark.parametrize("model", [by_matrix, by_check])
@pytest.mark.thinned(3)
def test_what_torch_rejects_after_a_divergence_is_said_as_one(model: Any, how: Any) -> None:
    _, _, x, y = problem()
    guide = pd.AutoMeanField(model)
    guide(x, y)

    def train() -> None:
        if how == "svi":
            svi = pd.SVI(model, guide, pyro.optim.SGD({"lr": 1e6}), compile=False)
            for _ in range(40):
                svi.step(x, y)
        held: Any = torch.optim.RMSprop(guide.parameters(), lr=1e38) if how == "optimiser" else "sgd"
        compile = False if how == "optimiser" else how
        rate = None if how == "optimiser" else 1e6
        pd.fit(model, guide, x, y, steps=1000, lr=rate, optim=held, compile=compile, progress=False)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what reads values is not recorded
        with pytest.raises(pd.errors.DivergedError, match=r"at step|be computed") as stop:
            train()
    assert "Lower the learning rate" in str(stop.value)
    assert how == "svi" or all(value.isfinite().all() for value in guide.parameters())


def test_an_interruption_keeps_what_was_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    model, guide, x, y = problem()
    before = guide.mean()["0.weight"].clone()
    advance, calls = TrainingRun.advance, []

    def interrupted(run: TrainingRun, steps: int) -> Tensor:
        calls.append(steps)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return advance(run, steps)

    monkeypatch.setattr(TrainingRun, "advance", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pd.fit(model, guide, x, y, steps=1000, lr=0.01, **QUIET)
    assert not torch.equal(guide.mean()["0.weight"], before)


def normed() -> tuple[pd.BayesianNet, Any, nn.BatchNorm1d]:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(8)
    net = nn.Sequential(nn.Linear(1, 8), norm, nn.ReLU(), nn.Linear(8, 1))
    model = pd.BayesianNet(net, likelihood=pd.Gaussian(4.0))
    return model, pd.AutoDropout(model, keep=0.9), norm


@pytest.mark.thinned(2)
@pytest.mark.parametrize("compile", [False, "traced"])
def test_early_stopping_keeps_what_the_best_step_had(compile: Any) -> None:
    """Parameters and running statistics are those of a training that takes no more steps and watches nothing."""
    x, found = torch.linspace(-1, 1, 64).unsqueeze(-1), []
    how: dict[str, Any] = {"batch_size": 16, "lr": 0.05, "compile": compile, "progress": False, "seed": 0}
    best = 0
    for watched in (True, False):
        model, guide, norm = normed()
        if watched:
            held: dict[str, Any] = {"validation": (100 * x, -x), "patience": 4, "check_every": 10}
            history = pd.fit(model, guide, x, x, steps=200, **held, **how)
            best = history.best_step or 0
            assert 0 < best < history.steps  # the held-out targets contradict the others
            assert best == min(history.validation, key=lambda pair: pair[1])[0]
            assert [step for step, _ in history.validation] == list(range(10, history.steps + 1, 10))
        else:
            pd.fit(model, guide, x, x, steps=best, **how)
        found.append({**model.state_dict(), **{f"guide.{name}": value for name, value in guide.state_dict().items()}})
        assert int(norm.num_batches_tracked) == best
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("compile", [False, "traced"])
@pytest.mark.parametrize("wrong", ["targets", "rate"])
def test_a_divergence_takes_running_statistics_back(
    wrong: str, compile: Any, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where steps that are not finite are left out: the network has run before its loss is known."""
    if large:
        monkeypatch.setattr(engine, "LARGE", 0)
    model, guide, norm = normed()
    x = torch.linspace(-1, 1, 64).unsqueeze(-1)
    how: dict[str, Any] = {"compile": compile, "progress": False, "optim": "sgd"}
    pd.fit(model, guide, x, x, steps=5, **how)
    before = {name: value.clone() for name, value in norm.named_buffers()}
    y, options = (x * 1e30, {}) if wrong == "targets" else (x, {"lr": 1e25})
    with pytest.raises(pd.errors.DivergedError, match=r"[bB]uffers are (back )?(those|where they were) at step 0"):
        pd.fit(model, guide, x, y, steps=50, **options, **how)
    torch.testing.assert_close(dict(norm.named_buffers()), before, rtol=0, atol=0)


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("compile", [False, "traced"])
def test_running_statistics_that_overflow_end_the_training(
    compile: Any, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Squares of such inputs are beyond float32, but normalised they are small, and so is the loss."""
    if large:
        monkeypatch.setattr(engine, "LARGE", 0)
    model, guide, norm = normed()
    x = torch.linspace(-1, 1, 64).unsqueeze(-1)
    norm.register_buffer("fixed", torch.tensor([float("-inf")]))  # as in a mask, and no sign of anything
    how: dict[str, Any] = {"steps": 5, "compile": compile, "progress": False}
    pd.fit(model, guide, x, x, **how)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    words = r"the buffer 'model\.net\.1\.running_\w+' is not finite after step 5, though the loss is.*Standardise x"
    with pytest.raises(pd.errors.DivergedError, match=words):
        pd.fit(model, guide, x * 1e20, x, **how)
    statistics = {name: value for name, value in model.state_dict().items() if name.startswith("net.1.")}
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        torch.testing.assert_close(statistics[f"net.1.{name}"], before[f"net.1.{name}"], rtol=0, atol=0)
    if not large:  # whose steps are not taken back, as their loss was finite
        torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_inputs_that_are_not_finite_are_refused_before_the_first_step(bad: float) -> None:
    model, guide, norm = normed()
    x = torch.linspace(-1, 1, 64).unsqueeze(-1)
    wrong = x.clone()
    wrong[7] = bad
    with pytest.raises(pd.errors.RangeError, match="x must be finite"):
        pd.fit(model, guide, wrong, x, steps=5, **QUIET)
    assert int(norm.num_batches_tracked) == 0


def test_a_training_that_ends_too_soon_is_told_and_one_that_has_settled_is_not() -> None:
    model, guide, x, y = problem()
    how: dict[str, Any] = {"compile": "traced", "progress": False, "seed": 0}
    with pytest.warns(UnfinishedTrainingWarning, match="still falling after 200 steps.*more steps.*validation=0.2"):
        short = pd.fit(model, guide, x, y, steps=200, lr=3e-4, **how)
    assert short.unfinished is not None
    assert pd.fit(model, guide, x, y, steps=400, lr=0.02, **how).unfinished is None


@pytest.mark.parametrize("steps", [200, 1000])
@pytest.mark.parametrize("correlation", [0.0, 0.95])
def test_noise_is_no_fall_and_a_fall_is_seen_through_noise(steps: int, correlation: float) -> None:
    # Of 2,000 made series without a trend, at most 0.75 % were called falling (correlation 0.98), 0.1 % up to 0.9.
    white = torch.randn(200, steps + 200)
    noise = [white[:, 0]]
    for step in white.T[1:]:
        noise.append(correlation * noise[-1] + (1 - correlation**2) ** 0.5 * step)
    flat = torch.stack(noise, 1)[:, 200:]
    assert sum(still_falling(each, 1) is not None for each in flat) <= 5
    falling = 100 * torch.exp(-torch.arange(steps) / (0.8 * steps))
    found = [still_falling(falling + each, 1) for each in flat[:50]]
    seen = [each.steps for each in found if each is not None]
    assert len(seen) >= (50 if correlation == 0 else 25)  # noise that lasts looks like a trend itself
    right = 0.8 * steps * 2.3  # nine tenths of an exponential fall
    assert sum(0.4 * right < each < 2.5 * right for each in seen) > 0.8 * len(seen)


def test_steps_that_are_too_large_are_told() -> None:
    model, guide, x, y = problem()
    with pytest.warns(UserWarning, match=r"ended at .*, above the .* at which it began"):
        pd.fit(model, guide, x, y, steps=40, lr=100.0, **QUIET)


def test_a_lucky_first_draw_is_no_rise() -> None:
    noisy = [24, 122, 288, 48, 55, 186, 134, 121, 46, 78, 248, 82, 75, 206, 126, 54, 107, 116, 154, 72]
    assert rise(torch.tensor(noisy), num_data=40) == ""
    assert rise(torch.tensor([24, *range(100, 119), 120]), num_data=40)


@pytest.mark.deep
def test_a_share_of_the_data_stops_the_training() -> None:
    model, guide, x, y = problem()
    held: dict[str, Any] = {"validation": 0.25, "patience": 2, "check_every": 10, "seed": 3}
    history = pd.fit(model, guide, x, y, steps=100, lr=0.02, **held, **QUIET)
    assert history.validation[0][0] == 10
    assert history.best_step is not None
    with pytest.raises(pd.errors.RangeError, match="must hold out some of the 64 points"):
        pd.fit(model, guide, x, y, steps=2, validation=1.0, **QUIET)
    with pytest.raises(pd.errors.PyroDropoutError, match=r"validation=0.5 holds out a share of x and y"):
        pd.fit(lambda: None, lambda: None, steps=2, validation=0.5, **QUIET)


@pytest.mark.parametrize("shown", [True, False])
def test_a_shared_bar_grows_by_a_training_that_it_was_not_made_for(shown: bool) -> None:
    """The choice of ``fit`` trains the second best with all steps where the best one has become worse."""
    with tqdm(total=5, disable=not shown, file=io.StringIO()) as bar, sharing_bar(bar):
        for _ in range(2):
            model = pd.BayesianNet(nn.Linear(1, 1))
            pd.fit(model, pd.AutoDropout(model), torch.ones(4, 1), torch.ones(4, 1), steps=5, compile=False)
            assert bar.n <= bar.total
    assert not shown or (bar.n, bar.total) == (10, 10)


def test_pyros_enumeration_of_discrete_sites_is_a_loss() -> None:
    """At a point and with z summed out nothing is random: the first loss is that of a mixture of two normals."""
    y = torch.tensor([-2.0, -1.5, 1.0, 2.5])

    def model(y: Tensor) -> None:
        mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(y)):
            z = pyro.sample("z", dist.Bernoulli(0.3), infer={"enumerate": "parallel"})
            pyro.sample("y", dist.Normal(mean + 2 * z, 0.5), obs=y)

    def guide(y: Tensor) -> None:
        mean = pyro.param("mean_at", torch.tensor(0.5))
        pyro.sample("mean", dist.Delta(mean))

    history = pd.fit(model, guide, y, steps=2, loss=TraceEnum_ELBO(max_plate_nesting=1), **QUIET)
    each = [math.log(share) + dist.Normal(mean, 0.5).log_prob(y) for share, mean in ((0.7, 0.5), (0.3, 2.5))]
    exact = -torch.logaddexp(*each).sum() - dist.Normal(0.0, 1.0).log_prob(torch.tensor(0.5))
    assert history.losses[0].item() == pytest.approx(exact.item(), rel=1e-5)
    assert pyro.param("mean_at").item() != 0.5
