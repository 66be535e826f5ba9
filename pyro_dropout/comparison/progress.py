"""How long a comparison will take, and one progress bar for all of it.

A few eager steps of each guide are timed before training starts. Their times are the shares of the guides in the bar,
so the remaining time that it shows is that of the whole comparison.
"""

import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pyro
from tqdm.auto import tqdm

from pyro_dropout.engines.choose import decided
from pyro_dropout.generative.model_call import ModelCall
from pyro_dropout.generative.random_state import forked
from pyro_dropout.guides.ensemble import Ensemble
from pyro_dropout.protocols import PyroModel, Record
from pyro_dropout.training.fit import fit, place_of, training_size
from pyro_dropout.training.loop import sharing_bar

Build = Callable[[int], tuple[PyroModel, PyroModel]]

# Measured on CPUs with networks of one hidden layer; the remaining time of the bar corrects them.
_TIMED = 6  # steps
_RECORDING, _RECORDED = 150, 0.4  # eager steps; of the time of an eager step
_COMPILING, _COMPILED = 25.0, 0.2  # seconds for one guide; of the time of an eager step
_BESIDE = 1.0  # steps of one network that each further replica of a fleet costs
_SCORING = 1.5  # seconds for one seed


@dataclass(frozen=True)
class Share:
    """What one guide is expected to cost.

    Attributes:
        seconds: to train it from all seeds and to score it.
        runs: trainings one after another; the seeds of a fleet are one.
    """

    seconds: float
    runs: int = 1


def estimate(build: Build, seeds: Sequence[int], call: ModelCall, options: Record, *, fleet: bool) -> Share:
    """Return what a guide will cost, from the time of a few eager steps; the random state stays as it is.

    A guide that cannot be trained costs nothing: the comparison will say why.
    """
    timed: Record = {**options, "steps": _TIMED, "compile": False, "progress": False}
    try:
        with forked(), warnings.catch_warnings(), pyro.get_param_store().scope():
            warnings.simplefilter("ignore")
            model, guide = build(seeds[0])
            start = time.perf_counter()
            history = fit(model, guide, *call.args, **timed, **call.kwargs)
    except Exception:
        return Share(0.0)
    each = history.seconds / history.steps
    beginning = time.perf_counter() - start - history.seconds
    runs = len(seeds) if isinstance(guide, Ensemble) or not fleet else 1
    networks = len(seeds) if runs > 1 else 1 + _BESIDE * (len(seeds) - 1)
    batch = options["batch_size"] or call.count or 1
    size = training_size(model, guide, batch) * (len(seeds) if runs == 1 else 1)
    how = decided(options["compile"], options["steps"], size, place_of([model, guide], call))
    begin, factor = {False: (0.0, 1.0), "traced": (_RECORDING * each, _RECORDED)}.get(how, (_COMPILING, _COMPILED))
    training = (beginning + begin) * runs + options["steps"] * each * networks * factor
    return Share(training + _SCORING * len(seeds), runs)


class WholeBar:
    """One progress bar for several trainings; each advances it by its share.

    Args:
        shares: what each part is expected to cost, by name.
        steps: the steps of each training.
        shown: whether there is a bar at all.

    Example:
        >>> whole = WholeBar({"dropout": Share(10.0), "ensemble": Share(30.0, runs=3)}, steps=100, shown=False)
        >>> with whole.part("dropout"):
        ...     pass
        >>> whole.done
        10.0
    """

    def __init__(self, shares: Mapping[str, Share], steps: int, shown: bool) -> None:
        least = 0.01 * max(1.0, sum(share.seconds for share in shares.values()))  # for a part whose time is unknown
        self._shares = {name: Share(max(least, share.seconds), share.runs) for name, share in shares.items()}
        self._steps, self._name = steps, ""
        self._each = self._end = self.done = 0.0
        self.disable = not shown
        form = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"
        total = sum(share.seconds for share in self._shares.values())
        self._bar: Any = tqdm(
            total=total, desc="compare", disable=not shown, leave=False, smoothing=0.0, bar_format=form
        )

    def write(self, line: str) -> None:
        """Print a line above the bar."""
        if not self.disable:
            tqdm.write(line, file=sys.stderr)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Within this context trainings advance the bar by the share of this name, and show no bar of their own."""
        share = self._shares[name]
        self._each, self._end = share.seconds / (self._steps * share.runs), self.done + share.seconds
        self._name = name
        self._bar.set_postfix_str(name)
        with sharing_bar(self):
            yield
        self._to(self._end)

    def _to(self, place: float) -> None:
        self._bar.update(place - self.done)
        self.done = place

    def update(self, steps: int) -> None:
        """Advance by some steps, at most to the end of the part; its scores are computed after that."""
        self._to(min(self._end, self.done + steps * self._each))

    def set_postfix(self, loss: str, refresh: bool = True) -> None:
        """Show the loss behind the name."""
        self._bar.set_postfix_str(f"{self._name}, loss {loss}", refresh=refresh)

    def close(self) -> None:
        """Remove the bar."""
        self._bar.close()
