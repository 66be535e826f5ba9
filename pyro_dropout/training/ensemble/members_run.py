"""The training run of some members: their share of the state of all ranks, and a smaller step if memory runs out."""

from typing import Any

import torch
from torch import Tensor

from pyro_dropout.engines.decision import HowCompiled
from pyro_dropout.engines.program import Step
from pyro_dropout.protocols import Record
from pyro_dropout.training.ensemble.member_loss import EnsembleLoss
from pyro_dropout.training.ensemble.share import Share
from pyro_dropout.training.optimisers import Update
from pyro_dropout.training.runner import TrainingRun
from pyro_dropout.training.svi import warn_uncompiled


class MembersRun(TrainingRun):
    """A training run of this rank's members, whose state is that of all ranks' members.

    Args:
        loss: the loss, which knows how many members are computed at once.
        share: which of all members these are.
        by_member: for each of the parameters, whether every member has its own.
        step: as in ``TrainingRun``, whose other arguments follow.
        values: the parameters to start from.
        update: the optimiser.
        compile: "auto", "traced", "plain", True or False.
        options: the others.
    """

    def __init__(
        self,
        loss: EnsembleLoss,
        share: Share,
        by_member: list[bool],
        step: Step,
        values: list[Tensor],
        update: Update,
        *,
        compile: HowCompiled,
        **options: Any,
    ) -> None:
        self._loss, self._share, self._compile = loss, share, compile
        slots = [each for each in by_member for _ in range(update.slots)]
        self._stacked = {f"leaf.{k:05d}" for k, each in enumerate([*by_member, *slots]) if each}
        self._members = share.own.stop - share.own.start
        super().__init__(step, values, update, compile=compile, **options)

    def _try_to_compile(self, compile: HowCompiled) -> None:
        try:
            super()._try_to_compile(True)
        except torch.OutOfMemoryError:  # half as many members may fit
            raise
        except Exception as cause:
            if compile is True:
                raise
            warn_uncompiled(cause)

    def run_eagerly(self) -> None:
        """Take all steps without the compiled program."""
        self._program = self._chain = self._taped = self._in_c = None

    def advance(self, steps: int) -> Tensor:
        """Take ``steps`` steps, or fewer but at least one; return the losses before each, (steps, members)."""
        if self._program is None:  # the loss itself gives way if memory runs out
            return super().advance(steps)
        before, _ = super().state()
        if self._fixed:  # steps change these tensors
            before = {name: value.clone() for name, value in before.items()}
        clock, at_once = self.t.clone(), self._loss.at_once

        def attempt() -> Tensor:
            if self._loss.at_once != at_once:
                self.run_eagerly()
                TrainingRun.set_state(self, {**before, "t": clock.clone()}, {})
                self._try_to_compile(self._compile)
            return TrainingRun.advance(self, steps)

        return self._loss.within_memory(attempt, self._members)

    def state(self) -> tuple[dict[str, Tensor], Record]:
        """Return the state of all ranks' members; all ranks call this."""
        found, rest = super().state()
        return {name: self._share.whole(v) if name in self._stacked else v for name, v in found.items()}, rest

    def set_state(self, tensors: dict[str, Tensor], rest: Record) -> None:
        """Restore a state: this rank's part of it."""
        own = self._share.own
        super().set_state({name: v[own] if name in self._stacked else v for name, v in tensors.items()}, rest)
