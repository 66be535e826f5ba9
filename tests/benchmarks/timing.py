"""How time is taken: contestants in turns, in one process."""

import math
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pyro
import torch

from tests.benchmarks.sizes import SMALL, Size

Advance = Callable[[int], Any]


@dataclass
class Settings:
    """How to measure.

    Attributes:
        device: "cpu" or "cuda".
        quick: whether few points and short turns are enough.
        compile: whether steps are compiled; without, it is all the same machinery, faster to try out.
        rounds: turns that everyone has.
        turn: seconds that a turn should last.
        sizes: the networks of the table of steps.
        who: a regular expression that the names of contestants in the table of steps match; the baseline always takes
            part.
    """

    device: str = "cpu"
    quick: bool = False
    compile: bool = True
    rounds: int = 7
    turn: float = 0.2
    sizes: list[Size] = field(default_factory=lambda: [SMALL])
    who: str = ""

    @property
    def precisions(self) -> list[str]:
        """The precisions of matrix products, in torch's words: a CPU has one."""
        return ["high", "highest"] if self.device == "cuda" else ["highest"]


class Absent(Exception):
    """A contestant that is not on this machine."""


@dataclass(eq=False)
class Contestant:
    """Someone who takes steps.

    Attributes:
        name: what tables call it.
        build: makes ready, and returns (advance, quantum): ``advance(n)`` takes n steps, a multiple of quantum. It may
            return the seconds that they took, without what was set up for them.
    """

    name: str
    build: Callable[[], tuple[Advance, int]]
    advance: Advance = field(init=False)
    turn: int = field(init=False, default=1)
    seconds: list[float] = field(init=False, default_factory=list)
    store: dict[str, Any] = field(init=False, default_factory=lambda: {"params": {}, "constraints": {}})

    def prepare(self, device: str, turn_seconds: float) -> None:
        """Build, warm up, and choose how many steps a turn has."""
        with pyro.get_param_store().scope(self.store):
            self.advance, quantum = self.build()
        self._take(2 * quantum, device)
        once = self._take(quantum, device)
        self.turn = quantum * max(1, min(2000, math.ceil(turn_seconds / max(once, 1e-7))))

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


def ready(contestants: list[Contestant], device: str, turn: float, absent: dict[str, str]) -> list[Contestant]:
    """Return those contestants that could be built; the others are noted as absent, with the reason."""
    found = []
    for each in contestants:
        try:
            each.prepare(device, turn)
            found.append(each)
        except Exception as cause:
            absent[each.name] = reason(cause)
            print(f"  {each.name}: {absent[each.name]}", flush=True)
    return found


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


def reason(cause: Exception) -> str:
    """Say in one line why something failed, without the paths of this machine."""
    if isinstance(cause, Absent):
        return "not installed"
    lines = str(cause).strip().splitlines() or [""]
    first = re.sub(r"(?:/[\w.+-]+)+/", "", lines[0]).replace("|", "/")
    return f"failed: {type(cause).__name__}: {first[:160]}"
