"""Eager steps change parameters in place, as functional updates do; a large network takes none that is not finite."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

import pyro_dropout as pd
from pyro_dropout.engines import engine
from pyro_dropout.training.optimisers import Update, adam, sgd

QUIET: Any = {"compile": False, "progress": False, "seed": 0}
X = torch.linspace(-1, 1, 12).unsqueeze(-1)


def pair() -> tuple[pd.BayesianNet, pd.AutoMeanField]:
    torch.manual_seed(0)
    model = pd.BayesianNet(nn.Sequential(nn.Linear(1, 6), nn.Tanh(), nn.Linear(6, 1)), likelihood=pd.Gaussian(4.0))
    return model, pd.AutoMeanField(model)


@pytest.mark.parametrize(
    "update",
    [adam(0.1), adam(0.1, weight_decay=0.2), adam(0.1, weight_decay=0.2, decoupled=True), sgd(0.1, 0.9, 0.01, True)],
)
@pytest.mark.parametrize("clip", [None, 0.5])
def test_in_place_equals_the_functional_update(update: Update, clip: float | None, dtype: torch.dtype) -> None:
    update = dataclasses.replace(update, clip_norm=clip, schedule=lambda t: 1 / (1 + t))
    values = [torch.randn(3, 4, dtype=dtype), torch.randn(5, dtype=dtype)]
    mine, state = [value.clone() for value in values], update.start(values)
    slots = [[slot.clone() for slot in each] for each in state]
    lr = torch.tensor(update.lr, dtype=dtype)
    for t in range(1, 8):
        slopes, when = [torch.randn_like(value) for value in values], torch.tensor(float(t), dtype=dtype)
        values, state = update.step(values, slopes, state, when, lr)
        update.step_in_place(mine, [slope.clone() for slope in slopes], slots, when, lr)
    slack = 1e-6 if dtype == torch.float32 else 1e-7  # torch's kernel takes the learning rate as a float
    torch.testing.assert_close(mine, values, rtol=slack, atol=slack)
    torch.testing.assert_close(slots, state, rtol=slack, atol=slack)


def test_a_gradient_may_lie_in_memory_in_another_order() -> None:
    """torch's fused kernel would pair its numbers with those of other weights."""
    update, value = adam(0.1), torch.zeros(3, 4)
    slope = torch.arange(12.0).sub(5.5).reshape(4, 3).mT
    state, one = update.start([value]), torch.tensor(1.0)
    update.step_in_place([value], [slope], state, one, torch.tensor(0.1))
    torch.testing.assert_close(value, -0.1 * slope.sign())


def laid_out(kind: str) -> torch.Tensor:
    layouts = {
        "by column": torch.randn(3, 4).mT,
        "channels last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "every other": torch.randn(6, 4)[:, ::2],
        "a part": torch.randn(4, 6)[:, :3],
        "a number": torch.randn(()),
    }
    return layouts[kind]


@pytest.mark.parametrize("kind", ["by column", "channels last", "every other", "a part", "a number"])
@pytest.mark.parametrize("decoupled", [False, True])
def test_parameters_may_lie_in_memory_in_any_order(kind: str, decoupled: bool) -> None:
    """And multiples of them that are missing in the gradients are added."""
    value, update = laid_out(kind), adam(0.1, weight_decay=0.1, decoupled=decoupled)
    mine, theirs, lr = update.start([value]), update.start([value]), torch.tensor(0.1)
    copy = [value.clone()]
    for t in map(torch.tensor, (1.0, 2.0, 3.0)):
        slope = torch.randn(value.shape)
        missing = 0.3 if update.takes_decays([value]) else 0.0
        given = slope if missing else slope + 0.3 * value
        update.step_in_place([value], [given], mine, t, lr, [missing])
        copy, theirs = update.step(copy, [slope + 0.3 * copy[0]], theirs, t, lr)
    torch.testing.assert_close(value, copy[0])


@pytest.mark.parametrize("guide", ["dropout", "mean field", "low rank", "row mixture"])
def test_steps_that_leave_decay_to_the_optimiser_equal_those_that_do_not(
    guide: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: dict[str, Any] = {
        "dropout": lambda model: pd.AutoDropout(model, keep=0.9),
        "mean field": pd.AutoMeanField,
        "low rank": lambda model: pd.AutoLowRank(model, rank=2),
        "row mixture": pd.AutoRowMixture,
    }
    found = []
    for leaves in (True, False):
        monkeypatch.setattr(Update, "takes_decays", lambda self, parameters, leaves=leaves: leaves)
        torch.manual_seed(0)
        model = pair()[0]
        posterior = made[guide](model)
        pd.fit(model, posterior, X, X**2, steps=5, lr=0.05, **QUIET)
        found.append([parameter.detach().clone() for parameter in posterior.parameters()])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


def test_eager_steps_change_the_tensors_of_the_guide_themselves() -> None:
    model, guide = pair()
    before = [parameter.data_ptr() for parameter in guide.parameters()]
    start = [parameter.detach().clone() for parameter in guide.parameters()]
    pd.fit(model, guide, X, X, steps=3, **QUIET)
    assert [parameter.data_ptr() for parameter in guide.parameters()] == before
    assert all(not torch.equal(a, b) for a, b in zip(start, guide.parameters(), strict=True))


def test_an_update_of_the_user_runs_in_place_too() -> None:
    model, guide = pair()
    start = [parameter.detach().clone() for parameter in guide.parameters()]
    halve = pd.Update("halve", lr=1.0, slots=0, apply=lambda p, g, s, lr, t: (p / 2, s))
    pd.fit(model, guide, X, X, steps=2, optim=halve, **QUIET)
    torch.testing.assert_close(list(guide.parameters()), [each / 4 for each in start])


@pytest.mark.parametrize("wrong", ["targets", "gradient"])
def test_a_large_network_does_not_take_a_step_that_is_not_finite(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "LARGE", 0)
    model, guide = pair()
    pd.fit(model, guide, X, X, steps=3, **QUIET)
    before = [parameter.detach().clone() for parameter in guide.parameters()]
    if wrong == "targets":
        said, y = (
            r"the loss is nan at step 1; that step was not taken\. The term of site 'y' is not finite",
            X * torch.nan,
        )
    else:
        said, y = r"the loss is [\d.e+-]+ and its gradient not finite at step 1; that step was not taken", X
        guided = guide.forward

        def forward(*args: object, **kwargs: object) -> Any:
            found = guided(*args, **kwargs)
            for value in found.values():
                if value.requires_grad:
                    value.register_hook(lambda slope: slope * torch.inf)
            return found

        monkeypatch.setattr(guide, "forward", forward)
    with pytest.raises(pd.DivergedError, match=said + r".*The parameters are those after step 0\. Lower the"):
        pd.fit(model, guide, X, y, steps=5, **({"loss": pd.ELBO(per_example=False)} | QUIET))
    assert all(torch.equal(a, b) for a, b in zip(before, guide.parameters(), strict=True))
