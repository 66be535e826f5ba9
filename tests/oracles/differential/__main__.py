"""Run random cases: ``python -m tests.oracles.differential --cases 1000 --seed 1 [--log FILE]``.

The cases that were ever found, in ``cases.txt``, are run first. A mismatch is printed as a line for that file, which
``--only "KIND NUMBER"`` runs alone. Every finished case is a line of the log: the same command goes on where it stood.
"""

import argparse
import multiprocessing
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from tqdm import tqdm

from tests.oracles.differential.cases import SHARES, Case, known_cases, random_cases, read_cases


def run_all(cases: list[Case], workers: int, minutes: float, log: Path | None) -> int:
    """Run cases side by side, print those that differ, and return how many those are."""
    counts, seconds, wrong, start = Counter[str](), dict.fromkeys(SHARES, 0.0), 0, time.monotonic()
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        waiting = {pool.submit(case.timed): case for case in cases}
        for done in (bar := tqdm(as_completed(waiting), total=len(cases), unit="case", mininterval=5.0)):
            case = waiting[done]
            try:
                found, told, took = done.result()
            except BrokenProcessPool:
                left = [f"{other.kind} {other.number}" for future, other in waiting.items() if future.exception()]
                bar.write(f"a worker has died; one of these is why: {', '.join(left[: workers + 1])}")
                return wrong + 1
            counts[case.kind] += 1
            seconds[case.kind] += took
            line = f"{case.kind} {case.number}  # {found} [{told}]"
            if log is not None:
                with log.open("a", encoding="utf-8") as file:
                    file.write(line + "\n")
            if found:
                wrong += 1
                bar.write(line)
            bar.set_postfix(mismatches=wrong, refresh=False)
            if time.monotonic() - start > 60 * minutes:
                pool.shutdown(wait=False, cancel_futures=True)
                break
    spent = (time.monotonic() - start) / 60
    each = ", ".join(f"{kind} {n} ({seconds[kind] / n:.1f} s each)" for kind, n in counts.most_common())
    print(f"{counts.total()} cases in {spent:.1f} minutes, {wrong} mismatches: {each}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.oracles.differential")
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=90.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--kind", choices=sorted(SHARES))
    parser.add_argument("--only", help='one case alone, such as "dropout 7000001"')
    parser.add_argument("--log", type=Path, help="finished cases, a line each; those in it are not run again")
    asked = parser.parse_args()
    if asked.only:
        (case,) = read_cases([asked.only])
        found, told = case.run()
        print(f"{case.kind} {case.number}  # {found} [{told}]")
        return 1 if found else 0
    kinds = {asked.kind: 1} if asked.kind else SHARES
    cases = [*([] if asked.kind else known_cases()), *random_cases(asked.seed, asked.cases, kinds)]
    before = asked.log.read_text("utf-8").splitlines() if asked.log is not None and asked.log.exists() else []
    done = set(read_cases(before))
    wrong = [line for line in before if "#  [" not in line]
    for line in wrong:
        print(line)
    left = [case for case in cases if case not in done]
    return 1 if run_all(left, asked.workers, asked.minutes, asked.log) + len(wrong) else 0


if __name__ == "__main__":
    sys.exit(main())
