"""The training run of some members: their share of the state of all ranks, and a smaller step if memory runs out."""

from typing import Any

import torch
from torch import Tensor

from pyro_dropout.engines.choose import HowCompiled
from pyro_dropout.engines.engine import Step
from pyro_dropout.protocols import Record
from pyro_dropout.training.ensemble.member_loss import EnsembleLoss
from pyro_dropout.training.ensemble.share import Share
from pyro_dropout.training.runner import TrainingRun


class MembersRun(TrainingRun):
    """A training run of this rank's members, whose state is that of all ranks' members.

    Args:
        loss: the loss, which knows how many members are computed at once.
        share: which of all members these are.
        by_member: for each of the parameters, whether every member has its own.
        step: as in ``TrainingRun``, whose other arguments follow.
        compile: "auto", "traced", "plain", True or False.
        options: the others.
    """

    def __init__(
        self,
        loss: EnsembleLoss,
        share: Share,
        by_member: list[bool],
        step: Step,
        *,
        compile: HowCompiled,
        **options: Any,
    ) -> None:
        self._loss, self._share, self._compile = loss, share, compile
        slots = [each for each, own in zip(by_member, step.state, strict=True) for _ in own]
        self._stacked = {f"leaf.{k:05d}" for k, each in enumerate([*by_member, *slots]) if each}
        self._members = share.own.stop - share.own.start
        # Where memory runs out, half as many members may fit.
        super().__init__(step, compile=compile, fatal=(torch.OutOfMemoryError,), **options)

    def advance(self, steps: int) -> Tensor:
        """Take ``steps`` steps, or fewer but at least one; return the losses before each, (steps, members)."""
        if not self.compiled or self._loop.at_once(steps):  # the loss itself gives way, or all memory is taken already
            return super().advance(steps)
        before = {name: value.clone() for name, value in super().state()[0].items()}
        at_once = self._loss.at_once

        def attempt() -> Tensor:
            if self._loss.at_once != at_once:
                self._step.__dict__.pop("recorded", None)
                TrainingRun.set_state(self, before, {})
                self.choose(self._compile)
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
