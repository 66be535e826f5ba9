"""How time is taken: contestants in turns, in one process."""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pyro
import torch

from tests.benchmarks.figures import Asked

Advance = Callable[[int], Any]


class Absent(Exception):
    """A contestant that is not on this machine."""


@dataclass(eq=False)
class Contestant:
    """Someone who takes steps.

    ``build`` makes ready, and returns (advance, quantum): ``advance(n)`` takes n steps, a multiple of quantum. It may
    return the seconds that they took, without what was set up for them.
    """

    name: str
    build: Callable[[], tuple[Advance, int]]
    note: str = ""
    advance: Advance = field(init=False)
    turn: int = field(init=False, default=1)
    seconds: list[float] = field(init=False, default_factory=list)
    store: dict[str, Any] = field(init=False, default_factory=lambda: {"params": {}, "constraints": {}})

    def prepare(self, asked: Asked) -> None:
        """Build, warm up, and choose how many steps a turn has."""
        with pyro.get_param_store().scope(self.store):
            self.advance, quantum = self.build()
        self._take(2 * quantum, asked.device)
        once = self._take(quantum, asked.device)
        self.turn = quantum * max(1, min(20_000 // quantum, math.ceil(asked.turn / max(once, 1e-7))))

    def take_turn(self, device: str) -> None:
        """Take a turn, and note the seconds a step."""
        self.seconds.append(self._take(self.turn, device) / self.turn)

    def _take(self, steps: int, device: str) -> float:
        # Guides of one kind name their parameters alike, so each contestant has a parameter store of its own.
        with pyro.get_param_store().scope(self.store):
            wait(device)
            start = time.perf_counter()
            told = self.advance(steps)
            wait(device)
        return told if isinstance(told, float) else time.perf_counter() - start

    @property
    def best(self) -> float:
        """Microseconds a step in the best round."""
        return 1e6 * min(self.seconds)


def raced(contestants: list[Contestant], asked: Asked) -> list[Contestant]:
    """Let all who can be built take a turn in every round, so that a busy moment of the machine meets all of them.

    Return them; of the others the reason is printed.
    """
    ready = []
    for each in contestants:
        try:
            each.prepare(asked)
            ready.append(each)
        except Exception as cause:
            why = "not installed" if isinstance(cause, Absent) else f"failed: {type(cause).__name__}: {cause}"
            print(f"  {each.name}: {why[:200]}", flush=True)
    for _ in range(asked.rounds):
        for each in ready:
            each.take_turn(asked.device)
    return ready


def median_ratio(one: Contestant, other: Contestant) -> float:
    """Return the middle of the ratios of the rounds."""
    return statistics.median(a / b for a, b in zip(one.seconds, other.seconds, strict=True))


def wait(device: str) -> None:
    """Wait until the device has done what it was told."""
    if device == "cuda":
        torch.cuda.synchronize()


def seconds(action: Callable[[], Any], device: str, rounds: int) -> float:
    """Return the least time that ``action`` took, after one time that does not count."""
    action()
    taken = []
    for _ in range(rounds):
        wait(device)
        start = time.perf_counter()
        action()
        wait(device)
        taken.append(time.perf_counter() - start)
    return min(taken)
