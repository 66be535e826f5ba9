"""What the sections of the benchmark have in common: where to measure, how long, and until when."""

from dataclasses import dataclass, field

from tests.benchmarks.sizes import SIZES, SMALL, Size
from tests.benchmarks.timing import Deadline


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
        deadline: when to stop beginning new things.
        who: a regular expression that the names of contestants in the table of steps match; the baseline always takes
            part.
    """

    device: str = "cpu"
    quick: bool = False
    compile: bool = True
    rounds: int = 7
    turn: float = 0.2
    sizes: list[Size] = field(default_factory=lambda: [SMALL])
    deadline: Deadline = field(default_factory=lambda: Deadline(None))
    who: str = ""

    @property
    def precisions(self) -> list[str]:
        """The precisions of matrix products, in torch's words: a CPU has one."""
        return ["high", "highest"] if self.device == "cuda" else ["highest"]


def default_sizes(device: str, quick: bool) -> list[Size]:
    """Return the networks that can be measured in a few minutes."""
    if quick:
        return [SMALL]
    return list(SIZES.values())[: 3 if device == "cuda" else 2]
