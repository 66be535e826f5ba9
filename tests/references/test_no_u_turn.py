"""Trees and chains: against the recursion, the distribution that they leave as it is, and what chains adapt."""

import math
import warnings
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

import pyro_dropout as pd
from pyro_dropout.engines.engine import CannotError
from pyro_dropout.references.nuts.adaptation import Plan, begun, untuned
from pyro_dropout.references.nuts.chains import run_chains
from pyro_dropout.references.nuts.no_u_turn import Tree, grown, halfway, planted, refreshed
from pyro_dropout.references.nuts.stepping import Stepping
from tests.oracles import recursive_nuts

F64 = torch.float64
STDS = np.array([0.1, 1.0, 10.0])
MIX = np.array([[1.0, 0.0, 0.0], [0.8, 0.6, 0.0], [0.0, 0.6, 0.8]])
COVARIANCE = np.diag(STDS) @ MIX @ MIX.T @ np.diag(STDS)
PRECISION = torch.from_numpy(np.linalg.inv(COVARIANCE))
CENTRE = torch.tensor([1.0, -2.0, 3.0], dtype=F64)
SCALE = torch.from_numpy(STDS)[None]


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


def leapt(tree: Tree, step: float, uniform: Tensor | None = None) -> Tree:
    """Add a leaf to each tree."""
    steps = torch.full((len(tree.z), 1), step, dtype=F64)
    z, half = halfway(tree, steps, SCALE)
    numbers = torch.full((len(z), 3), 0.5, dtype=F64) if uniform is None else uniform
    return grown(tree, z, half, *energies(z), steps, SCALE, numbers)


def test_a_step_back_undoes_a_step_forward() -> None:
    start = trees([0.9, -1.5, 9.0], [0.3, -1.0, 0.5])
    there = halfway(start, torch.full((1, 1), 0.3, dtype=F64), SCALE)[0]
    leaf = leapt(start, 0.3)
    p = leaf.sum_p - start.p
    back = trees(there, p, sign=-1.0)
    again = leapt(back, 0.3)
    torch.testing.assert_close(halfway(back, torch.full((1, 1), 0.3, dtype=F64), SCALE)[0], start.z, rtol=1e-12, atol=0)
    torch.testing.assert_close(again.sum_p - p, start.p, rtol=1e-11, atol=0)


def test_the_energy_of_a_path_is_kept_to_the_third_power_of_its_step() -> None:
    start = trees([0.9, -1.5, 9.0], [0.3, -1.0, 0.5])
    errors = [abs(float(leapt(start, step).gain)) for step in (0.02, 0.01)]
    assert errors[0] / errors[1] == pytest.approx(8.0, rel=0.1)


def test_a_path_that_is_lost_is_noticed_and_not_taken() -> None:
    start = trees(CENTRE + SCALE, np.zeros(3))
    moved = leapt(start, 1e4)
    assert moved.diverged.item() == moved.ended.item() == 1
    assert torch.equal(moved.chosen_z, start.z)


def test_a_path_is_no_longer_than_allowed() -> None:
    tree = trees(CENTRE, [0.3, -1.0, 0.5], levels=4)
    leaves = 0
    while not tree.ended:
        tree, leaves = leapt(tree, 1e-4), leaves + 1
    assert (leaves, tree.depth.item(), tree.diverged.item()) == (7, 3, 0)
    assert tree.acceptance.item() / 7 == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize(("step", "leaves"), [(0.25, 15), (0.5, 7), (1.1, 3)])
def test_a_path_round_a_circle_ends_where_it_turns_back(step: float, leaves: int) -> None:
    """Steps of angle a, cos a = 1 - ε²/2: of n points the ends turn from the sum if (n - 1) a / 2 is over a quarter."""
    angle = math.acos(1 - step**2 / 2)
    assert leaves * angle / 2 > math.pi / 2 > (leaves // 2) * angle / 2
    one, start = torch.ones(1, 1, dtype=F64), torch.tensor([[1.0, 0.0, 0.0]], dtype=F64)
    tree = planted(start, 0.5 * one, start, 11)
    tree = refreshed(tree, one > 0, torch.tensor([[0.0, 1.0, 0.0]], dtype=F64), one, one < 0)
    for taken in range(leaves):
        assert not tree.ended, f"ended after {taken}"
        z, half = halfway(tree, step * one, torch.ones_like(start))
        energy = 0.5 * (z**2).sum(-1)
        tree = grown(tree, z, half, energy, z, step * one, torch.ones_like(start), torch.full((1, 3), 0.4, dtype=F64))
    assert tree.ended
    assert not tree.diverged
    assert tree.depth == math.log2(leaves + 1)


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


@pytest.mark.deep
@pytest.mark.usefixtures("unchecked_shapes")
def test_whole_chains_on_a_long_warmup_are_those_of_the_recursion() -> None:
    """Several windows of scales, each with a search for the step size after it."""
    starts, plan = np.random.default_rng(1).normal(size=(2, 3)), Plan(20, 200, 0.8, 2)
    assert len(plan.windows[1]) > 1
    found = run_chains(energies, torch.from_numpy(starts), plan, 2)
    expected = recursive_nuts.run_chains(by_numpy(energies), starts, plan, 2)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.scale, other.scale, rtol=1e-4)
        np.testing.assert_allclose(one.draws, np.stack(other.draws), rtol=1e-3, atol=1e-3)


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
        inputs = [torch.from_numpy(each) if made[1].on_torch else each for each in (noise, momenta)]
        ended = [bool(made[0].leaf(noise)), bool(made[1].leaf(inputs[0]))]
        assert ended[0] == ended[1]
        if ended[0]:
            ends += 1
            assert bool(made[0].turn(noise, momenta)) == bool(made[1].turn(*inputs))
        for part in ("tree", "tuning"):
            one, other = getattr(made[0], part), getattr(made[1], part)
            for name, expected, found in zip(one._fields, one, other, strict=True):
                np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-6, atol=1e-7, err_msg=name)
    assert ends > 20
    assert made[0].tuning.draw.min() > 3


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.deep
def test_many_chains_leave_a_distribution_with_heavy_tails_as_it_is() -> None:
    """400 chains of 10 draws, begun at exact draws, with a fixed step size; quantiles by binomial tails.

    The last draws of chains are independent, so each of 6 counts is binomial: 1e-6 each to fail on correct code.
    """
    ours, random = stats.t(5), np.random.default_rng(2)

    def heavy(z: Tensor) -> tuple[Tensor, Tensor]:
        return (3 * (1 + z**2 / 5).log()).sum(-1), 6 * z / (5 + z**2)

    starts, momenta = ours.rvs((400, 2), random_state=1), random.normal(size=(400, 12, 2))
    energy, slope = by_numpy(heavy)(starts)
    one = np.ones((400, 1))
    tree = refreshed(planted(starts, energy[:, None], slope, 9), one > 0, momenta[:, 0], one, one < 0)
    tuning = untuned(starts)._replace(step=0.7 * one, average=math.log(0.7) * one, searching=0 * one)
    stepping = Stepping(heavy, Plan(10, 0, 0.8, 8), tree, tuning._replace(moves=tuning.moves + 1))
    left = True
    while left:
        noise = np.stack([random.gumbel(size=400), random.exponential(size=400), random.random(400)], 1)
        if stepping.leaf(noise):
            left = bool(stepping.turn(noise, momenta))
    last = stepping.tree.chosen_z
    assert not np.isclose(last, starts).all(-1).any()
    for k in range(2):
        for level in (0.05, 0.5, 0.9):
            below = int((last[:, k] < ours.ppf(level)).sum())
            assert stats.binomtest(below, 400, level).pvalue > 1e-6


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


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("warmup", [0, 5, 25])
@pytest.mark.thinned(3)
def test_a_short_warmup_is_no_mistake(warmup: int) -> None:
    (chain,) = run_chains(energies, CENTRE[None], Plan(10, warmup, 0.8, 10), 0)
    assert np.isfinite(chain.draws).all()


@pytest.mark.parametrize("cause", [CannotError("no compiler"), RuntimeError("a mistake")])
@pytest.mark.thinned(2)
def test_c_that_fails_where_it_should_not_is_told(cause: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyro_dropout.references.nuts.chains._WORTH_COMPILING", 0)
    monkeypatch.setattr(Stepping, "compile", mock.Mock(side_effect=cause))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run_chains(energies, torch.zeros(1, 3, dtype=torch.float64), Plan(150, 100, 0.8, 3), 0, compile="auto")
    assert [str(each.message)[:24] for each in told] == ["the engine 'C' failed (R"] * isinstance(cause, RuntimeError)


def test_a_start_without_density_is_told() -> None:
    def nowhere(z: Tensor) -> tuple[Tensor, Tensor]:
        return torch.full((len(z),), math.inf), torch.zeros_like(z)

    with pytest.raises(pd.errors.PyroDropoutError, match="log p"):
        run_chains(nowhere, torch.zeros(2, 3, dtype=F64), Plan(1, 1, 0.8, 10), 0)
