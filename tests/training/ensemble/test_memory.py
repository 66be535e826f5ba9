"""Memory that runs out while an ensemble trains: fewer members are computed at once, and nothing is lost."""

from typing import Any

import pytest
import torch

import pyro_dropout as pd
from pyro_dropout.errors import OutOfMemoryError
from pyro_dropout.training.fleet import replicas
from tests.training.ensemble.test_ensemble_training import line, trained, values


def short_of_memory(monkeypatch: pytest.MonkeyPatch, most: int, after: int = 0) -> list[int]:
    """Make a device that holds the activations of ``most`` members, from some call on; return the members of calls."""
    real, seen = replicas.vmap, []

    def vmap(run: Any, *, in_dims: Any, chunk_size: int | None, **options: Any) -> Any:
        def mapped(*inputs: Any) -> Any:
            rows = next(len(each) for each, dim in zip(inputs, in_dims, strict=True) if dim == 0)
            seen.append(min(rows, chunk_size or rows))
            if seen[-1] > most and len(seen) > after:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
            return real(run, in_dims=in_dims, chunk_size=chunk_size, **options)(*inputs)

        return mapped

    monkeypatch.setattr(replicas, "vmap", vmap)
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


@pytest.mark.deep
def test_if_one_member_is_too_much_less_is_advised(monkeypatch: pytest.MonkeyPatch) -> None:
    model = line()
    ensemble = pd.Ensemble(model, members=2)
    before = values(ensemble)
    short_of_memory(monkeypatch, 0)
    with pytest.raises(OutOfMemoryError, match=r"fewer members \(Ensemble\(members=...\)"):
        trained(model, ensemble)
    assert all(torch.equal(value, before[name]) for name, value in values(ensemble).items())
