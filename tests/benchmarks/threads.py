"""Steps of ``fit`` where torch has one thread and where it has two: ``python -m tests.benchmarks.threads``.

Run it without OMP_NUM_THREADS. ``fit`` uses as many threads as a step has work for; ``--all-threads`` shows what
steps would take if it used all of them. Both take turns in one process, and the best round of each counts.
"""

import argparse
import contextlib
import time
import warnings
from collections.abc import Callable

import pyro
import torch

import pyro_dropout as pd
from pyro_dropout.engines.threads import enough_threads
from pyro_dropout.generative.model_call import ModelCall
from pyro_dropout.training.fit import TrainingTask
from pyro_dropout.training.optimisers import named
from tests.benchmarks.ours import LEARNING_RATE, dropout
from tests.benchmarks.sizes import SIZES, Size

LIMIT, NOISE = 1.0, 1.05  # of the time with one thread
HOW = {"eager": False, "recorded": "traced", "compiled": True}


class Runner:
    """A training that was set up where torch had so many threads, and takes its turns there."""

    def __init__(self, size: Size, threads: int, how: str, chosen: bool) -> None:
        self.threads, self.best, self.used = threads, float("inf"), 0
        self.store: dict[str, dict[str, object]] = {"params": {}, "constraints": {}}
        with pyro.get_param_store().scope(self.store):
            model = size.model("cpu")
            x, y = size.data("cpu")
            task = TrainingTask(dropout(model), pd.ELBO(per_example=True), ModelCall(model, (x, y, len(x))))
            self._trial: Callable[[], object] | None = (lambda: task.trial(size.batch)) if chosen else None
            with self._within():
                self.run = task.start(named("adam", LEARNING_RATE), size.batch, HOW[how])  # type: ignore[arg-type]
                self.run.advance(2)

    @contextlib.contextmanager
    def _within(self):  # type: ignore[no-untyped-def]
        torch.set_num_threads(self.threads)
        with enough_threads(self._trial):
            self.used = torch.get_num_threads()
            yield

    def turn(self, steps: int) -> float:
        """Take some steps, and return the seconds of each."""
        with pyro.get_param_store().scope(self.store), self._within():
            start, done = time.perf_counter(), 0
            while done < steps:
                done += len(self.run.advance(steps - done))
            taken = (time.perf_counter() - start) / steps
        self.best = min(self.best, taken)
        return taken


def measured(size: Size, how: str, rounds: int, seconds: float, chosen: bool) -> float:
    """Print the best step with one and with two threads, and return their ratio."""
    one, two = (Runner(size, threads, how, chosen) for threads in (1, 2))
    steps = max(1, round(seconds / one.turn(1)))
    for _ in range(rounds):
        one.turn(steps)
        two.turn(steps)
    ratio = two.best / one.best
    told = f"{size.name:<14} {how:<9} one {1e6 * one.best:10.1f} µs, two {1e6 * two.best:10.1f} µs ({two.used} used)"
    print(f"{told}, ratio {ratio:.3f}, limit {LIMIT}{'' if ratio <= NOISE else ': MISSED'}", flush=True)
    return ratio


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES), metavar="SIZE")
    parser.add_argument("--how", nargs="+", choices=HOW, default=list(HOW), metavar="HOW", help=", ".join(HOW))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.2, help="that a turn should last")
    parser.add_argument("--all-threads", action="store_true", help="use all threads, whatever the size")
    given = parser.parse_args()
    torch.set_num_threads(2)
    if torch.get_num_threads() < 2:
        raise SystemExit("torch has one thread here; unset OMP_NUM_THREADS.")
    warnings.simplefilter("ignore")
    cases = [(size, how) for size in given.sizes for how in given.how]
    found = [measured(SIZES[size], how, given.rounds, given.seconds, not given.all_threads) for size, how in cases]
    missed = [f"{size} {how}" for (size, how), ratio in zip(cases, found, strict=True) if ratio > NOISE]
    raise SystemExit(f"two threads are slower than one: {', '.join(missed)}" if missed else 0)


if __name__ == "__main__":
    main()
