"""Q-learning in the foraging world: held against torch, and against a plain simulation that shares no code with it."""

import math

import numpy as np
import pytest
import torch
from experiments.foraging import Foraging
from experiments.q_learning import Replay, relu_networks
from torch import nn


def written(memory: Replay, ticks: int) -> list[tuple[np.ndarray, ...]]:
    rng, story = np.random.default_rng(1), []
    states = rng.random((4, 3), np.float32)
    for t in range(ticks):
        after = rng.random((4, 3), np.float32)
        story.append((states, rng.integers(0, 5, 4), rng.normal(size=4).astype(np.float32), after))
        memory.write(t, *story[-1])
        states = after
    return story


@pytest.mark.parametrize(("ticks", "capacity"), [(30, 100), (30, 8), (9, 8), (1, 8)])
def test_a_memory_returns_what_was_written_and_forgets_the_oldest(ticks: int, capacity: int) -> None:
    memory = Replay(4, capacity, 3, 5)
    story = written(memory, ticks)
    rows, rewards, following = memory.draw(ticks - 1, 400, np.random.default_rng(0))
    seen = [set() for _ in range(4)]
    for e, (row, reward, after) in enumerate(zip(rows, rewards[:, 0], following.reshape(-1, 3), strict=True)):
        learner = e // 400
        (t,) = [t for t, step in enumerate(story) if (step[0][learner] == row[:3]).all()]
        assert row[3:].tolist() == np.eye(5)[story[t][1][learner]].tolist()
        assert reward == story[t][2][learner]
        assert (after == story[t][3][learner]).all()
        seen[learner].add(t)
    # 400 draws from 30: one is missed with probability 30·(29/30)⁴⁰⁰ < 4e-5, and this seed misses none
    assert seen == [set(range(max(0, ticks - capacity), ticks))] * 4


def test_networks_are_torch_s_under_their_masks() -> None:
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2)) for _ in range(5)]
    weights = [torch.stack(part).detach().numpy() for part in zip(*(net.parameters() for net in nets), strict=True)]
    x = torch.randn(5, 7, 3)
    kept = [(torch.rand(5, 1, units) < 0.6).float() for units in (6, 4)]
    found = relu_networks(weights, x.numpy(), [part.numpy() for part in kept])
    for e, net in enumerate(nets):
        h = net[2](net[1](net[0](x[e])) * kept[0][e])
        expected = net[4](torch.relu(h) * kept[1][e])
        np.testing.assert_allclose(found[e], expected.detach().numpy(), atol=1e-5)


def test_the_agent_never_leaves_the_walls() -> None:
    rng = np.random.default_rng(1)
    world = Foraging(50, rng)
    for _ in range(400):
        world.step(rng.choice(5, 50, p=[0.8, 0.05, 0.05, 0.05, 0.05]))
        assert ((world.position > 10) & (world.position < [690, 490])).all()
    assert (world.position > [100, 60]).any(0).all()  # and it gets about


def test_a_corner_is_closed() -> None:
    world = Foraging(1, 0)
    world.position = np.array([[12.0, 12.0]])
    world.heading = np.array([-3 * math.pi / 4])  # towards (10, 10), where two walls meet
    world.step(np.array([0]))
    assert world.position[0].tolist() == [12.0, 12.0]


def test_items_lie_in_the_field_half_food_half_poison() -> None:
    world = Foraging(2000, 0)
    assert world.kinds.shape == (2000, 30)
    assert (world.items.min((0, 1)) >= 20).all()
    assert (world.items.max((0, 1)) <= [680, 480]).all()
    # 60,000 fair coins: within 5 standard deviations, which fails once in a million generators
    assert abs((world.kinds == 1).mean() - 0.5) < 5 * 0.5 / math.sqrt(60_000)
