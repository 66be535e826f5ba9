"""Fleets in CUDA C, run on the CPU: each network takes its own recorded steps, with its own numbers."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import pyro_dropout as pd
from pyro_dropout.engines import choose, in_cuda
from pyro_dropout.engines.cuda.steps import StepsOnGpu
from pyro_dropout.engines.engine import CannotError
from pyro_dropout.engines.in_cuda import InCuda
from tests.oracles.host_kernel import HostSteps, InterpretedSteps, SharedHostSteps


def trained(count: int, batch: int | None, by: type[StepsOnGpu]) -> tuple[Tensor, list[Tensor]]:
    """Return the losses and the parameters of a fleet whose networks, rates and rows differ."""

    def build(seed: int) -> Any:
        torch.manual_seed(seed)
        model = pd.BayesianNet(nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1)))
        return model, pd.AutoMeanField(model)

    torch.manual_seed(9)
    x = torch.randn(12, 2)
    fleet = pd.Fleet(build, {"seed": list(range(count))})
    rows = torch.stack([torch.randperm(12)[:8] for _ in range(count)])
    only = mock.patch.object(choose, "engines_for", return_value=[InCuda()])
    with only, mock.patch.object(in_cuda, "StepsOnGpu", by):
        rates = [0.01 * (k + 1) for k in range(count)]
        run = fleet.prepare(x, x[:, :1], steps=6, batch_size=batch, lr=rates, indices=rows, compile="traced")
        torch.manual_seed(1)
        losses = torch.cat([run.advance(4), run.advance(2)])
    assert run.engine == "CUDA C"
    return losses, run.values


@pytest.mark.deep
@pytest.mark.parametrize("by", [SharedHostSteps, HostSteps])
@pytest.mark.parametrize(("count", "batch"), [(3, 3), (1, 3), (3, None)])
def test_each_network_of_a_fleet_takes_its_own_steps(count: int, batch: int | None, by: type[HostSteps]) -> None:
    found, expected = (trained(count, batch, each) for each in (by, InterpretedSteps))
    assert found[0].shape == (6, count)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_what_is_too_large_is_refused_before_it_is_recorded() -> None:
    model = pd.BayesianNet(nn.Sequential(nn.Linear(2, 900), nn.ReLU(), nn.Linear(900, 500)))
    guide, x = pd.AutoDropout(model), torch.randn(9, 2)
    with (
        mock.patch.object(choose, "engines_for", return_value=[InCuda()]),
        mock.patch.object(in_cuda, "traced", side_effect=AssertionError),
        pytest.raises(CannotError, match="a step changes"),
    ):
        pd.fit(model, guide, x, torch.randn(9, 500), steps=3, compile="traced", progress=False)
