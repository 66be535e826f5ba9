"""Replay memory and fast Q evaluation for a fleet of Q-learners.

To act, small networks are evaluated one state at a time, thousands of times per second; numpy is faster than torch.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]


def relu_networks(weights: Sequence[NDArray[Any]], x: NDArray[Any], kept: Any) -> NDArray[Any]:
    """Run E networks of linear layers with ReLU between them, each on its own inputs."""
    h = x
    for w, b, k in zip(weights[0:-2:2], weights[1:-2:2], kept, strict=True):
        h = h @ w.swapaxes(1, 2)
        h += b[:, None]
        np.maximum(h, 0, out=h)
        h *= k
    return np.asarray(h @ weights[-2].swapaxes(1, 2) + weights[-1][:, None])


class Replay:
    """The last transitions of several parallel learners: state, action, reward, and next state.

    A state is stored once, as the next state of one transition and the state of the following one.
    """

    def __init__(self, learners: int, capacity: int, state: int, actions: int) -> None:
        self._capacity, self._state, self._actions = capacity, state, actions
        self._first = np.arange(learners)[:, None] * (capacity + 1)  # one more row, for the state after the last step
        self.rows: Array = np.zeros((learners * (capacity + 1), state + actions), np.float32)
        self._rewards: Array = np.zeros((len(self.rows), 1), np.float32)

    def write(self, t: int, states: Any, actions: Any, rewards: Any, following: Any) -> None:
        """Store the transition of tick ``t`` of every learner: (E, state), (E,), (E,) and (E, state)."""
        now, then = (self._first[:, 0] + at % (self._capacity + 1) for at in (t, t + 1))
        self.rows[now, : self._state], self.rows[now, self._state :] = states, np.eye(self._actions)[actions]
        self._rewards[now, 0] = rewards
        self.rows[then, : self._state] = following

    def draw(self, t: int, count: int, rng: np.random.Generator) -> tuple[Array, Array, Array]:
        """Return ``count`` transitions of each learner, drawn uniformly; the latest is that of tick ``t``."""
        ago = (rng.random((len(self._first), count)) * min(t + 1, self._capacity)).astype(int)
        now, then = ((at % (self._capacity + 1) + self._first).ravel() for at in (t - ago, t - ago + 1))
        following = self.rows.take(then, 0)[:, : self._state].reshape(len(self._first), count, self._state)
        return self.rows.take(now, 0), self._rewards.take(now, 0), following
