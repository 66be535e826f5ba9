"""Functions that are compiled to write over their inputs: the same numbers call by call, and fresh inputs are read."""

import pytest
import torch
from torch import Tensor

from pyro_dropout.training.compile.in_place import writing


@pytest.mark.deep
def test_results_are_written_over_the_state() -> None:
    """The two parts of the state are swapped at every other call, so an order of writes that is wrong would show."""

    def function(x: Tensor, y: Tensor, count: Tensor, add: Tensor) -> list[Tensor]:
        flip = (count % 2 == 0)[:, None]
        new = x * 0.5 + add.sum(-1, keepdim=True)
        return [torch.where(flip, y, new), torch.where(flip, new, y), count + 1, (x * y).sum()]

    start = [torch.randn(3, 5, dtype=torch.float64) for _ in range(2)] + [torch.arange(3)]
    state, expected = [value.clone() for value in start], [value.clone() for value in start]
    write = writing(function, state, torch.zeros(3, 2, dtype=torch.float64))
    for value, same in zip(state, start, strict=True):
        assert torch.equal(value, same), "compilation alone changes nothing"
    for _ in range(6):
        add = torch.randn(3, 2, dtype=torch.float64)
        last = write(add).clone()
        *expected, told = function(*expected, add)
        torch.testing.assert_close(last, told, rtol=1e-12, atol=1e-12)
        for value, other in zip(state, expected, strict=True):
            torch.testing.assert_close(value, other, rtol=1e-12, atol=1e-12)


@pytest.mark.deep
def test_a_program_with_a_library_call_is_run_whole() -> None:
    def function(x: Tensor, a: Tensor) -> list[Tensor]:
        return [torch.linalg.solve(a @ a.T + torch.eye(40), x) + 1, x.sum()]

    state, expected = [torch.ones(40, 3)], torch.ones(40, 3)
    write = writing(function, state, torch.zeros(40, 40))
    for _ in range(3):
        a = torch.randn(40, 40)
        write(a)
        expected = function(expected, a)[0]
        torch.testing.assert_close(state[0], expected, rtol=1e-4, atol=1e-4)
