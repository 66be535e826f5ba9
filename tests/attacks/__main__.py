"""Attack run folders and print a table: ``python -m tests.attacks``; three minutes of CPU time."""

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tqdm import tqdm

from tests.attacks import folders, records
from tests.attacks.arena import GOOD, VERDICTS, Arena, Outcome, plan
from tests.cli.command import without_fsync


def main(words: list[str] | None = None) -> int:
    """Run all attacks; return 1 if a run failed any of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=1000, help="mutations of run.json")
    parser.add_argument("--folders", type=int, default=1000, help="mutations of run folders")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(words)
    start, found, lost = time.monotonic(), Counter[tuple[str, str]](), []
    with tempfile.TemporaryDirectory() as root, without_fsync():
        arena = Arena.built(Path(root) / "arena")
        arena.measure()
        attacks = plan([*records.KINDS], args.records, args.seed) + plan([*folders.KINDS], args.folders, args.seed)
        for attack in tqdm(attacks, unit="attack", disable=not sys.stderr.isatty()):
            outcome: Outcome = arena.in_a_process(attack)
            found[attack.kind, outcome.verdict] += 1
            if outcome.verdict not in GOOD:
                lost.append(attack)
                told = f"{outcome.what}: {outcome.said} ({outcome.memory // 1024} MiB)"
                print(f"{outcome.verdict}: {attack}: {told}", file=sys.stderr, flush=True)
    print("| attack | number |", " | ".join(VERDICTS), "|")
    print("|---|---|" + "---|" * len(VERDICTS))
    for kind in (*records.KINDS, *folders.KINDS):
        counts = [found[kind, verdict] for verdict in VERDICTS]
        print(f"| {kind} |", " | ".join(map(str, [sum(counts), *counts])), "|")
    counts = [sum(number for (_, each), number in found.items() if each == verdict) for verdict in VERDICTS]
    print("| all |", " | ".join(map(str, [sum(counts), *counts])), "|")
    print(f"\n{time.monotonic() - start:.0f} s")
    return int(bool(lost))


if __name__ == "__main__":
    sys.exit(main())
