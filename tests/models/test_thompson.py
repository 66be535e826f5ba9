"""Thompson sampling against ε-greedy: learners do what Q-learning with dropout should."""

import argparse
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

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
