"""A case: a comparison and the number that draws it; those that were ever found, and random ones."""

import random
import traceback
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from tests.oracles.differential.comparisons import COMPARISONS
from tests.oracles.differential.drawn import Dice

# Of 1,000 cases, how many of each kind.
SHARES = {"engines": 400, "dropout": 400, "files": 150, "fleets": 40, "compiled": 10}
FOUND = Path(__file__).with_name("cases.txt")


class Case(NamedTuple):
    """A comparison and the number that draws it."""

    kind: str
    number: int

    def run(self) -> tuple[str, str]:
        """Return how the answers differ, "" if they do not, and what was compared."""
        dice = Dice(self.kind, self.number)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                found = COMPARISONS[self.kind](dice)
            except Exception as error:  # what is not refused by name is a mismatch too
                found = f"{type(error).__name__}: {error} ({traceback.extract_tb(error.__traceback__)[-1]})"
        return found.replace("\n", " ")[:400], " ".join(filter(None, dice.told))


def read_cases(lines: Iterable[str]) -> Iterator[Case]:
    """The cases in some lines "kind number  # remark"."""
    for line in lines:
        if words := line.split("#")[0].split():
            yield Case(words[0], int(words[1]))


def known_cases() -> list[Case]:
    """The cases that were ever found."""
    return list(read_cases(FOUND.read_text("utf-8").splitlines()))


def random_cases(seed: int, count: int, kinds: dict[str, int]) -> list[Case]:
    """So many cases, of each kind its share, in a random order."""
    dice, whole = random.Random(seed), sum(kinds.values())
    drawn = [kind for kind, share in kinds.items() for _ in range(share * count // whole)]
    drawn += dice.choices(list(kinds), list(kinds.values()), k=count - len(drawn))
    dice.shuffle(drawn)
    return [Case(kind, 1_000_000 * seed + k) for k, kind in enumerate(drawn)]


def said(case: Case) -> tuple[bool, str]:
    """Whether the answers of a case differ, and a line for ``cases.txt``; on one thread."""
    torch.set_num_threads(1)
    found, told = case.run()
    return bool(found), f"{case.kind} {case.number}  # {found} [{told}]"
