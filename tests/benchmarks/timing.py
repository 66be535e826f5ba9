"""How time is taken: contestants in turns, in one process, until the time is up."""

import math
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pyro
import torch

Advance = Callable[[int], Any]


class Absent(Exception):
    """A contestant that is not on this machine."""


@dataclass(eq=False)
class Contestant:
    """Someone who takes steps.

    Attributes:
        name: what tables call it.
        build: makes ready, and returns (advance, quantum): ``advance(n)`` takes n steps, a multiple of quantum.
        urgency: who is built first, for time may run out; 0 is the baseline.
    """

    name: str
    build: Callable[[], tuple[Advance, int]]
    urgency: int = 1
    advance: Advance = field(init=False)
    turn: int = field(init=False, default=1)
    seconds: list[float] = field(init=False, default_factory=list)
    store: dict[str, Any] = field(init=False, default_factory=lambda: {"params": {}, "constraints": {}})

    def prepare(self, device: str, turn_seconds: float) -> None:
        """Build, warm up, and choose how many steps a turn has."""
        # Guides of one kind name their parameters alike, so each contestant has a parameter store of its own.
        with pyro.get_param_store().scope(self.store):
            self.advance, quantum = self.build()
            self.advance(2 * quantum)
            wait(device)
            start = time.perf_counter()
            self.advance(quantum)
            wait(device)
        once = time.perf_counter() - start
        self.turn = quantum * max(1, min(2000, math.ceil(turn_seconds / max(once, 1e-7))))

    def take_turn(self, device: str) -> None:
        """Take a turn, and note the seconds a step."""
        with pyro.get_param_store().scope(self.store):
            wait(device)
            start = time.perf_counter()
            self.advance(self.turn)
            wait(device)
            self.seconds.append((time.perf_counter() - start) / self.turn)

    @property
    def best(self) -> float:
        """Microseconds a step in the best round."""
        return 1e6 * min(self.seconds)


def interleave(contestants: list[Contestant], rounds: int, device: str) -> None:
    """Let everyone take a turn in every round, so that a busy moment of the machine meets all of them."""
    for _ in range(rounds):
        for each in contestants:
            each.take_turn(device)


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


class Deadline:
    """When to stop beginning new things.

    Args:
        limit: seconds from now; None for no end.
    """

    def __init__(self, limit: float | None) -> None:
        self.limit, self.start = limit, time.perf_counter()

    def over(self, share: float = 1.0) -> bool:
        """Whether this share of the time is up."""
        return self.limit is not None and time.perf_counter() - self.start > share * self.limit


def reason(cause: Exception) -> str:
    """Say in one line why something failed, without the paths of this machine."""
    if isinstance(cause, Absent):
        return "not installed"
    lines = str(cause).strip().splitlines() or [""]
    first = re.sub(r"(?:/[\w.+-]+)+/", "", lines[0]).replace("|", "/")
    return f"failed: {type(cause).__name__}: {first[:160]}"
