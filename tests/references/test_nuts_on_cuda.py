"""The no-U-turn sampler on a GPU: draws, counts, seeds and adaptation, beside those of the CPU."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import pyro_dropout as pd
from pyro_dropout.generative.model_call import ModelCall
from pyro_dropout.references.nuts.adaptation import Plan
from pyro_dropout.references.nuts.chains import ChainResult, _Run
from pyro_dropout.references.nuts.energy import Energy
from tests.references.test_no_u_turn import bent, energies

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.usefixtures("unchecked_shapes"),
]
F64 = torch.float64
CUDA = torch.device("cuda")


def sampled(energy: Any, starts: Tensor, plan: Plan, seed: int) -> list[ChainResult]:
    """Run chains on the GPU, and nowhere else."""
    run = _Run(energy, starts, plan, seed, True, CUDA)
    while run.left:
        run.block()
    assert run.not_on_gpu is None
    assert run._gpu is not None
    return run.results()


def on_cpu(energy: Any, starts: Tensor, plan: Plan, seed: int) -> list[ChainResult]:
    run = _Run(energy, starts, plan, seed, False)
    while run.left:
        run.block()
    return run.results()


def somewhere(chains: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(0).normal(size=(chains, 3)))


@pytest.mark.parametrize("energy", [energies, bent])
@pytest.mark.parametrize("plan", [Plan(15, 45, 0.8, 3), Plan(25, 0, 0.8, 10)], ids=["with-warmup", "deep-trees"])
def test_chains_are_those_of_the_cpu(energy: Any, plan: Plan) -> None:
    found, expected = (run(energy, somewhere(3), plan, 5) for run in (sampled, on_cpu))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.draws, other.draws, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(one.scale, other.scale, rtol=1e-5)
        assert one.step == pytest.approx(other.step, rel=1e-5)
        assert (one.diverged, one.deepest, one.steps) == (other.diverged, other.deepest, other.steps)


def test_a_chain_that_needs_more_memory_than_its_processor_has_is_that_of_the_cpu() -> None:
    torch.manual_seed(0)
    x = torch.linspace(-2, 2, 12).unsqueeze(-1)
    net = nn.Sequential(nn.Linear(1, 120), nn.Tanh(), nn.Linear(120, 1))
    energy = Energy(ModelCall(pd.BayesianNet(net, likelihood=pd.Gaussian(tau=25.0)), (x, torch.sin(x))))
    starts, plan = torch.stack([energy.start() for _ in range(2)]), Plan(4, 0, 0.8, 3)
    for one, other in zip(sampled(energy, starts, plan, 1), on_cpu(energy, starts, plan, 1), strict=True):
        np.testing.assert_allclose(one.draws, other.draws, rtol=1e-6, atol=1e-7)


def test_draws_of_a_model_on_a_gpu_lie_there_and_repeat() -> None:
    x = torch.randn(20, 2, device=CUDA)
    model = pd.BayesianNet(nn.Linear(2, 1), likelihood=pd.Gaussian(tau=2.0)).cuda()
    options: Any = {"chains": 16, "samples": 300, "warmup": 150, "compile": True, "progress": False}
    one, again = (pd.nuts(model, x, x[:, :1], seed=0, **options).weights["weight"] for _ in range(2))
    assert one.shape == (16, 300, 1, 2)
    assert one.is_cuda
    assert torch.equal(one, again)
