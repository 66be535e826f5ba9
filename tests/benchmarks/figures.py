"""What a benchmark is: a function that yields figures, some of them beside a limit."""

import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks.report import cell

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Asked:
    """How to measure: on a CPU or a GPU, and whether a small run that only shows that it works is enough."""

    device: str = "cpu"
    quick: bool = False
    rounds: int = 5

    def pick(self, whole: Any, small: Any) -> Any:
        """Return the size of a whole run, or of a quick one."""
        return small if self.quick else whole


@dataclass(frozen=True)
class Figure:
    """A number that was measured.

    Attributes:
        what: its name.
        value: the number.
        unit: of the number.
        most: its limit.
        least: its limit, where larger is better.
    """

    what: str
    value: float
    unit: str = ""
    most: float | None = None
    least: float | None = None

    @property
    def missed(self) -> bool:
        """Whether the number is beyond its limit."""
        above = self.most is not None and self.value > self.most
        return above or (self.least is not None and self.value < self.least)

    def __str__(self) -> str:
        limits = [f"at {which} {cell(limit)}" for which in ("most", "least") if (limit := getattr(self, which))]
        said = f" ({', '.join(limits)})" if limits else ""
        return f"{self.what}: {cell(self.value)}{self.unit and ' '}{self.unit}{said}{': MISSED' if self.missed else ''}"


Measure = Callable[[Asked], Iterable[Figure]]


BENCHMARKS: dict[str, tuple[Measure, tuple[str, ...]]] = {}  # with the devices that `make bench` runs it on


def benchmark(name: str, *devices: str) -> Callable[[Measure], Measure]:
    """Register a function under the name that the command line takes."""

    def registered(measure: Measure) -> Measure:
        BENCHMARKS[name] = measure, devices
        return measure

    return registered


def apart(function: Callable[..., Any], *given: Any) -> int:
    """Return the whole number that a function of a module returns in a process of its own."""
    call = f"from {function.__module__} import {function.__name__} as f; print(f(*{given!r}))"
    command = [sys.executable, "-W", "ignore", "-c", call]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["the process failed"])[-1])
    return int(done.stdout.split()[-1])
