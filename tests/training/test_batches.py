"""Mini-batches in memory: every point once in an epoch, and an order that does not depend on how it is asked for."""

import pytest
import torch
from torch import Tensor

from pyro_dropout.training.batches import Batches


def made(size: int, rows: Tensor) -> Batches:
    torch.manual_seed(3)
    return Batches(size, rows)


def epoch_by_epoch(size: int, rows: Tensor, epochs: int) -> Tensor:
    """Return the batches of some epochs, each drawn and sorted alone."""
    generator = made(size, rows).generator
    found = []
    for _ in range(epochs):
        order = torch.rand(rows.shape, generator=generator).argsort(dim=-1, stable=True)
        whole = rows.shape[-1] // size * size
        found.append(rows.gather(-1, order[..., :whole]).unflatten(-1, (-1, size)).movedim(-2, 0))
    return torch.cat(found)


@pytest.mark.parametrize("rows", [torch.arange(10), torch.arange(22).reshape(2, 11)], ids=["one run", "two replicas"])
@pytest.mark.parametrize("counts", [[1] * 12, [20, 3], [5, 40]], ids=str)
def test_the_order_is_that_of_epochs_drawn_one_by_one(rows: Tensor, counts: list[int]) -> None:
    batches = made(3, rows)
    found = torch.cat([batches.take(count) for count in counts])
    assert torch.equal(found, epoch_by_epoch(3, rows, 20)[: len(found)])


def test_a_restored_state_goes_on_where_it_was() -> None:
    batches = made(4, torch.arange(12))
    batches.take(5)
    state = {name: value.clone() for name, value in batches.state().items()}
    expected = batches.take(500)
    other = made(4, torch.arange(12))
    other.set_state(state)
    assert torch.equal(other.take(500), expected)
