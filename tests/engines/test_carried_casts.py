"""Copies of the parameters in half precision that one step hands to the next."""

import pytest
import torch
from torch import Tensor

from pyro_dropout.engines.program import Program


def step(values: list[Tensor], x: Tensor) -> tuple[list[Tensor], Tensor]:
    """A step whose second parameter is never cast."""
    f = x.bfloat16() @ values[0].bfloat16()
    slope = (x.bfloat16().mT @ (f - 1)).float()
    return [values[0] - 0.1 * slope, values[1] + 1], f.float().sum()


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.deep)])
def test_a_chain_with_copies_takes_the_same_steps(compile: bool) -> None:
    torch.manual_seed(0)
    values, x = [torch.randn(4, 3), torch.zeros(())], torch.randn(8, 4)
    plain, program = (Program(step, values, x, compile=compile, carries=carries) for carries in (0, 2))
    assert program.carried == [(0, torch.bfloat16)]
    casts = program.casts(values)
    for _ in range(5):
        expected, loss = plain(values, x)
        found, same = program(values, x, casts=casts)
        alone, once = program(values, x)
        for each in (found, alone):
            assert all(map(torch.equal, each, expected))
        assert torch.equal(loss, same)
        assert torch.equal(loss, once)
        assert torch.equal(casts[0], found[0].bfloat16())
        values = found
