"""A training by the kernel is a training as any other: seeds, checkpoints, early stopping, what is written back."""

from pathlib import Path
from typing import Any

import pyro
import pytest
import torch
from torch import Tensor, nn

import pyro_dropout as pd
from tests.training.one_kernel.kernel_runs import PLACE, by_the_kernel

QUIET: dict[str, Any] = {"progress": False, "lr": 0.02, "compile": True, "device": PLACE}


def data(points: int = 16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(points, 2, generator=generator)
    return x, x.sum(1, keepdim=True)


def pair(seed: int = 0) -> Any:
    pyro.clear_param_store()
    torch.manual_seed(seed)
    model = pd.BayesianNet(nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1)), likelihood=pd.Gaussian(25.0))
    return model, pd.AutoDropout(model, keep=0.8)


def fitted(steps: int = 6, **how: Any) -> tuple[Any, Any]:
    """Return the history and the guide of a training by the kernel."""
    model, guide = pair()
    with by_the_kernel():
        history = pd.fit(model, guide, *data(), steps=steps, **{**QUIET, "seed": 5, "batch_size": 8, **how})
    return history, guide


@pytest.mark.deep
def test_a_seed_repeats_a_training() -> None:
    first, guide = fitted()
    second, other = fitted()
    third, _ = fitted(seed=6)
    assert first.compiled
    assert not first.traced
    assert torch.equal(first.losses, second.losses)
    assert not torch.equal(first.losses, third.losses)
    torch.testing.assert_close(guide.mean(), other.mean(), rtol=0, atol=0)


def test_two_trainings_without_a_seed_draw_different_masks() -> None:
    runs = []
    torch.manual_seed(0)
    for _ in range(2):
        before = torch.get_rng_state()
        model, guide = pair()
        torch.set_rng_state(before)
        with by_the_kernel():
            runs.append(pd.fit(model, guide, *data(), steps=2, **QUIET).losses)
    assert not torch.equal(*runs)


@pytest.mark.deep
def test_the_loss_falls_and_the_guide_has_what_was_learned() -> None:
    model, guide = pair()
    before = {name: value.clone() for name, value in guide.mean().items()}
    with by_the_kernel():
        history = pd.fit(model, guide, *data(), steps=60, **QUIET, seed=1)
    assert history.losses[-10:].mean() < history.losses[:10].mean()
    assert all(not torch.equal(before[name].to(PLACE), value) for name, value in guide.mean().items())
    assert all(parameter.requires_grad for parameter in guide.parameters())


@pytest.mark.deep
def test_a_resumed_training_ends_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    whole, guide = fitted(steps=25)
    part, _ = fitted(steps=9, checkpoint=tmp_path)
    resumed, other = fitted(steps=25, checkpoint=tmp_path)
    assert part.steps == 9
    assert torch.equal(resumed.losses, whole.losses)
    torch.testing.assert_close(guide.mean(), other.mean(), rtol=0, atol=0)


@pytest.mark.deep
def test_a_checkpoint_of_other_steps_is_resumed_by_the_kernel(tmp_path: Path) -> None:
    model, guide = pair()
    how = {**QUIET, "seed": 5, "batch_size": 8, "checkpoint": tmp_path}
    first = pd.fit(model, guide, *data(), steps=5, **{**how, "compile": False})
    resumed, _ = fitted(steps=8, checkpoint=tmp_path)
    assert torch.equal(resumed.losses[:5], first.losses.cpu())
    model, guide = pair()
    back = pd.fit(model, guide, *data(), steps=10, **{**how, "compile": False})
    assert torch.equal(back.losses[:8].cpu(), resumed.losses)


@pytest.mark.deep
def test_early_stopping_restores_the_best_parameters() -> None:
    history, guide = fitted(steps=40, validation=data(10), patience=1, check_every=5, lr=0.3)
    assert history.validation
    assert all(torch.isfinite(value).all() for value in guide.mean().values())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter, which computes with numpy
def test_a_training_that_diverges_returns_to_its_last_good_parameters() -> None:
    x, y = data()
    model, guide = pair()
    with by_the_kernel(), pytest.raises(pd.DivergedError, match="the loss is"):
        pd.fit(model, guide, x, 1e30 * y, steps=3, **QUIET)
    assert all(torch.isfinite(value).all() for value in guide.mean().values())


@pytest.mark.deep
def test_a_fleet_by_the_kernel_has_its_own_losses_and_parameters() -> None:
    def build(seed: int, keep: float) -> Any:
        return pair(seed)[0], pd.AutoDropout(pair(seed)[0], keep=keep)

    x, y = data()
    fleets = [pd.Fleet(build, {"seed": [0, 0, 1], "keep": [0.8, 0.8, 0.5]}) for _ in range(2)]
    with by_the_kernel():
        found = [fleet.fit(x, y, steps=5, batch_size=8, seed=3, **QUIET) for fleet in fleets]
    assert found[0].compiled
    assert found[0].losses.shape == (5, 3)
    assert torch.equal(found[0].losses, found[1].losses)
    assert not torch.equal(found[0].losses[:, 0], found[0].losses[:, 1])  # equal replicas, different masks and batches
    for (_, one), (_, other) in zip(*fleets, strict=True):
        torch.testing.assert_close(one.mean(), other.mean(), rtol=0, atol=0)


@pytest.mark.deep
def test_a_resumed_fleet_ends_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    def build(seed: int) -> Any:
        return pair(seed)

    def trained(steps: int, **how: Any) -> tuple[Any, Any]:
        fleet = pd.Fleet(build, {"seed": [0, 1]})
        with by_the_kernel():
            return fleet.fit(*data(), steps=steps, batch_size=8, seed=3, **QUIET, **how), fleet

    whole, fleet = trained(9)
    trained(4, checkpoint=tmp_path)
    resumed, other = trained(9, checkpoint=tmp_path)
    assert torch.equal(resumed.losses, whole.losses)
    for (_, one), (_, same) in zip(fleet, other, strict=True):
        torch.testing.assert_close(one.mean(), same.mean(), rtol=0, atol=0)
