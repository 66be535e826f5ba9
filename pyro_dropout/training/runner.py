"""The state of one training run: parameters, optimiser, data order, and the engine that takes the steps.

A run changes always the same tensors. Those of a guide are its own, so that parameters exist once; those of a fleet
belong to the run, and ``publish`` puts them back.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyro_dropout.engines.choose import HowCompiled, chosen
from pyro_dropout.engines.engine import (
    CHAIN,
    Direct,
    Eager,
    Step,
    copied,
    copy_into,
)
from pyro_dropout.generative.precision import precision_now, products_in
from pyro_dropout.generative.random_state import forked
from pyro_dropout.protocols import Record, Tree
from pyro_dropout.training.batches import Batches, Stream
from pyro_dropout.training.history import is_divergence
from pyro_dropout.training.optimisers import TorchOptimiser, Update, clock
from pyro_dropout.training.svi import warn_uncompiled

Source = Batches | Stream  # where mini-batches come from
_MANY = 2**20  # more steps than any engine takes at once


class TrainingRun:
    """One training run: a step of tensors that is taken repeatedly, on mini-batches from ``batches`` if there are any.

    ``write`` puts parameters into their owners, unless a step changes these themselves. ``buffers`` are the tensors of
    model and guide, by name, that a step may change as it runs them, such as running statistics.
    """

    def __init__(
        self,
        step: Step,
        *,
        write: Callable[[list[Tensor]], None] | None = None,
        buffers: dict[str, Tensor] | None = None,
        batches: Source | None = None,
        compile: HowCompiled = "auto",
        beside: TorchOptimiser | None = None,
    ) -> None:
        self._step, self._write, self._batches, self._beside = step, write, batches, beside
        self.buffers = {} if buffers is None else buffers
        self._precision, self._eager = precision_now(), Direct(step)
        self.refused = False  # whether the last step was left out, because its loss or gradient was not finite
        self.failed: Exception | None = None  # torch's, which ended the last step, because its numbers have diverged
        self.break_off: Callable[[], bool] = lambda: False  # asked after each step: are no more wanted?
        self.agreed: Callable[..., Any] = lambda *numbers: numbers  # by all processes that share the run
        self.shared = False  # whether there are several
        self.ready: Callable[[], None] = lambda: None  # called before the first step, after a checkpoint is restored
        self.compile_seconds = 0.0
        start = time.perf_counter()
        self._loop, self.why = chosen(compile, step, around=forked, warn=warn_uncompiled)
        if self.engine != Eager.name:
            self.compile_seconds = time.perf_counter() - start

    @property
    def engine(self) -> str:
        """What takes the steps."""
        return self._loop.name

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
            for row in [[]] * count if self._batches is None else self._batches.inputs(count):
                usual = not isinstance(self._batches, Stream) or self._batches.usual(row)
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
    def t(self) -> Tensor:
        """The number of the next step."""
        return self._loop.changed[-1]

    @property
    def values(self) -> list[Tensor]:
        """The current parameters."""
        return self._loop.changed[: len(self._step.values)]

    @property
    def held(self) -> list[Tensor]:
        """What a trained model is made of: the current parameters, then the buffers."""
        return [*self.values, *self.buffers.values()]

    def snapshot(self) -> list[Tensor]:
        """Return a copy of parameters and buffers."""
        return copied(self.held)

    def restore(self, values: list[Tensor]) -> None:
        """Restore a snapshot of parameters and buffers; the optimiser's state stays as it is."""
        copy_into(self.held, values)

    def publish(self) -> None:
        """Put copies of the current parameters back into their owners, unless these have them."""
        if self._write is not None:
            self._write(copied(self.values))

    def _named(self) -> dict[str, Tensor]:
        *leaves, t = self._loop.changed
        return {f"leaf.{k:05d}": leaf for k, leaf in enumerate(leaves)} | {"t": t}

    def state(self) -> tuple[dict[str, Tensor], Record]:
        """Return everything that later steps depend on, except the random generators: tensors by name, and the rest."""
        found = {name: value.detach() for name, value in self._named().items()} | self._loop.kept
        if self._batches is not None:
            found |= self._batches.state()
        held, rest = ({}, {}) if self._beside is None else self._beside.state()
        return found | held, rest

    def set_state(self, tensors: dict[str, Tensor], rest: Record) -> None:
        """Restore a state; one that another engine has left may lack what this one keeps."""
        if self._beside is not None:
            self._beside.set_state(tensors, rest)
        kept = {name: value for name, value in self._loop.kept.items() if name in tensors}
        targets = self._named() | kept
        copy_into([*targets.values()], [tensors[name] for name in targets])
        if self._batches is not None:
            self._batches.set_state(tensors)


def surroundings(
    values: list[Tensor], update: Update, inputs: tuple[Tree, ...], batches: Source | None
) -> dict[str, Any]:
    """Return what a step has besides its functions, parameters and state."""
    t, lr = clock(update.lr, values, 1)
    row = [] if batches is None else batches.example()
    return {"t": t, "lr": lr, "inputs": inputs, "row": row, "chain": CHAIN if batches is None or batches.chained else 0}
