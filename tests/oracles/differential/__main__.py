"""Run random cases: ``python -m tests.oracles.differential --cases 1000 --seed 1 [--minutes 60] [--kind dropout]``.

The cases that were ever found, in ``cases.txt``, are run first. A mismatch is printed as a line for that file.
"""

import argparse
import random
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from tests.oracles.differential.comparisons import COMPARISONS, engines
from tests.oracles.differential.drawn import Dice

SHARES = {"engines": 30, "dropout": 38, "files": 12, "ranks": 8, "tables": 5, "scripts": 4, "chains": 3}
CASES = Path(__file__).with_name("cases.txt")


class Case(NamedTuple):
    """A comparison and the number that draws it."""

    kind: str
    number: int

    def run(self, compiled: bool = False) -> tuple[str, str]:
        """Return how the answers differ, "" if they do not, and what was compared."""
        compare = partial(engines, compiled=True) if compiled and self.kind == "engines" else COMPARISONS[self.kind]
        dice = Dice(self.kind, self.number)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                found = compare(dice)
            except Exception as error:  # what is not refused by name is a mismatch too
                found = f"{type(error).__name__}: {error} ({traceback.extract_tb(error.__traceback__)[-1]})"
        return found.replace("\n", " ")[:400], " ".join(filter(None, dice.told))


def known_cases() -> Iterator[Case]:
    """The cases that were ever found."""
    for line in CASES.read_text("utf-8").splitlines():
        kind, number = line.split("#")[0].split() or ("", "")
        if kind:
            yield Case(kind, int(number))


def random_cases(seed: int, count: int, kinds: dict[str, int]) -> Iterator[Case]:
    dice = random.Random(seed)
    for k in range(count):
        yield Case(dice.choices(list(kinds), list(kinds.values()))[0], 1_000_000 * seed + k)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.oracles.differential")
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--kind", choices=sorted(SHARES))
    parser.add_argument("--compiled", action="store_true", help="also compile some steps, which takes a minute each")
    asked = parser.parse_args()
    kinds = {asked.kind: 1} if asked.kind else SHARES
    cases = [*known_cases(), *random_cases(asked.seed, asked.cases, kinds)]
    counts, seconds, wrong = Counter[str](), Counter[str](), 0
    start = time.monotonic()
    for case in (bar := tqdm(cases, unit="case")):
        before = time.monotonic()
        if before - start > 60 * asked.minutes:
            break
        found, told = case.run(asked.compiled)
        counts[case.kind] += 1
        seconds[case.kind] += time.monotonic() - before  # type: ignore[assignment]
        if found:
            wrong += 1
            bar.write(f"{case.kind} {case.number}  # {found} [{told}]")
        bar.set_postfix(mismatches=wrong)
    each = ", ".join(f"{kind} {n} ({seconds[kind] / n:.1f} s each)" for kind, n in counts.most_common())
    print(f"{counts.total()} cases, {wrong} mismatches: {each}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
