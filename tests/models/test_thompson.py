"""Thompson sampling against ε-greedy: learners do what Q-learning with dropout should, in a world that keeps its rules.

The world is held against a plain, one-agent simulation that shares no code with it.
"""

import argparse
import math
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from experiments.foraging import Foraging

import pyro_dropout as pd
from tests.models.test_scripts import FOLDER, loaded


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return loaded(FOLDER / "thompson.py")


def made(script: ModuleType) -> Any:
    return script.Learners(argparse.Namespace(seed=3, seeds=2, ticks=10, burn_in=4, compile=False), torch.device("cpu"))


@pytest.fixture(scope="module")
def learners(script: ModuleType) -> Any:
    """Four learners for all tests, since to trace their step takes seconds; none relies on what they have learned."""
    return made(script)


def remember(learners: Any, ticks: int) -> list[tuple[np.ndarray, ...]]:
    """Let every learner remember a random story, and return it: states, actions, rewards, states after."""
    rng, story = np.random.default_rng(1), []
    states = rng.random((4, 27), np.float32)
    for t in range(ticks):
        after = rng.random((4, 27), np.float32)
        story.append((states, rng.integers(0, 5, 4), rng.normal(size=4), after))
        learners.memory.write(t, *story[-1])
        states = after
    return story


def test_the_acting_network_is_the_model_s_under_one_mask(script: ModuleType, learners: Any) -> None:
    learners.run.publish()
    rng = np.random.default_rng(0)
    states = rng.random((4, 6, 27), np.float32)
    kept = (rng.random((2, 4, 1, 50)) < 0.7).astype(np.float32)
    q = script.relu_networks(learners.weights, states, kept)
    for e, (model, guide) in enumerate(learners.fleet):
        weights = {name: guide.states[name.replace(".", "/")].loc.detach() for name in model.sites}
        for layer, mask in ((2, kept[0, e, 0]), (4, kept[1, e, 0])):
            weights[f"net.{layer}.weight"] = weights[f"net.{layer}.weight"] * torch.from_numpy(mask)  # whole columns
        for action in range(5):
            picked = torch.eye(5)[action].expand(6, 5)
            expected = model.evaluate(weights, torch.cat([torch.from_numpy(states[e]), picked], 1))[:, 0]
            np.testing.assert_allclose(q[e, :, action], expected.numpy(), atol=1e-5)


def test_targets_are_bellman_s(script: ModuleType, learners: Any) -> None:
    story = remember(learners, 30)
    weights = [value.copy() for value in learners.weights]
    learners.learn(29)
    x, y = (part.numpy().reshape(4, 64, -1) for part in (learners.x, learners.y))
    met = set()
    for e in range(4):
        for row, target in zip(x[e], y[e, :, 0], strict=True):
            (t,) = [t for t, step in enumerate(story) if (step[0][e] == row[:27]).all()]
            _, actions, rewards, after = story[t]
            assert row[27:].tolist() == np.eye(5)[actions[e]].tolist()
            ahead = script.relu_networks(weights, after[:, None], learners.mean)[e, 0].max()
            assert target == pytest.approx(rewards[e] + 0.7 * ahead, abs=1e-5)
            met.add(t)
    assert met == set(range(30))  # 256 draws from 30; a step is missed with probability 30·(29/30)²⁵⁶ < 0.006


def test_a_step_is_sgd_on_half_the_mean_square_with_weight_decay(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With everything kept a step is deterministic, and torch's own SGD can be held against it.
    monkeypatch.setattr(script, "KEEP", 1.0)
    monkeypatch.setattr(script, "KEEPS", dict.fromkeys(script.KEEPS, 1.0))
    learners = made(script)
    remember(learners, 30)
    nets = [script.QOfAction() for _ in range(4)]
    for e, net in enumerate(nets):
        for parameter, value in zip(net.parameters(), learners.weights, strict=True):
            parameter.data = torch.from_numpy(value[e]).clone()
    learners.learn(29)
    for e, net in enumerate(nets):
        x, y = learners.x.view(4, 64, 32)[e], learners.y.view(4, 64, 1)[e]
        optimiser = torch.optim.SGD(net.parameters(), lr=0.001, weight_decay=0.001)
        (0.5 * (net(x) - y).square().mean()).backward()
        optimiser.step()
        for parameter, value in zip(net.parameters(), learners.weights, strict=True):
            assert (parameter.grad != 0).any()
            np.testing.assert_allclose(value[e], parameter.detach().numpy(), rtol=1e-5, atol=1e-7)


@pytest.mark.deep
def test_thompson_sampling_chooses_as_the_posterior_does(learners: Any) -> None:
    learners.run.publish()
    model, guide = learners.fleet[0]
    states = np.full((4, 27), 0.5, np.float32)
    ours = np.bincount([learners.act(10_000_000, states)[0] for _ in range(1000)], minlength=5) / 1000
    contexts = torch.cat([torch.full((5, 27), 0.5), torch.eye(5)], 1)
    theirs = np.bincount([int(pd.judging.thompson(model, guide, contexts)) for _ in range(100)], minlength=5) / 100
    # the standard deviations are 0.016 and 0.05 at the most: five of their difference are 0.26
    assert abs(ours - theirs).max() < 0.26
    assert (ours > 0).sum() > 1  # it does explore


Point = tuple[float, float]
SEGMENTS = [
    ((10.0, 10.0), (690.0, 10.0)),
    ((690.0, 10.0), (690.0, 490.0)),
    ((690.0, 490.0), (10.0, 490.0)),
    ((10.0, 490.0), (10.0, 10.0)),
    ((100.0, 100.0), (300.0, 100.0)),
    ((300.0, 100.0), (300.0, 400.0)),
    ((300.0, 400.0), (100.0, 400.0)),
    ((400.0, 100.0), (600.0, 100.0)),
    ((600.0, 100.0), (600.0, 400.0)),
    ((600.0, 400.0), (400.0, 400.0)),
]
PAIRS = [(1.0, 1.0), (0.8, 1.0), (1.0, 0.8), (0.5, 0.0), (0.0, 0.5)]


def meeting(p: Point, q: Point) -> float:
    """The smallest distance from p at which the way to q meets a wall (all lie along an axis), or infinity."""
    found = math.inf
    for (ax, ay), (bx, by) in SEGMENTS:
        dx, dy = q[0] - p[0], q[1] - p[1]
        along, rate = (ax - p[0], dx) if ax == bx else (ay - p[1], dy)
        if rate == 0 or not 0 <= along / rate <= 1:
            continue
        part = along / rate
        x, y = p[0] + part * dx, p[1] + part * dy
        inside = min(ay, by) <= y <= max(ay, by) if ax == bx else min(ax, bx) <= x <= max(ax, bx)
        found = min(found, part * math.hypot(dx, dy)) if inside else found
    return found


def turned(angle: float, v: Point) -> Point:
    return (v[0] * math.cos(angle) + v[1] * math.sin(angle), -v[0] * math.sin(angle) + v[1] * math.cos(angle))


def moved(p: Point, heading: float, action: int) -> Point:
    """The rule as it is written down, wheel by wheel."""
    r1, r2 = PAIRS[action]
    v = turned(heading + math.pi / 2, (0.0, 5.0))
    w1, w2 = (p[0] + v[0], p[1] + v[1]), (p[0] - v[0], p[1] - v[1])
    a = turned(-r1, (p[0] - w2[0], p[1] - w2[1]))
    b = turned(r2, (p[0] - w1[0], p[1] - w1[1]))
    q = tuple(0.5 * (w2[k] + a[k]) + 0.5 * (w1[k] + b[k]) for k in range(2))
    return p if math.isfinite(meeting(p, (q[0], q[1]))) else (q[0], q[1])


def viewed(p: Point, heading: float, items: list[tuple[float, float, int]]) -> tuple[list[float], float]:
    """What the nine eyes see, and how clear of walls the view is."""
    seen, clear = [], 0.0
    for k in range(9):
        angle = heading + (k - 3) * 0.25
        way = (math.sin(angle), math.cos(angle))
        near, kind = meeting(p, (p[0] + 85 * way[0], p[1] + 85 * way[1])), 0
        for x, y, what in items:
            along = (x - p[0]) * way[0] + (y - p[1]) * way[1]
            off = math.dist((x, y), (p[0] + along * way[0], p[1] + along * way[1]))
            if off <= 10 and 0 < along < min(85.0, near):
                near, kind = along, what
        entry = [1.0, 1.0, 1.0]
        if math.isfinite(near):
            entry[kind] = near / 85
        seen += entry
        clear += (entry[0] if kind == 0 else 1.0) / 9
    return seen, clear


def things(world: Foraging, k: int) -> list[tuple[float, float, int]]:
    there = world.kinds[k] > 0
    return [
        (*place, kind)
        for place, kind in zip(world.items[k][there].tolist(), world.kinds[k][there].tolist(), strict=True)
    ]


def placed(worlds: int, rng: np.random.Generator) -> Foraging:
    """Worlds with their agents strewn all over, so that few ticks meet every rule."""
    world = Foraging(worlds, rng)
    world.position = rng.uniform([10, 10], [690, 490], (worlds, 2))
    world.position[::2] = rng.uniform([110, 92], [290, 108], (len(world.position[::2]), 2))  # half of them by a wall,
    world.items[:, :3] = rng.uniform([110, 92], [290, 108], (worlds, 3, 2))  # with items on both of its sides
    world.heading = rng.uniform(0, 2 * math.pi, worlds)
    world.step(np.full(worlds, 3))  # a first tick, to look about from there
    world.eaten[:] = 0
    return world


@pytest.mark.parametrize("clearance", [False, True])
@pytest.mark.thinned(2)
def test_moves_views_meals_and_rewards_are_those_of_the_rules(clearance: bool) -> None:
    rng = np.random.default_rng(0)
    world, met = placed(40, rng), {"blocked": 0, "food": 0, "poison": 0, "straight": 0, "screened": 0}
    world.clearance = clearance
    for _ in range(40):
        actions = rng.choice(5, 40, p=[0.6, 0.1, 0.1, 0.1, 0.1])
        was = [(tuple(p), h) for p, h in zip(world.position.tolist(), world.heading.tolist(), strict=True)]
        there = [things(world, k) for k in range(40)]
        observation, reward = world.step(actions)
        for k, ((p, heading), action) in enumerate(zip(was, actions.tolist(), strict=True)):
            q = moved(p, heading, action)
            assert tuple(world.position[k]) == pytest.approx(q, abs=1e-9)
            turn = world.heading[k] - heading + PAIRS[action][0] - PAIRS[action][1]
            assert math.cos(turn) == pytest.approx(1.0)
            _, clear = viewed(p, heading, there[k])
            clear = min(1.0, 2 * clear) if clearance else clear
            straight = (0.1 * clear if action == 0 and clear > 0.75 else 0.0) + (clear if clearance else 0.0)
            near = [item for item in there[k] if math.dist(item[:2], q) < 20]
            eaten = [item[2] for item in near if math.isinf(meeting(q, item[:2]))]
            assert reward[k] == pytest.approx(straight + sum(5.0 if kind == 1 else -6.0 for kind in eaten))
            view, _ = viewed(q, world.heading[k], things(world, k))
            np.testing.assert_allclose(observation[k], view, atol=1e-6)
            met["blocked"] += q == p
            met["straight"] += straight > 0
            met["screened"] += len(near) > len(eaten)
            met["food"] += eaten.count(1)
            met["poison"] += eaten.count(2)
    assert world.eaten.sum(0).tolist() == [met["food"], met["poison"]]
    assert min(met.values()) > 0, met  # every rule was met
