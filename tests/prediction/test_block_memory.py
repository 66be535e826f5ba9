"""Blocks of a prediction by the memory of a forward pass, and out-of-memory errors of a CPU."""

import pytest
import torch
from torch import Tensor, nn

import pyro_dropout as pd
from pyro_dropout.prediction.blocks import Walk
from pyro_dropout.prediction.weight_draws import PerExample, WeightDraws, WholeFunctions


def pair(net: nn.Module, x: Tensor) -> tuple[pd.BayesianNet, pd.AutoDropout]:
    model = pd.BayesianNet(net)
    guide = pd.AutoDropout(model, keep=0.9)
    guide(x, torch.zeros(len(x), 1))
    return model, guide


def rows(kind: type[WeightDraws], net: nn.Module, x: Tensor, samples: int) -> int:
    walk = Walk(kind(*pair(net, x)), x, samples, chunk=None, seed=0, compile=False)
    return max(block.rows for block in walk._blocks)


class Images(nn.Module):
    """A convolution whose output is 16 times as large as its input, 4 · 16 · 64² = 256 KiB for an image."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv2d(1, 16, 3, padding=1), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(self.conv(x).mean((2, 3)))
        return found


@pytest.mark.parametrize("kind", [PerExample, WholeFunctions])
@pytest.mark.thinned(2)
def test_a_block_of_images_has_fewer_rows(kind: type[WeightDraws]) -> None:
    assert 2048 < rows(kind, Images(), torch.zeros(8, 1, 64, 64), 10_000) <= 4096  # 2³⁰ bytes of 256 KiB


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
