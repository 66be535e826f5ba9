"""The state of one training run: parameters, optimiser, data order, and the loop that takes the steps.

A run changes always the same tensors. Those of one guide are its own, so that parameters exist once; those of a fleet
or an ensemble belong to the run, and ``publish`` puts them back.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pyro_dropout.engines.choose import HowCompiled, chosen
from pyro_dropout.engines.engine import CHAIN, Direct, Eager, Engine, Loop, Step, copy_into
from pyro_dropout.generative.precision import precision_now, products_in
from pyro_dropout.generative.random_state import forked
from pyro_dropout.protocols import Record
from pyro_dropout.training.batches import Batches, Source
from pyro_dropout.training.history import is_divergence
from pyro_dropout.training.svi import warn_uncompiled

_MANY = 2**20  # more steps than any engine takes at once


class TrainingRun:
    """One training run: a step of tensors that is taken repeatedly.

    Args:
        step: the step, and the tensors that it changes.
        write: puts parameters into their owners; None if the step changes the owners' own tensors.
        batches: where mini-batches come from; None for all data at every step.
        compile: "auto", "traced", "plain", True or False, as ``decided`` returns it.
        before: engines that are tried before those for any step.
        fatal: errors that are raised, and not a reason for another engine.

    Attributes:
        refused: whether the last step was left out, because its loss or gradient was not finite.
        failed: the error of torch that ended the last step, because its numbers have diverged.
        why: why faster engines do not take the steps.
        break_off: asked after each step: are no more wanted?
    """

    def __init__(
        self,
        step: Step,
        *,
        write: Callable[[list[Tensor]], None] | None = None,
        batches: Source | None = None,
        compile: HowCompiled = "auto",
        before: Sequence[Engine] = (),
        fatal: tuple[type[Exception], ...] = (),
    ) -> None:
        self._step, self._write, self._batches = step, write, batches
        self._before, self._fatal, self._precision = before, fatal, precision_now()
        self._eager: Loop = Direct(step)
        self.refused, self.compile_seconds = False, 0.0
        self.failed: Exception | None = None
        self.why: list[str] = []
        self.break_off: Callable[[], bool] = lambda: False
        self._loop: Loop = self._eager
        self.choose(compile)

    def choose(self, compile: HowCompiled) -> None:
        """Choose the engine that takes the steps from here on."""
        start = time.perf_counter()
        how: Any = {"before": self._before, "fatal": self._fatal, "around": forked, "warn": warn_uncompiled}
        self._loop, self.why = chosen(compile, self._step, **how)
        if self.compiled:
            self.compile_seconds = time.perf_counter() - start

    def run_eagerly(self) -> None:
        """Take all steps as they are written."""
        self._loop = self._eager

    @property
    def engine(self) -> str:
        """What takes the steps."""
        return self._loop.name

    @property
    def compiled(self) -> bool:
        """Whether steps are recorded or compiled."""
        return self.engine != Eager.name

    @property
    def traced(self) -> bool:
        """Whether steps are recorded, and not compiled."""
        return self.engine.startswith("recorded")

    @property
    def chained(self) -> bool:
        """Whether several steps run at a time."""
        return self._loop.at_once(CHAIN) > 0

    @property
    def together(self) -> int:
        """How many steps are best taken before the next look at the clock."""
        return max(CHAIN, self._loop.at_once(_MANY))

    @property
    def guarded(self) -> bool:
        """Whether a step that is not finite is not taken, so that the parameters stay good."""
        return self._loop.guarded

    def advance(self, steps: int) -> Tensor:
        """Take ``steps`` steps, or fewer but at least one; return the loss before each."""
        count = self._loop.at_once(steps)
        if count:
            return self._loop.many(count, self._batches.take(count) if isinstance(self._batches, Batches) else None)
        count = min(steps, CHAIN if self._batches is None else self._batches.together)
        losses = []
        with products_in(self._precision):
            self._loop.begin()
            for row in [[]] * count if self._batches is None else self._batches.inputs(count):
                usual = self._batches is None or self._batches.usual(row)
                try:
                    loss, taken = (self._loop if usual else self._eager).one(row)
                except (RuntimeError, ValueError) as cause:
                    if not is_divergence(cause, self.values):
                        raise
                    self.failed = cause
                    break
                losses.append(loss)
                self.refused = not taken
                if self.refused or self.break_off():
                    break
        return torch.stack(losses) if losses else self.t.new_empty(0)

    # --- the tensors that steps change --------------------------------------------------------------------------------

    @property
    def leaves(self) -> list[Tensor]:
        """The current parameters, then the optimiser's state."""
        return self._loop.changed[:-1]

    @property
    def t(self) -> Tensor:
        """The number of the next step."""
        return self._loop.changed[-1]

    @property
    def values(self) -> list[Tensor]:
        """The current parameters."""
        return self._loop.changed[: len(self._step.values)]

    def snapshot(self, over: list[Tensor] | None = None) -> list[Tensor]:
        """Return a copy of the current parameters; it is written over an earlier one that is given, if that fits."""
        found = over or []
        if [each.shape for each in found] != [each.shape for each in self.values]:
            return [value.detach().clone() for value in self.values]
        copy_into(found, self.values)
        return found

    def restore(self, values: list[Tensor]) -> None:
        """Restore a snapshot of the parameters; the optimiser's state stays as it is."""
        copy_into(self.values, values)

    def publish(self) -> None:
        """Put copies of the current parameters back into their owners, unless these have them."""
        if self._write is not None:
            self._write(self.snapshot())
        elif self.values and self.values[0] is not self._step.values[0]:  # a kernel with parameters of its own
            copy_into(self._step.values, self.values)

    def state(self) -> tuple[dict[str, Tensor], Record]:
        """Return everything that later steps depend on, except the random generators: tensors by name, and the rest."""
        found = {f"leaf.{k:05d}": leaf.detach() for k, leaf in enumerate(self.leaves)}
        found |= {"t": self.t} | self._loop.kept
        if self._batches is not None:
            found |= self._batches.state()
        return found, {}

    def set_state(self, tensors: dict[str, Tensor], rest: Record) -> None:
        """Restore a state; one that another engine has left may lack what this one keeps."""
        names = [f"leaf.{k:05d}" for k in range(len(self.leaves))]
        copy_into([*self.leaves, self.t], [tensors[name] for name in [*names, "t"]])
        for name, value in self._loop.kept.items():
            if name in tensors:
                value.copy_(tensors[name])
        if self._batches is not None:
            self._batches.set_state(tensors)
