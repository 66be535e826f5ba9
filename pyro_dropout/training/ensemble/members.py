"""Members that are trained together: their training run, and what becomes of what they learn."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyro_dropout.engines.choose import HowCompiled
from pyro_dropout.engines.engine import Step
from pyro_dropout.errors import PyroDropoutError
from pyro_dropout.generative.model_call import ModelCall
from pyro_dropout.generative.registration import forget
from pyro_dropout.generative.trial_run import quietly
from pyro_dropout.guides.ensemble import Ensemble
from pyro_dropout.protocols import Record
from pyro_dropout.training.batches import Source
from pyro_dropout.training.checkpoints.fingerprint import told_loss
from pyro_dropout.training.checkpoints.training_checkpoint import Checkpoint
from pyro_dropout.training.compile.functional import Buffers, Parameters, make_step
from pyro_dropout.training.distributed.process_group import Group, Share
from pyro_dropout.training.early_stopping import EnsembleWatch
from pyro_dropout.training.ensemble.member_loss import ROWS, EnsembleLoss
from pyro_dropout.training.make_run import make_run, own_step
from pyro_dropout.training.optimisers import Update
from pyro_dropout.training.out_of_memory import LESS
from pyro_dropout.training.runner import TrainingRun
from pyro_dropout.training.torch_optimisers import for_parameters
from pyro_dropout.training.training_task import TrainingTask


@dataclass
class Members(TrainingTask):
    """Members of an ensemble that are trained together, on one rank or on several.

    Attributes:
        guide: the members of this rank; the ensemble itself if they are all of it.
        whole: the ensemble.
        rows: where the members of all ranks are in it.
        share: which of them are this rank's.
        rest: those and the members whose turn is later, which a checkpoint holds too.
        turn: how many groups were trained before.
        turns: how many groups there are.
        base: the seed of the order of the data; None to draw it from torch's generator.
        checkpoint: where checkpoints are written.
        finished: whether the last of them is from the end of the training.
    """

    guide: Ensemble
    loss: EnsembleLoss
    whole: Ensemble
    rows: slice
    share: Share
    rest: Ensemble
    turn: int = 0
    turns: int = 1
    base: int | None = None
    checkpoint: str | Path | Checkpoint | None = None
    finished: bool = False
    _by_member: list[bool] = field(default_factory=list)  # for each parameter, whether every member has its own

    @property
    def less(self) -> str:
        """What to do if not even a step of a single point fits into memory."""
        return f"fewer members at a time (Ensemble(group=...)), {LESS}"

    @property
    def kept(self) -> Ensemble:
        """The members that are written to checkpoints."""
        return self.rest

    def facts(self) -> Record:
        """Return what must be the same when the training is resumed."""
        return super().facts() | {
            "loss": told_loss(self.loss.inner, None if self.whole.anchored else self.call.model),
            "clip_norm": self.loss.clip_norm,
        }

    # --- the training run ---------------------------------------------------------------------------------------------

    def start(
        self,
        update: Update,
        batch: int,
        compile: HowCompiled,
        seed: int | None = None,
        group: Group | None = None,
    ) -> TrainingRun:
        """Return the training run of this rank's members, ready to start."""
        ranks, rows = self.share.group, self.guide.rows
        parameters = self.loss.within_memory(lambda: self._parameters(batch), rows)
        own = {id(value) for value in self.guide.stacked().values()}
        self._by_member = [id(value) in own for value in parameters.by_name.values()]
        shared = [name for name, each in zip(parameters.names, self._by_member, strict=True) if not each]
        self._check_shared(shared, compile)
        lacking = [name for name in shared if for_parameters(update, [parameters.by_name[name]]) is not update]
        if lacking:
            raise PyroDropoutError(
                f"members share the trained parameter {lacking[0]!r}, which this {type(update.optimiser).__name__} does"
                " not hold. Make it with [*guide.parameters(), *model.parameters()], or use 'adam'."
            )
        if self.finished or (shared and ranks.world > 1):
            compile = False  # no step is left, or gradients are exchanged at every step
        if ranks.world > 1:
            ranks.copy_from_first([parameters.by_name[name] for name in shared])
        if self.base is not None:  # all ranks and all groups see the data in the same order
            torch.manual_seed(self.base)
        batches = self._batches(batch)
        run = self.loss.within_memory(lambda: self._made(parameters, update, batches, compile), rows)
        if ranks.any(not run.compiled)[0] and isinstance(run, MembersRun):
            run.run_eagerly()
        if self.base is not None:  # and each draws its own masks
            torch.manual_seed(ranks.seed(self.base, self.turn))
        return run

    def _made(
        self,
        parameters: Parameters,
        update: Update,
        batches: Source | None,
        compile: HowCompiled,
    ) -> TrainingRun:
        model, guide, loss = self.call.model, self.guide, self.loss
        places = Buffers(model, guide)

        def gradients_of(values: list[Tensor], buffers: list[Tensor], *index: Tensor) -> tuple[Tensor, list[Tensor]]:
            with places.replaced(buffers):
                return loss.gradients(model, guide, parameters, values, self._arguments(*index))

        with quietly(model, guide):
            if update.beside:
                inputs = (places.values,)
                return make_run(gradients_of, parameters, update, inputs=inputs, batches=batches, compile=compile)
            whole = make_step(gradients_of, parameters, update)
            step = own_step(whole, parameters.values, update, inputs=(places.values,), batches=batches)
            how: Any = {"write": parameters.write, "batches": batches, "compile": compile}
            return MembersRun(loss, self.share, self._by_member, step, **how)

    def _check_shared(self, shared: list[str], compile: HowCompiled) -> None:
        """Raise an error if members share a parameter that cannot be trained in this way."""
        if shared and self.turns > 1:
            raise PyroDropoutError(
                f"members share the trained parameter {shared[0]!r}, which groups that are trained one after another"
                " cannot: each would leave it to the next. Train all members at once (group=None), or fix it."
            )
        if shared and self.share.group.world > 1 and compile is True:
            raise PyroDropoutError(
                f"compile=True and distributed=True cannot be combined here: members share {shared[0]!r}, whose"
                " gradients the processes exchange at every step. Leave compile at 'auto'."
            )

    def watch(
        self, call: ModelCall, run: TrainingRun, patience: int, every: int, seed: int | None, group: Group
    ) -> EnsembleWatch:
        """Return what stops the training early, by the held-out data of ``call``; groups cannot stop together."""
        if self.turns > 1:
            raise PyroDropoutError(
                f"validation stops all members together, but they are trained in {self.turns} groups, one after"
                " another. Leave out validation, or train them at once (group=None)."
            )
        made = EnsembleWatch(call, self.guide, run, patience, every, seed, group)
        made.share, made.by_member = self.share, self._by_member
        return made

    def _some(self, points: int) -> ModelCall:
        """Return the call with the first points; members' data are perturbed by row."""
        found = super()._some(points)
        if not self.guide.anchored:
            return found
        rows = torch.arange(points, device=next(found.leaves()).device) % (self.call.count or 1)
        return replace(found, kwargs={**found.kwargs, ROWS: rows})

    def over_ranks(self, losses: Tensor, group: Group) -> Tensor:
        """Return the losses of some steps and all ranks' members, (steps, members)."""
        return losses if group.world == 1 else self.share.whole(losses.T.contiguous()).T

    # --- afterwards ---------------------------------------------------------------------------------------------------

    def finish(self, losses: Tensor | None = None, together: bool = True) -> None:
        """Put what was learned into the ensemble, and note which members have diverged.

        Args:
            losses: the members' losses at the parameters that were kept; None if training was interrupted.
            together: whether all ranks do this; otherwise only what this rank's members have learned is known.
        """
        rows = self.rows
        if self.guide is not self.whole:
            forget(self.guide.parameters())
            if not together:
                own = self.share.own
                rows = slice(rows.start + own.start, rows.start + own.stop)
            if together or not self.share.idle:
                with torch.no_grad():
                    for name, value in self.guide.stacked().items():
                        learned = self.share.whole(value.detach()) if together else value
                        self.whole.stacked()[name][rows] = learned
        good = self.whole.part(rows, copied=False).finite()
        if losses is not None:
            good &= losses.isfinite().to(good)
        self.whole.lost[rows] = ~good


# --- the run ----------------------------------------------------------------------------------------------------------


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
