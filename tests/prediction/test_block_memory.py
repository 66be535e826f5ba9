"""Blocks of a prediction by the memory of a forward pass, and out-of-memory errors of a CPU."""

import pytest
import torch
from torch import Tensor, nn

import pyro_dropout as pd
from pyro_dropout.prediction.blocks import Walk
from pyro_dropout.prediction.weight_draws import WeightDraws


def pair(net: nn.Module, x: Tensor) -> tuple[pd.BayesianNet, pd.AutoDropout]:
    model = pd.BayesianNet(net)
    guide = pd.AutoDropout(model, keep=0.9)
    guide(x, torch.zeros(len(x), 1))
    return model, guide


def rows(kind: type[WeightDraws], net: nn.Module, x: Tensor, samples: int) -> int:
    walk = Walk(kind(*pair(net, x)), x, samples, chunk=None, seed=0, compile=False)
    return max(block.rows for block in walk._blocks)


@pytest.mark.parametrize(
    "error",
    [RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"), MemoryError()],
)
def test_a_cpu_without_memory_halves_the_block(error: Exception) -> None:
    class Small(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) > 20:
                raise error
            return super().forward(x)

    x = torch.randn(4, 2)
    model, guide = pair(Small(2, 1), x)
    answer = pd.predict(model, guide, x, samples=50, seed=0)
    assert answer.samples.shape == (50, 4, 1)
    torch.testing.assert_close(answer.mean, answer.samples.mean(0))
