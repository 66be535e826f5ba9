"""One chain and several: the path, the distribution that it leaves as it is, and what a chain learns as it warms up."""

from typing import Any

import arviz as az
import numpy as np
import pytest

import pyro_dropout as pd
from pyro_dropout.references.nuts.chains import Plan, run_chains
from pyro_dropout.references.nuts.no_u_turn import Point, Walker

STDS = np.array([0.1, 1.0, 10.0])
MIX = np.array([[1.0, 0.0, 0.0], [0.8, 0.6, 0.0], [0.0, 0.6, 0.8]])
COVARIANCE = np.diag(STDS) @ MIX @ MIX.T @ np.diag(STDS)
PRECISION = np.linalg.inv(COVARIANCE)
CENTRE = np.array([1.0, -2.0, 3.0])


def energies(z: Any) -> tuple[Any, Any]:
    """Of the Gaussian with that centre and covariance."""
    pull = (z - CENTRE) @ PRECISION
    return 0.5 * (pull * (z - CENTRE)).sum(-1), pull


def answered(asks: Any) -> Any:
    """Run a generator that asks for energies, and return its result."""
    try:
        z = next(asks)
        while True:
            value, slope = energies(z[None])
            z = asks.send((float(value[0]), slope[0]))
    except StopIteration as end:
        return end.value


def walker(step: float, max_depth: int = 10) -> Walker:
    return Walker(step, STDS, np.random.default_rng(1), max_depth)


def at(z: Any, p: Any) -> Point:
    value, slope = energies(z[None])
    return Point(z, p, float(value[0]), slope[0])


def test_a_step_back_undoes_a_step_forward() -> None:
    start = at(np.array([0.9, -1.5, 9.0]), np.array([0.3, -1.0, 0.5]))
    there = answered(walker(0.3).leap(start, 1))
    back = answered(walker(0.3).leap(there, -1))
    np.testing.assert_allclose(back.z, start.z, rtol=1e-12)
    np.testing.assert_allclose(back.p, start.p, rtol=1e-12)


def test_the_energy_of_a_path_is_kept_to_the_third_power_of_its_step() -> None:
    start = at(np.array([0.9, -1.5, 9.0]), np.array([0.3, -1.0, 0.5]))
    errors = [abs(answered(walker(step).leap(start, 1)).total - start.total) for step in (0.02, 0.01)]
    assert errors[0] / errors[1] == pytest.approx(8.0, rel=0.1)


def test_a_path_that_is_lost_is_noticed_and_not_taken() -> None:
    start = at(CENTRE + STDS, np.zeros(3))
    moved = answered(walker(1e4).move(start))
    assert moved.diverged
    np.testing.assert_array_equal(moved.point.z, start.z)


def test_a_path_is_no_longer_than_allowed() -> None:
    moved = answered(walker(1e-4, max_depth=3).move(at(CENTRE, np.zeros(3))))
    assert moved.depth == 3
    assert moved.acceptance == pytest.approx(1.0, abs=1e-6)
    assert not moved.diverged


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.deep
def test_a_gaussian_comes_out_as_it_is() -> None:
    """9 numbers within 5.5 standard errors: it fails on correct code with probability 4e-7."""
    chains = run_chains(energies, np.zeros((2, 3)), Plan(1000, 500, 0.8, 10), seed=3)
    draws = np.stack([np.stack(chain.draws) for chain in chains]) - CENTRE
    assert draws.shape == (2, 1000, 3)
    for i in range(3):
        assert abs(draws[..., i].mean()) < 5.5 * np.asarray(az.mcse(draws[..., i])).item()
        assert np.asarray(az.rhat(draws[..., i])).item() < 1.01
        for j in range(i + 1):
            product = draws[..., i] * draws[..., j]
            assert abs(product.mean() - COVARIANCE[i, j]) < 5.5 * np.asarray(az.mcse(product)).item()
    assert sum(chain.diverged for chain in chains) == 0
    for chain in chains:  # it has learned how wide each coordinate is
        assert np.all((chain.scale / STDS > 0.5) & (chain.scale / STDS < 2))
        assert 0.1 < chain.step < 2.5


def test_a_chain_is_the_same_alone_and_in_company() -> None:
    starts, plan = np.random.default_rng(0).normal(size=(3, 3)), Plan(10, 20, 0.8, 10)
    ticks: list[int] = []
    together = run_chains(energies, starts, plan, 5, lambda: ticks.append(1))
    assert len(ticks) == 3 * 30
    alone = run_chains(energies, starts[:1], plan, 5)
    np.testing.assert_allclose(np.stack(alone[0].draws), np.stack(together[0].draws), rtol=1e-9)
    assert not np.allclose(together[0].draws, together[1].draws)
    other = run_chains(energies, starts[:1], plan, 6)
    assert not np.allclose(alone[0].draws, other[0].draws)


@pytest.mark.parametrize("warmup", [0, 5, 25])
def test_a_short_warmup_is_no_mistake(warmup: int) -> None:
    (chain,) = run_chains(energies, CENTRE[None], Plan(10, warmup, 0.8, 10), 0)
    assert np.isfinite(np.stack(chain.draws)).all()


def test_shorter_steps_are_accepted_more_often() -> None:
    steps = [run_chains(energies, CENTRE[None], Plan(1, 60, a, 10), 0)[0].step for a in (0.6, 0.8, 0.99)]
    assert steps[0] > steps[1] > steps[2]


def test_a_start_without_density_is_told() -> None:
    def nowhere(z: Any) -> tuple[Any, Any]:
        return np.full(len(z), np.inf), np.zeros_like(z)

    with pytest.raises(pd.PyroDropoutError, match="log p"):
        run_chains(nowhere, np.zeros((2, 3)), Plan(1, 1, 0.8, 10), 0)
