"""Trees and chains: against the recursion, the distribution that they leave as it is, and what chains adapt."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import pyro_dropout as pd
from pyro_dropout.references.nuts.adaptation import Plan, begun, untuned
from pyro_dropout.references.nuts.chains import run_chains
from pyro_dropout.references.nuts.no_u_turn import Tree, planted, refreshed
from pyro_dropout.references.nuts.stepping import Stepping
from tests.oracles import recursive_nuts

F64 = torch.float64
STDS = np.array([0.1, 1.0, 10.0])
MIX = np.array([[1.0, 0.0, 0.0], [0.8, 0.6, 0.0], [0.0, 0.6, 0.8]])
COVARIANCE = np.diag(STDS) @ MIX @ MIX.T @ np.diag(STDS)
PRECISION = torch.from_numpy(np.linalg.inv(COVARIANCE))
CENTRE = torch.tensor([1.0, -2.0, 3.0], dtype=F64)


def energies(z: Tensor) -> tuple[Tensor, Tensor]:
    """Of the Gaussian with that centre and covariance."""
    pull = (z - CENTRE) @ PRECISION
    return 0.5 * (pull * (z - CENTRE)).sum(-1), pull


def bent(z: Tensor) -> tuple[Tensor, Tensor]:
    """Of a narrow bend, on which trajectories differ much in length and some diverge."""
    x, y, w = z.unbind(-1)
    far = y - x**2
    energy = 0.5 * x**2 + 50 * far**2 + 0.5 * w**2
    return energy, torch.stack([x - 200 * far * x, 100 * far, w], -1)


def by_numpy(energies: Any) -> Any:
    """The same for the recursion."""
    return lambda z: tuple(part.numpy() for part in energies(torch.from_numpy(z)))


def trees(z: Any, p: Any, levels: int = 11, sign: float = 1.0) -> Tree:
    """Trees of one point each."""
    z, p = (torch.as_tensor(each, dtype=F64).reshape(-1, 3) for each in (z, p))
    energy, slope = energies(z)
    column = torch.ones(len(z), 1, dtype=F64)
    start = planted(z, energy[:, None], slope, levels)
    return refreshed(start, column > 0, p, sign * column, column < 0)


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("energy", [energies, bent])
@pytest.mark.parametrize("plan", [Plan(15, 45, 0.8, 3), Plan(12, 0, 0.8, 10)], ids=["with-warmup", "deep-trees"])
def test_whole_chains_are_those_of_the_recursion(energy: Any, plan: Plan) -> None:
    """With the same random numbers: every draw, step size, scale and count.

    The step sizes differ in their last digit, which grows along long trajectories; so those have no warmup here.
    """
    starts = np.random.default_rng(0).normal(size=(3, 3))
    found = run_chains(energy, torch.from_numpy(starts), plan, 5)
    expected = recursive_nuts.run_chains(by_numpy(energy), starts, plan, 5)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.draws, np.stack(other.draws), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(one.scale, other.scale, rtol=1e-6)
        assert one.step == pytest.approx(other.step, rel=1e-6)
        assert (one.diverged, one.deepest) == (other.diverged, other.deepest)
    assert any(chain.deepest for chain in found) == (plan.max_depth == 3)


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("how", ["recorded", pytest.param("compiled", marks=pytest.mark.deep)])
def test_recorded_and_compiled_steps_are_the_eager_ones(how: str) -> None:
    random = np.random.default_rng(3)
    starts, momenta = random.normal(size=(3, 3)), random.normal(size=(3, 200, 3))
    plan = Plan(10, 30, 0.8, 5)
    made = []
    for _ in range(2):
        energy, slope = by_numpy(bent)(starts)
        tree, tuning = begun(planted(starts, energy[:, None], slope, 6), untuned(starts), momenta)
        made.append(Stepping(bent, plan, tree, tuning))
    if how == "recorded":
        made[1].record()
    else:
        made[1].compile(torch.zeros(3, 3, dtype=F64), torch.from_numpy(momenta))
    assert [each.how for each in made] == ["eager", how]
    ends = 0
    for noise in random.random((150, 3, 3)):
        ended = [bool(each.leaf(noise)) for each in made]
        assert ended[0] == ended[1]
        if ended[0]:
            ends += 1
            assert bool(made[0].turn(noise, momenta)) == bool(made[1].turn(noise, momenta))
        for part in ("tree", "tuning"):
            one, other = getattr(made[0], part), getattr(made[1], part)
            for name, expected, found in zip(one._fields, one, other, strict=True):
                np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-6, atol=1e-7, err_msg=name)
    assert ends > 20
    assert made[0].tuning.draw.min() > 3


@pytest.mark.deep
@pytest.mark.usefixtures("unchecked_shapes")
def test_a_chain_is_the_same_alone_and_in_company() -> None:
    starts, plan = torch.from_numpy(np.random.default_rng(0).normal(size=(3, 3))), Plan(10, 20, 0.8, 10)
    ticks: list[int] = []
    together = run_chains(energies, starts, plan, 5, lambda draws, steps: ticks.append(draws))
    assert sum(ticks) == 3 * 30
    alone = run_chains(energies, starts[:1], plan, 5)
    np.testing.assert_allclose(alone[0].draws, together[0].draws, rtol=1e-6)
    assert alone[0].steps == together[0].steps
    assert not np.allclose(together[0].draws, together[1].draws)
    other = run_chains(energies, starts[:1], plan, 6)
    assert not np.allclose(alone[0].draws, other[0].draws)


def test_a_start_without_density_is_told() -> None:
    def nowhere(z: Tensor) -> tuple[Tensor, Tensor]:
        return torch.full((len(z),), math.inf), torch.zeros_like(z)

    with pytest.raises(pd.errors.PyroDropoutError, match="log p"):
        run_chains(nowhere, torch.zeros(2, 3, dtype=F64), Plan(1, 1, 0.8, 10), 0)
