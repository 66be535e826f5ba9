"""Q-learning: memories and networks, held against torch."""

import numpy as np
import pytest
import torch
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
