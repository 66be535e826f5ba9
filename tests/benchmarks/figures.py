"""What a benchmark is: a function that yields figures, some of them beside a limit."""

import datetime
import math
import os
import platform
import re
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Asked:
    """How to measure: on a CPU or a GPU, and whether a small run that only shows that it works is enough."""

    device: str = "cpu"
    quick: bool = False
    rounds: int = 5
    who: str = ""  # a regular expression that the names of contestants match

    @property
    def compile(self) -> bool:
        """Whether steps are compiled; in a quick run all but that is the same machinery."""
        return not self.quick

    @property
    def turn(self) -> float:
        """Seconds that a turn should last."""
        return 0.001 if self.quick else 0.2

    @property
    def precisions(self) -> dict[str, str]:
        """The precisions of matrix products, in torch's words and in ours: a CPU has one."""
        return {"high": "TF32", "highest": "fp32"} if self.device == "cuda" else {"highest": "fp32"}

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


def cell(value: float) -> str:
    """Return a number with three digits, and at least all of those before the point."""
    if isinstance(value, int) or not math.isfinite(value) or value == 0:
        return f"{value}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def moment(device: str) -> str:
    """Return the processor, the date and how busy the machine is, to know what to think of a number."""
    if device == "cuda":
        where = torch.cuda.get_device_name()
    else:
        told = subprocess.run(["lscpu"], capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"}).stdout
        found = re.search(r"^Model name:\s*(\S.*)$", told, re.MULTILINE)
        where = found[1].strip() if found else platform.machine()
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    load = os.getloadavg()[0]
    return f"{where}, torch {torch.__version__}, on {now}, load average {load:.2f} before it began"
