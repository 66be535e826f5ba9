"""A vectorised environment: an agent with nine eyes among walls, food and poison, in many worlds at once.

The rules are those of Karpathy's ConvNetJS demonstration of Q-learning, in which the paper compares Thompson sampling
with ε-greedy (main paper, §5.4). All worlds advance together, as arrays, so a fleet of learners costs little more than
one.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]

WIDTH, HEIGHT, PADDING = 700.0, 500.0, 10.0
BOXES = ((100.0, 100.0, 200.0, 300.0), (400.0, 100.0, 200.0, 300.0))  # x, y, width, height; each is open on the left
ITEMS, RADIUS, MARGIN = 30, 10.0, 20.0  # maximum number; radius of items and agent; distance from the edges
FOOD, POISON = 1, 2
REWARDS = np.array([0.0, 5.0, -6.0])  # for an empty slot, food and poison
SPAWN_EVERY, SPAWN_CHANCE = 10, 0.25
ROT_EVERY, ROT_CHANCE, ROT_AGE = 100, 0.1, 5000
STRAIGHT, CLEAR = 0.1, 0.75  # the reward for driving straight, and the clearance from walls that it requires
START, SIGHT = (50.0, 50.0), 85.0
EYES = (np.arange(9) - 3) * 0.25  # radians from straight ahead; the demonstration's are off centre too
WHEELS = np.array([(1.0, 1.0), (0.8, 1.0), (1.0, 0.8), (0.5, 0.0), (0.0, 0.5)])  # r₁ and r₂ of the five actions
OBSERVATION = 3 * len(EYES)
# The highest sustainable average reward per tick; 1 more if clearance is rewarded.
BEST_AVERAGE = REWARDS[FOOD] * 0.5 * SPAWN_CHANCE / SPAWN_EVERY + STRAIGHT

# The mean of rotations by r₁ about one wheel and by r₂ about the other, each 5 from the agent: the displacement along
# the axle, the displacement ahead, and the turn.
_ASIDE = 5.0 * (np.cos(WHEELS[:, 0]) - np.cos(WHEELS[:, 1])) / 2
_FORTH = 5.0 * (np.sin(WHEELS[:, 0]) + np.sin(WHEELS[:, 1])) / 2
_TURN = WHEELS[:, 1] - WHEELS[:, 0]
_FAR = 1e9  # position of empty slots, out of sight
_SLACK = 1e-9  # of a wall's length, so that rounding does not open a gap where two walls meet


def _segments() -> Numbers:
    """Return all walls, (walls, 2, 2): the start of each, and the vector to its end."""
    outer = (PADDING, PADDING, WIDTH - 2 * PADDING, HEIGHT - 2 * PADDING)
    walls = [((PADDING, HEIGHT - PADDING), (0.0, 2 * PADDING - HEIGHT))]  # the left wall, which inner boxes do not have
    for x, y, w, h in (outer, *BOXES):
        walls += [((x, y), (w, 0.0)), ((x + w, y), (0.0, h)), ((x + w, y + h), (-w, 0.0))]
    return np.array(walls)


WALLS = _segments()
_BEGIN, _WALL = WALLS[:, 0], WALLS[:, 1]
_ACROSS = np.stack([_WALL[:, 1], -_WALL[:, 0]])  # (2, walls): a vector times this is its cross product with the walls


class Foraging:
    """W worlds of 700 by 500, each with an agent that should eat food and avoid poison."""

    def __init__(self, worlds: int = 1, seed: int | np.random.Generator = 0, *, clearance: bool = False) -> None:
        self.clearance = clearance
        self._rng = np.random.default_rng(seed)
        self._all = np.arange(worlds)[:, None]
        self.position = np.tile(np.array(START), (worlds, 1))
        self.heading = np.zeros(worlds)
        self.items = self._places(worlds, ITEMS)
        self.kinds = self._rng.integers(FOOD, POISON + 1, (worlds, ITEMS))
        self.eaten = np.zeros((worlds, 2), dtype=np.int64)
        self._ages = np.zeros((worlds, ITEMS), dtype=np.int64)
        self._clock = 0
        self._look()

    def step(self, actions: NDArray[np.integer[Any]]) -> tuple[NDArray[np.float32], Numbers]:
        """Advance one tick; return the new observations, (W, 27), and the rewards, (W,)."""
        self._clock += 1
        # From the view in which the agent decided.
        clear = np.minimum(1.0, 2 * self._clear) if self.clearance else self._clear
        reward = STRAIGHT * clear * ((actions == 0) & (clear > CLEAR)) + clear * self.clearance
        self._move(actions)
        self._ages += 1
        reward += self._eat()
        self._renew()
        self._look()
        return self.observation, reward

    # --- a tick, in its order -------------------------------------------------------------------------------------

    def _move(self, actions: NDArray[np.integer[Any]]) -> None:
        """Move by ½(R(-r₁) - R(r₂))v, with v the axle, unless a wall blocks it; turn by r₂ - r₁ in any case."""
        sin, cos = np.sin(self.heading), np.cos(self.heading)
        aside, forth = _ASIDE[actions], _FORTH[actions]
        way = np.stack([forth * sin + aside * cos, forth * cos - aside * sin], -1)
        free = np.isinf(_first_wall(self.position, way[:, None]))
        self.position = self.position + way * free
        self.heading = (self.heading + _TURN[actions]) % (2 * np.pi)

    def _eat(self) -> Numbers:
        reward = np.zeros(len(self.heading))
        way = self.items - self.position[:, None]
        near = np.square(way).sum(-1) < (2 * RADIUS) ** 2
        if near.any():
            world, item = near.nonzero()
            reached = np.isinf(_first_wall(self.position[world], way[world, item][:, None]))[:, 0]
            world, item = world[reached], item[reached]
            kind = self.kinds[world, item]
            np.add.at(reward, world, REWARDS[kind])
            np.add.at(self.eaten, (world, kind - FOOD), 1)
            self._clear_away(world, item)
        return reward

    def _renew(self) -> None:
        """Remove old items at random, and spawn new ones in empty slots."""
        if self._clock % ROT_EVERY == 0:
            rotten = (self._ages > ROT_AGE) & (self._rng.random(self.kinds.shape) < ROT_CHANCE)
            self._clear_away(*rotten.nonzero())
        if self._clock % SPAWN_EVERY == 0:
            empty = self.kinds == 0
            world = (empty.any(1) & (self._rng.random(len(empty)) < SPAWN_CHANCE)).nonzero()[0]
            item = empty[world].argmax(1)
            self.items[world, item] = self._places(len(world), 1)[:, 0]
            self.kinds[world, item] = self._rng.integers(FOOD, POISON + 1, len(world))
            self._ages[world, item] = 0

    def _look(self) -> None:
        angles = self.heading[:, None] + EYES
        sin, cos = np.sin(angles), np.cos(angles)
        rays = np.stack([sin, cos], -1)
        wall = SIGHT * _first_wall(self.position, SIGHT * rays)
        way = (self.items - self.position[:, None]).swapaxes(1, 2)
        # The position of every item along each ray, and its distance from the ray: (W, eyes, items).
        along, beside = rays @ way, np.stack([-cos, sin], -1) @ way
        seen = (np.abs(beside) <= RADIUS) & (along > 0) & (along < SIGHT)
        along[~seen] = np.inf
        item = along.min(-1)
        kind = np.where(item < wall, self.kinds[self._all, along.argmin(-1)], 0)  # 0 is a wall here, or nothing
        near = np.minimum(np.minimum(item, wall), SIGHT) / SIGHT
        view = np.ones((*near.shape, 3), dtype=np.float32)
        view[self._all, np.arange(len(EYES)), kind] = near
        self.observation = view.reshape(len(view), OBSERVATION)
        self._clear = np.where(kind == 0, near, 1.0).mean(-1)

    # --- pieces -------------------------------------------------------------------------------------------------------

    def _places(self, worlds: int, count: int) -> Numbers:
        low, high = np.array([MARGIN, MARGIN]), np.array([WIDTH - MARGIN, HEIGHT - MARGIN])
        return self._rng.uniform(low, high, (worlds, count, 2))

    def _clear_away(self, world: NDArray[np.intp], item: NDArray[np.intp]) -> None:
        self.kinds[world, item] = 0
        self.items[world, item] = _FAR

    def draw(self, axes: Any, world: int = 0) -> None:
        """Draw one world on matplotlib's axes: walls, items, the agent, and its lines of sight."""
        for begin, way in WALLS:
            axes.plot(*np.stack([begin, begin + way], 1), color="black", lw=2)
        for kind, colour, marker, name in ((FOOD, "#009E73", "o", "food"), (POISON, "#D55E00", "X", "poison")):
            places = self.items[world, self.kinds[world] == kind]
            axes.plot(*places.T, marker, color=colour, ms=13, mec="white", label=name)
        view = self.observation[world].reshape(-1, 3)
        colours = np.array(["black", "#009E73", "#D55E00"])[view.argmin(-1)]
        x, y = self.position[world]
        for angle, near, colour in zip(self.heading[world] + EYES, view.min(-1), colours, strict=True):
            reach = SIGHT * near
            axes.plot([x, x + reach * np.sin(angle)], [y, y + reach * np.cos(angle)], color=colour, lw=1)
        axes.plot([x], [y], "o", color="#0072B2", ms=13, mec="black", label="agent")
        axes.set(xlim=(0, WIDTH), ylim=(HEIGHT, 0), aspect="equal")  # y points down, as in the demonstration
        axes.set(xlabel="x (units of length)", ylabel="y (units of length)")


def _first_wall(start: Numbers, way: Numbers) -> Numbers:
    """Return the fraction of each path (W, K, 2) from ``start`` (W, 2) at which it hits a wall; infinity for none."""
    to = _BEGIN - start[:, None]  # (W, walls, 2)
    # start + s·way = begin + u·wall: the cross product with wall gives s, that with way gives u.
    across = way @ _ACROSS  # (W, K, walls)
    with np.errstate(divide="ignore", invalid="ignore"):  # parallel lines: the result is not in [0, 1]
        s = np.einsum("wkc,ck->wk", to, _ACROSS)[:, None] / across
        u = (np.stack([way[..., 1], -way[..., 0]], -1) @ to.swapaxes(1, 2)) / across
    met = (s >= 0) & (s <= 1) & (u >= -_SLACK) & (u <= 1 + _SLACK)
    first: Numbers = np.where(met, s, np.inf).min(-1)
    return first
