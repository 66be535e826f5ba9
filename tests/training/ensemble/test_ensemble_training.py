"""An ensemble is its members: each is what it would have been alone, whatever the batches and interruptions."""

import dataclasses
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor, nn

import pyro_dropout as pd
from pyro_dropout.generative.model_call import ModelCall
from pyro_dropout.training.compile.functional import Buffers, Parameters
from pyro_dropout.training.ensemble.ensemble_training import Members, enlisted
from tests.contracts.likelihoods import LIKELIHOODS, N

QUIET: dict[str, Any] = {"compile": False, "progress": False}


def net(outputs: int = 1) -> nn.Module:
    return nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, outputs)).double()


def data(points: int = 24) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(9)
    x = torch.randn(points, 2, generator=generator, dtype=torch.float64)
    return x, x.prod(1, keepdim=True)


def asked(made: Members, *args: Any, **kwargs: Any) -> tuple[Tensor, list[Tensor]]:
    """The members' mean loss with these arguments, and their gradients."""
    call = dataclasses.replace(made.call, args=args, kwargs=kwargs)
    made = dataclasses.replace(made, call=call)
    parameters, buffers = Parameters(*made.parts, args, kwargs), Buffers(call.model, made.guide).values
    losses, slopes = made._gradients(parameters, call)(parameters.values, buffers)
    return losses.mean(), slopes


@pytest.mark.deep
@pytest.mark.parametrize("name", LIKELIHOODS)
def test_batches_add_up_to_the_whole(name: str) -> None:
    """Noise and weights belong to data points: the mean loss of disjoint mini-batches is the loss of all data."""
    case = LIKELIHOODS[name]
    x, y = data(N)[0], case.targets()
    y = y.double() if y.is_floating_point() else y
    model = pd.BayesianNet(net(case.outputs), pd.Prior(), case.make()).double()
    ensemble = pd.Ensemble(model, members=3)
    call = ModelCall(model, (x, y, len(x)))
    whole = enlisted(ensemble, call, len(x))
    parts = enlisted(ensemble, call, N // 3)
    rows = torch.arange(N).reshape(3, -1)
    batches = [parts.call.at(row) for row in rows]
    each = [asked(parts, *one.args, **one.kwargs)[0] for one in batches]
    full, _ = asked(whole, *whole.call.args, **whole.call.kwargs)
    torch.testing.assert_close(torch.stack(each).mean(), full, rtol=1e-9, atol=1e-9)
    # Other rows are other noise.
    moved = parts.call.at(rows[0])
    kwargs = dict.fromkeys(moved.kwargs, rows[1])
    assert asked(parts, *moved.args, **kwargs)[0] != each[0]


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.deep)])
def test_a_member_is_what_it_would_have_been_alone(compile: bool) -> None:
    x, y = data()
    model = pd.BayesianNet(net(), pd.Prior(), pd.Gaussian(4.0))
    ensemble = pd.Ensemble(model, members=4, seed=3)
    alone = pd.Ensemble(model, members=1)
    alone.seeds.copy_(ensemble.seeds[2:3])
    with torch.no_grad():
        for name, value in ensemble.stacked().items():
            alone.stacked()[name].copy_(value[2:3])
    how = {"steps": 40, "lr": 0.02, "progress": False}
    pd.fit(model, ensemble, x, y, compile=compile, **how)
    pd.fit(model, alone, x, y, compile=False, **how)
    one = {name: value[2] for name, value in ensemble.draws_at(torch.arange(4)).items()}
    torch.testing.assert_close(
        one, {k: v[0] for k, v in alone.draws_at(torch.tensor([0])).items()}, rtol=1e-7, atol=1e-9
    )


def test_a_member_minimises_its_own_objective() -> None:
    """The loss is that of the paper: ½τ‖y + ε − f‖² + ½‖(w − w⁰)/σ‖², written out by hand."""
    x, y = data(10)
    model = pd.BayesianNet(net(), pd.Prior(length_scale=0.5), pd.Gaussian(4.0))
    ensemble = pd.Ensemble(model, members=2)
    made = enlisted(ensemble, ModelCall(model, (x, y, len(x))), len(x))
    extras = made.problem
    assert extras is not None
    losses = []
    for m in range(2):
        weights = {name: value[m] for name, value in ensemble.draws_at(torch.arange(2)).items()}
        f = model.evaluate(ensemble.draws_at(torch.arange(2)), x)[m]
        noise = extras["data"]["noise"][m] / 4.0**0.5
        total = 0.5 * 4.0 * (y + noise - f).square().sum() + len(x) * 0.5 * torch.tensor(2 * torch.pi / 4.0).log()
        for name, value in weights.items():
            width = ensemble.template.prototype_trace.nodes[name]["fn"].base_dist.scale
            total = total + 0.5 * ((value - extras["anchors"][name][m]) / width).square().sum()
        losses.append(total)
    found, _ = asked(made, *made.call.args)
    torch.testing.assert_close(found, torch.stack(losses).mean().to(found))


@pytest.mark.deep
def test_a_learned_precision_is_that_of_the_data() -> None:
    """A width that was trained on the perturbed targets would find twice the variance, and grow without end."""
    torch.manual_seed(0)
    x = torch.randn(400, 2, dtype=torch.float64)
    y = x.sum(1, keepdim=True) + 0.3 * torch.randn(400, 1, dtype=torch.float64)
    model = pd.BayesianNet(nn.Linear(2, 1).double(), pd.Prior(), pd.Gaussian(1.0, learn=True))
    pd.fit(model, pd.Ensemble(model, members=8), x, y, steps=600, lr=0.03, batch_size=100, **QUIET)
    assert model.likelihood.tau.item() == pytest.approx(1 / 0.09, rel=0.15)


def test_whether_noise_depends_on_weights_is_asked_before_statistics_are_restored() -> None:
    net = nn.Sequential(nn.Linear(1, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    model = pd.BayesianNet(net, None, pd.HeteroscedasticGaussian(), frozen_statistics="all")
    x = torch.linspace(-1, 1, 8).unsqueeze(-1)
    history = pd.fit(model, pd.Ensemble(model, members=2), x, x, steps=2, **QUIET)
    assert history.losses.isfinite().all()


def test_clipping_is_for_each_member() -> None:
    """One member with a huge gradient does not slow the others down."""
    x, y = data()
    model = pd.BayesianNet(net(), pd.Prior(), pd.Gaussian(4.0))
    ensemble = pd.Ensemble(model, members=2, start="module")
    with torch.no_grad():
        next(iter(ensemble.parameters()))[1] *= 1000
    made = enlisted(ensemble, ModelCall(model, (x, y, len(x))), len(x), clip_norm=1.0)
    _, slopes = asked(made, *made.call.args)
    norms = torch.stack([slope.flatten(1).square().sum(1) for slope in slopes]).sum(0).sqrt()
    torch.testing.assert_close(norms, torch.ones(2, dtype=torch.float64), rtol=1e-4, atol=0.0)


X, Y = data()


def line(learn: bool = False) -> pd.BayesianNet:
    return pd.BayesianNet(nn.Linear(2, 1).double(), pd.Prior(), pd.Gaussian(4.0, learn=learn)).double()


def trained(model: pd.BayesianNet, ensemble: pd.Ensemble, **options: Any) -> pd.training.History:
    return pd.fit(model, ensemble, X, Y, **{**QUIET, "steps": 12, "lr": 0.05, **options})


def values(ensemble: pd.Ensemble) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in ensemble.stacked().items()}


def stop_at(step: int) -> Any:
    """A schedule that is interrupted by the user."""

    def schedule(t: Tensor) -> Tensor:
        if int(t) == step:
            raise KeyboardInterrupt
        return torch.ones_like(t)

    return schedule


# --- seeds, and what is refused ---------------------------------------------------------------------------------------


def test_a_resumed_ensemble_ends_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    """Without a seed, in a process that has built another ensemble: its seeds are those of the checkpoint."""

    def train(folder: str, steps: int, seed: int) -> dict[str, Tensor]:
        torch.manual_seed(seed)
        model = line()
        ensemble = pd.Ensemble(model, members=3)
        where = pd.training.Checkpoint(tmp_path / folder, every=5, seconds=1e9)
        trained(model, ensemble, steps=steps, batch_size=8, checkpoint=where)
        return values(ensemble)

    whole = train("whole", 20, seed=0)
    train("parts", 10, seed=0)
    parts = train("parts", 20, seed=1)
    assert all(torch.equal(parts[name], value) for name, value in whole.items())


def test_an_optimiser_that_mixes_members_is_refused() -> None:
    model = line()
    ensemble = pd.Ensemble(model, members=4)
    optim, before = torch.optim.Adafactor(ensemble.parameters()), values(ensemble)
    with pytest.raises(pd.errors.PyroDropoutError, match="members do not depend on each other; got Adafactor"):
        trained(model, ensemble, optim=optim, lr=None)
    assert all(torch.equal(value, before[name]) for name, value in values(ensemble).items())


# --- interruptions ----------------------------------------------------------------------------------------------------


def test_an_interruption_leaves_what_members_have_learned() -> None:
    model = line()
    ensemble, twin = (pd.Ensemble(model, members=2, seed=1) for _ in range(2))
    with pytest.raises(KeyboardInterrupt):
        trained(model, ensemble, schedule=stop_at(7))
    trained(model, twin, steps=7)
    torch.testing.assert_close(values(ensemble), values(twin))


# --- members that diverge ---------------------------------------------------------------------------------------------


def test_a_member_that_diverges_harms_no_other(tmp_path: Path) -> None:
    """With one learned τ for all: the others, τ and the answers are those of an ensemble without that member."""
    models = [line(learn=True) for _ in range(2)]
    whole, others = (pd.Ensemble(model, members=count, seed=5) for model, count in zip(models, (4, 3), strict=True))
    with torch.no_grad():
        for value in whole.parameters():
            value[3] = 1e200  # whose square is not finite
    with pytest.warns(UserWarning, match=r"1 of 4 members reached a loss that is not finite.* \(3\)"):
        history = trained(models[0], whole, clip_norm=50.0, batch_size=8, seed=0, validation=(X, Y))
    again = trained(models[1], others, clip_norm=50.0, batch_size=8, seed=0, validation=(X, Y))
    assert history.diverged.tolist() == [False, False, False, True]
    torch.testing.assert_close(history.losses, again.losses)
    torch.testing.assert_close(torch.tensor(history.validation), torch.tensor(again.validation))
    torch.testing.assert_close(models[0].likelihood.tau, models[1].likelihood.tau)
    assert models[0].likelihood.tau != 4
    torch.testing.assert_close({name: value[:3] for name, value in values(whole).items()}, values(others))
    assert whole.members == 3
    answers = [pd.predict(model, e, X) for model, e in zip(models, (whole, others), strict=True)]
    torch.testing.assert_close(answers[0].mean, answers[1].mean)
    torch.testing.assert_close(answers[0].error_over_members, answers[1].error_over_members)
    torch.testing.assert_close(whole.mean(), others.mean())
    pd.save(tmp_path / "posterior", models[0], whole)
    loaded = pd.Ensemble(models[0], members=4)
    pd.load(tmp_path / "posterior", models[0], loaded)
    assert loaded.members == 3
    assert whole.sample_weights(4)["weight"].isfinite().all()


def test_if_all_diverge_nothing_is_left_to_ask() -> None:
    model = line()
    ensemble = pd.Ensemble(model, members=2)
    with torch.no_grad():
        next(ensemble.parameters()).fill_(torch.nan)
    with pytest.raises(pd.errors.DivergedError, match="the loss is nan at step 1"):
        trained(model, ensemble)
    for ask in (ensemble.mean, lambda: ensemble.order(3), lambda: pd.predict(model, ensemble, X)):
        with pytest.raises(pd.errors.PyroDropoutError, match="all 2 members have diverged"):
            ask()


# --- one training after another ---------------------------------------------------------------------------------------


def wide(x: Tensor, y: Tensor) -> None:
    """A line under a prior of which a draw is thousands of steps away from the posterior."""
    beta = pyro.sample("beta", dist.Normal(x.new_zeros(3), 1000.0).to_event(1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(x @ beta, 0.5), obs=y)


@pytest.mark.parametrize("members", [None, 6])
@pytest.mark.parametrize("guide", [pd.AutoMeanField, pd.AutoFullRank])
def test_a_guide_under_a_wide_prior_arrives_at_the_posterior(guide: Any, members: int | None) -> None:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(40, 3, generator=generator)
    y = x @ torch.tensor([2.0, -1.0, 0.5]) + 0.5 * torch.randn(40, generator=generator)
    trained = guide(wide) if members is None else pd.Ensemble(wide, guide, members, seed=0)
    pd.fit(wide, trained, x, y, steps=1500, lr=0.02, progress=False)
    exact = torch.linalg.solve(x.T @ x + 0.25e-6 * torch.eye(3), x.T @ y)
    means = [trained.mean()] if members is None else trained._of_each(lambda guide: guide.mean())
    found = torch.stack([each["beta"] for each in means])
    assert len(found.unique(dim=0)) == (members or 1)  # they started apart
    torch.testing.assert_close(found, exact.expand(len(found), 3), rtol=0.0, atol=0.08)


def test_members_that_have_not_arrived_are_named() -> None:
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(4))
    ensemble = pd.Ensemble(wide, pd.AutoMeanField, members=6, seed=0)
    with pytest.warns(pd.errors.UnfinishedTrainingWarning, match="of 6 members ended"):
        pd.fit(wide, ensemble, x, x.sum(1), steps=20, lr=0.01, **QUIET)


def test_members_share_a_parameter_of_a_pyro_model() -> None:
    """One that is in Pyro's store alone: it was not trained."""

    def model(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(2, dtype=x.dtype), 1.0).to_event(1))
        width = pyro.param("width", torch.tensor(3.0, dtype=x.dtype), constraint=dist.constraints.positive)
        with pyro.plate("points", len(x)):
            pyro.sample("y", dist.Normal(x @ w, width), obs=y)

    x = torch.randn(300, 2, dtype=torch.float64)
    y = x.sum(1) + 0.5 * torch.randn(300, dtype=torch.float64)
    pd.fit(model, pd.Ensemble(model, pd.AutoMeanField, members=3), x, y, steps=300, lr=0.03, **QUIET)
    assert pyro.param("width").item() == pytest.approx(0.5, rel=0.15)
