"""Run random cases: ``python -m tests.oracles.differential --cases 1000 --seed 1 [--workers 2]``.

The cases that were ever found, in ``cases.txt``, are run first. A mismatch is printed as a line for that file, which
``--only "KIND NUMBER"`` runs alone.
"""

import argparse
import multiprocessing
import sys

from tqdm import tqdm

from tests.oracles.differential.cases import SHARES, known_cases, random_cases, read_cases, said


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.oracles.differential")
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--kind", choices=sorted(SHARES))
    parser.add_argument("--only", help='one case alone, such as "dropout 7000001"')
    asked = parser.parse_args()
    kinds = {asked.kind: 1} if asked.kind else SHARES
    drawn = [*([] if asked.kind else known_cases()), *random_cases(asked.seed, asked.cases, kinds)]
    cases = list(read_cases([asked.only])) if asked.only else drawn
    wrong = 0
    with multiprocessing.get_context("spawn").Pool(asked.workers) as pool:
        for differs, line in (bar := tqdm(pool.imap_unordered(said, cases), total=len(cases), unit="case")):
            wrong += differs
            if differs or asked.only:
                bar.write(line)
    print(f"{len(cases)} cases, {wrong} mismatches")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
