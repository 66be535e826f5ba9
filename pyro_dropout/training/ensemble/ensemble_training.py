"""Members of an ensemble that are trained together: their training run, and what becomes of what they learn."""

import dataclasses
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from pyro import poutine
from torch import Tensor

from pyro_dropout.errors import DivergedError, PyroDropoutError
from pyro_dropout.generative.inputs import takes_all
from pyro_dropout.generative.model_call import ModelCall
from pyro_dropout.generative.registration import forget
from pyro_dropout.guides.ensemble import Ensemble
from pyro_dropout.protocols import Record
from pyro_dropout.training.checkpoints.fingerprint import told_loss
from pyro_dropout.training.checkpoints.training_checkpoint import Checkpoint, last_facts
from pyro_dropout.training.compile.functional import Buffers, Gradients, Parameters
from pyro_dropout.training.early_stopping import EnsembleWatch
from pyro_dropout.training.ensemble.anchoring import perturbation, temperature_of
from pyro_dropout.training.ensemble.member_loss import ROWS, EnsembleLoss
from pyro_dropout.training.history import History
from pyro_dropout.training.loss.elbo import ELBO
from pyro_dropout.training.loss.learned_widths import learned_sites
from pyro_dropout.training.optimisers import Update
from pyro_dropout.training.training_task import TrainingTask


@dataclass
class Members(TrainingTask):
    """The members that a ``fit`` trains: those that ``more`` has added, or else all.

    Attributes:
        guide: these members; the ensemble itself if they are all of it.
        whole: the ensemble.
        rows: where they are in it.
    """

    guide: Ensemble
    loss: EnsembleLoss
    whole: Ensemble = field(kw_only=True)
    rows: slice = field(kw_only=True)

    watched_by = EnsembleWatch
    less = "a smaller batch_size, fewer members (Ensemble(members=...), and then more)"
    guarded = False  # a member that diverges stops no other

    def facts(self) -> Record:
        """Return what must be the same when the training is resumed."""
        return super().facts() | {
            "loss": told_loss(self.loss.inner, None if self.whole.anchored else self.call.model),
            "clip_norm": self.loss.clip_norm,
            "members": self.guide.seeds.tolist(),
            "anchored": self.whole.anchored,
        }

    # --- the training run ---------------------------------------------------------------------------------------------

    def _gradients(self, parameters: Parameters) -> Gradients:
        model, guide, loss = self.call.model, self.guide, self.loss
        places = Buffers(model, guide)

        def gradients_of(values: list[Tensor], buffers: list[Tensor], *index: Tensor) -> tuple[Tensor, list[Tensor]]:
            with places.replaced(buffers):
                return loss.gradients(model, guide, parameters, values, self._arguments(*index))

        return gradients_of

    # --- afterwards ---------------------------------------------------------------------------------------------------

    @contextmanager
    def kept(self) -> Iterator[None]:
        """On leaving the context, also by an interruption, put what was learned into the ensemble."""
        try:
            yield
        except BaseException as stop:
            self.finish()
            if isinstance(stop, DivergedError | KeyboardInterrupt | SystemExit):
                start, end = self.rows.start, self.rows.stop - 1
                named = f"member {start}" if start == end else f"members {start} to {end}"
                stop.add_note(f"The ensemble holds what was learned: {named} so far. The next fit trains all of these.")
            raise

    def finish(self, losses: Tensor | None = None) -> None:
        """Put what was learned into the ensemble, and note which members have diverged.

        ``losses`` are the members' at the parameters that were kept; None if training was interrupted.
        """
        if self.guide is not self.whole:
            forget(self.guide.parameters())
            with torch.no_grad():
                for name, value in self.guide.stacked().items():
                    self.whole.stacked()[name][self.rows] = value.detach()
        good = self.whole.part(self.rows, copied=False).finite()
        if losses is not None:
            good &= losses.isfinite().to(good)
        self.whole.lost[self.rows] = ~good


def train_ensemble(
    ensemble: Ensemble,
    call: ModelCall,
    batch: int,
    train: Callable[[Members], History],
    *,
    loss: Any = None,
    clip_norm: float | None = None,
    checkpoint: Checkpoint | None = None,
) -> History:
    """Train the members that ``more`` has added, or else all, and put what they learn into the ensemble.

    ``batch`` counts points in a mini-batch. The members' seeds are those of a ``checkpoint``, if there is one.
    """
    members = enlisted(ensemble, call, batch, loss=loss, clip_norm=clip_norm, checkpoint=checkpoint)
    with members.kept():
        history = train(members)
    members.finish(history.losses[(history.best_step or history.steps) - 1])
    ensemble.trained.fill_(ensemble.rows)
    lost = (ensemble.lost[members.rows].nonzero().flatten() + members.rows.start).tolist()
    if lost:
        names = ", ".join(map(str, lost[:8])) + ", ..." * (len(lost) > 8)
        warnings.warn(
            f"{len(lost)} of {members.guide.rows} members reached a loss that is not finite and are left out from here"
            f" on ({names}); see history.diverged. Lower the learning rate, or clip gradients (clip_norm=...), and"
            f" replace them with more({len(lost)}).",
            stacklevel=5,
        )
    each = history.losses
    mean = torch.where(each.isfinite(), each, torch.nan).nanmean(1)
    return dataclasses.replace(history, losses=mean, member_losses=each)


def enlisted(
    ensemble: Ensemble,
    call: ModelCall,
    batch: int,
    *,
    loss: Any = None,
    clip_norm: float | None = None,
    checkpoint: Checkpoint | None = None,
) -> Members:
    """Return the members that a training is for, with their anchors and their perturbed data."""
    ensemble.meet(call)
    with poutine.block():
        ensemble.tell()  # before a part of it can take its name in Pyro's store
    rows = ensemble.to_train()
    seeds = None if checkpoint is None else last_facts(checkpoint).get("members")
    if isinstance(seeds, list) and len(seeds) == rows.stop - rows.start:
        ensemble.seeds[rows] = torch.tensor(seeds).to(ensemble.seeds)
    if loss is None:
        loss = ELBO(per_example=False if ensemble.points or takes_all(call.model) else "auto")
    part = ensemble if rows.stop - rows.start == ensemble.rows else ensemble.part(rows)
    problem, heat = None, 1.0
    if part.anchored:
        heat = temperature_of(loss, part.template, call, batch)
        problem = perturbation(part.template, part.seeds.tolist(), call, batch, heat)
        count = call.count or 1
        if batch < count:
            device = next(leaf for leaf in call.leaves() if leaf.dim()).device
            call = dataclasses.replace(call, kwargs={**call.kwargs, ROWS: torch.arange(count, device=device)})
    made = EnsembleLoss(loss, problem, clip_norm, heat=heat)
    return Members(guide=part, loss=made, call=call, whole=ensemble, rows=rows)


def check_members(ensemble: Ensemble, update: Update, clip_norm: float | None) -> tuple[Update, float | None]:
    """Return the optimiser and the largest norm of a member's gradient; raise an error if members cannot have them."""
    learned = learned_sites(ensemble.template.model)
    if learned:
        raise PyroDropoutError(
            f"the members of an Ensemble share one prior, so its widths cannot be learned ({learned[0]!r}): each member"
            " would have its own. Leave out Prior(learn=...), or train the members as a Fleet."
        )
    if update.optimiser is not None:
        if isinstance(update.optimiser, torch.optim.Adafactor):
            raise PyroDropoutError(
                "optim must change each number by itself, so that members do not depend on each other; got Adafactor."
                " Use 'adam'."
            )
        if ensemble.to_train().start:
            raise PyroDropoutError(
                f"{update.name} holds the parameters of all members, but only those that more() has"
                " added are trained; use 'adam', 'adamw', 'sgd' or an Update."
            )
        return update, clip_norm
    if update.clip_norm is not None:
        return dataclasses.replace(update, clip_norm=None), update.clip_norm
    return update, clip_norm
