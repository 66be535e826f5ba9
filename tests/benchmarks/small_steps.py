"""A compiled step of a small network beside an eager one in torch: ``python -m tests.benchmarks.small_steps``.

13-50-1 with 128 points on one thread of a CPU: ``pd.fit`` with AutoDropout, and nn.Dropout before each layer, loss,
backward and torch.optim.Adam. Both take turns in one process, and the best round of each counts.
"""

import argparse
import warnings

import torch

from tests.benchmarks import ours, peers
from tests.benchmarks.sizes import SMALL
from tests.benchmarks.timing import Contestant, interleave, median_ratio

LIMIT = 0.33


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.2, help="that a turn should last")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")

    def fit(batches: int) -> Contestant:
        name = "pd.fit, compiled" + (", shuffled mini-batches" if batches > 1 else "")
        how = {"per_example": True, "compile": True, "batches": batches}
        return Contestant(name, lambda: ours.fitting(SMALL, "cpu", ours.dropout, **how))  # type: ignore[arg-type]

    baseline = Contestant(peers.BASELINE, lambda: peers.plain(SMALL, "cpu"), 0)
    everyone = [baseline, fit(1), fit(ours.EPOCH)]
    for each in everyone:
        each.prepare("cpu", given.seconds)
    interleave(everyone, given.rounds, "cpu")
    missed = []
    for each in everyone:
        ratio = each.best / baseline.best
        limit = "" if each is baseline else f", limit {LIMIT}{'' if ratio <= LIMIT else ': MISSED'}"
        print(
            f"{each.name:<40} {each.best:8.1f} µs, ratio {ratio:.3f}, median {median_ratio(each, baseline):.3f}{limit}"
        )
        missed += [each.name] if each is not baseline and ratio > LIMIT else []
    raise SystemExit(f"more than {LIMIT} of an eager step: {', '.join(missed)}" if missed else 0)


if __name__ == "__main__":
    main()
