"""Memory that runs out while an ensemble trains: fewer members are computed at once, and nothing is lost."""

from typing import Any

import pytest
import torch

import pyro_dropout as pd
from pyro_dropout.engines import choose
from pyro_dropout.engines.inductor import Inductor
from pyro_dropout.engines.program import Program
from pyro_dropout.errors import OutOfMemoryError
from pyro_dropout.training.ensemble import member_loss
from pyro_dropout.training.ensemble.member_loss import EnsembleLoss
from tests.training.ensemble.test_ensemble_training import line, trained, values


def short_of_memory(monkeypatch: pytest.MonkeyPatch, most: int, after: int = 0) -> list[int]:
    """Make a device that holds the activations of ``most`` members, from some call on; return the members of calls."""
    real, seen = member_loss.vmap, []

    def vmap(run: Any, *, in_dims: Any, chunk_size: int | None, **options: Any) -> Any:
        def mapped(*inputs: Any) -> Any:
            rows = next(len(each) for each, dim in zip(inputs, in_dims, strict=True) if dim == 0)
            seen.append(min(rows, chunk_size or rows))
            if seen[-1] > most and len(seen) > after:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
            return real(run, in_dims=in_dims, chunk_size=chunk_size, **options)(*inputs)

        return mapped

    monkeypatch.setattr(member_loss, "vmap", vmap)
    return seen


@pytest.mark.parametrize("after", [0, 9])
def test_half_as_many_members_are_computed_at_once(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    model = line()
    whole, halved = (pd.Ensemble(model, members=6, seed=4) for _ in range(2))
    history = trained(model, whole, batch_size=8, seed=0)
    seen = short_of_memory(monkeypatch, 2, after)
    again = trained(model, halved, batch_size=8, seed=0)
    assert seen == [*[6] * (after + 1), 3, *[2] * (12 + 1 - after)]  # the first call finds the parameters
    torch.testing.assert_close(again.losses, history.losses, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(values(halved), values(whole), rtol=1e-12, atol=1e-12)


def test_the_next_group_begins_with_as_many_as_fitted(monkeypatch: pytest.MonkeyPatch) -> None:
    model = line()
    seen = short_of_memory(monkeypatch, 1)
    trained(model, pd.Ensemble(model, members=4, group=2), steps=1)
    assert seen == [2, 1, 1, 1, 1]


@pytest.mark.deep
def test_if_one_member_is_too_much_smaller_groups_are_advised(monkeypatch: pytest.MonkeyPatch) -> None:
    model = line()
    ensemble = pd.Ensemble(model, members=2)
    before = values(ensemble)
    short_of_memory(monkeypatch, 0)
    with pytest.raises(OutOfMemoryError, match=r"a single point.*fewer members at a time \(Ensemble\(group=...\)\)"):
        trained(model, ensemble)
    assert all(torch.equal(value, before[name]) for name, value in values(ensemble).items())


@pytest.mark.deep
def test_a_compiled_step_is_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory runs out in the middle of a block of steps, all of which are repeated."""
    monkeypatch.setattr(choose, "engines_for", lambda *args: [Inductor()])  # C would need no memory of torch's
    model = line()
    whole, halved = (pd.Ensemble(model, members=3, seed=4) for _ in range(2))
    history = trained(model, whole, batch_size=8, seed=0, compile=True)
    real, calls, at_once = Program.flat, [], EnsembleLoss.within_memory

    def flat(self: Program, *inputs: Any) -> Any:
        calls.append(0)
        if len(calls) == 5:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return real(self, *inputs)

    left: list[int | None] = []

    def noted(self: EnsembleLoss, work: Any, members: int) -> Any:
        found = at_once(self, work, members)
        left.append(self.at_once)
        return found

    monkeypatch.setattr(Program, "flat", flat)
    monkeypatch.setattr(EnsembleLoss, "within_memory", noted)
    again = trained(model, halved, batch_size=8, seed=0, compile=True)
    assert left[-1] == 2
    assert again.compiled
    assert len(again.losses) == 12
    torch.testing.assert_close(again.losses, history.losses)
    torch.testing.assert_close(values(halved), values(whole))
