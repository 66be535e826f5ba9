"""Copies of the parameters in half precision that one step hands to the next."""

import pytest
import torch
from torch import Tensor, nn

import pyro_dropout as pd
from pyro_dropout.engines.program import Program
from pyro_dropout.generative.model_call import ModelCall
from pyro_dropout.generative.precision import products_in
from pyro_dropout.training.optimisers import named
from pyro_dropout.training.training_task import TrainingTask


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


@pytest.mark.deep
def test_weights_that_are_cast_are_carried_and_nothing_in_float32() -> None:
    model = pd.BayesianNet(nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 1)))
    guide = pd.AutoDropout(model)
    x, y = torch.randn(64, 20), torch.randn(64, 1)
    found = {}
    for precision in ("float32", "bf16"):
        task = TrainingTask(guide, pd.ELBO(per_example=True), ModelCall(model, (x, y, 64)))
        with products_in(precision):  # type: ignore[arg-type]
            run = task.run(named("adam", 1e-3), 64, False)
            values, state = [value.clone() for value in run.values], named("adam", 1e-3).start(run.values)
            inputs = (values, state, run.t, run.lr, *run._inputs)
            program = Program(run._step, *inputs, compile=False, carries=len(values))
        found[precision] = program.carried
    assert found["float32"] == []
    shapes = [tuple(run.values[k].shape) for k, _ in found["bf16"]]
    assert {(32, 20), (16, 32)} <= set(shapes)
    assert (1, 16) not in shapes  # a layer with few outputs stays in float32
