"""Which members of an ensemble a ``fit`` trains, in which groups and on which ranks."""

import dataclasses
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pyro import poutine
from torch import Tensor

from pyro_dropout.errors import DivergedError, PyroDropoutError
from pyro_dropout.generative.inputs import takes_all
from pyro_dropout.generative.model_call import ModelCall
from pyro_dropout.guides.ensemble import Ensemble
from pyro_dropout.protocols import Record
from pyro_dropout.training.checkpoints.training_checkpoint import Checkpoint, last_facts
from pyro_dropout.training.distributed.data_parallel import start_alike
from pyro_dropout.training.distributed.process_group import ALONE, Group, Share
from pyro_dropout.training.ensemble.anchoring import perturbation, temperature_of
from pyro_dropout.training.ensemble.member_loss import ROWS, EnsembleLoss
from pyro_dropout.training.ensemble.members import Members
from pyro_dropout.training.history import History
from pyro_dropout.training.loss.elbo import ELBO
from pyro_dropout.training.loss.learned_widths import learned_sites
from pyro_dropout.training.optimisers import Update


class EnsembleTraining:
    """The members that a ``fit`` trains: those that ``more`` has added, or else all, in one group or in several.

    Args:
        ensemble: the ensemble.
        call: the model with all data.
        batch: points in a mini-batch.
        loss: the loss of a member; None for the default.
        clip_norm: the largest norm of a member's gradient.
        checkpoint: where the training may have been interrupted; it says what the members' seeds are.
        group: the ranks that train them; None for one process.
        seed: of the order of the data; None to draw one.
        steps: how many steps a group takes.
    """

    def __init__(
        self,
        ensemble: Ensemble,
        call: ModelCall,
        batch: int,
        loss: Any = None,
        clip_norm: float | None = None,
        checkpoint: str | Path | Checkpoint | None = None,
        group: Group | None = None,
        seed: int | None = None,
        steps: int = 1,
    ) -> None:
        ensemble.meet(call)
        with poutine.block():
            ensemble.tell()  # before a part of it can take its name in Pyro's store
        self.ensemble, self._batch, self._clip_norm, self._steps = ensemble, batch, clip_norm, steps
        self._ranks = ALONE if group is None else group
        if group is not None:
            start_alike(group, (call.model, ensemble, ensemble.template))
        self.rows = ensemble.to_train()
        self._count = self.rows.stop - self.rows.start
        most = (ensemble.group or self._count) * self._ranks.world
        self.turns = -(-self._count // most)
        self._folders = self._folders_of(checkpoint)
        _, self._found = self._ranks.from_first(lambda: ({}, [last_facts(folder) for folder in self._look()]))
        known: Record = self._found[0][0] if self._found else {}
        seeds = known.get("members")
        if isinstance(seeds, list) and len(seeds) == self._count:
            ensemble.seeds[self.rows] = torch.tensor(seeds).to(ensemble.seeds)
        self._base: int | None = None
        self._at_once: int | None = None  # that the last group has found to fit into memory
        if self.turns > 1 or group is not None:
            drawn = self._ranks.one_seed(seed)
            self._base = drawn if seed is not None else known.get("order", drawn)
        points = ELBO(per_example=False if ensemble.points or takes_all(call.model) else "auto")
        self._loss, self._call = points if loss is None else loss, call

    def facts(self) -> Record:
        """Return what must be the same when the training is resumed."""
        seeds = self.ensemble.seeds[self.rows].tolist()
        return {"members": seeds, "anchored": self.ensemble.anchored, "order": self._base}

    def members(self, turn: int = 0) -> Members:
        """Return one of the groups, as it is when those before it have been trained."""
        place = Group(turn, self.turns).share(self._count)  # groups differ by one member at most
        share = Share(place.stop - place.start, self._ranks)
        start, call, batch = self.rows.start + place.start, self._call, self._batch
        whole = part = rest = self.ensemble
        if share.members < whole.rows or self._ranks.world > 1:
            part = whole.part(slice(start + share.own.start, start + share.own.stop))
            rest = whole.part(slice(start, self.rows.stop), copied=False)
        heat = temperature_of(self._loss, part.template, call, batch) if part.anchored else 1.0
        problem = perturbation(part.template, part.seeds.tolist(), call, batch, heat) if part.anchored else None
        count = call.count or 1
        if part.anchored and batch < count:
            device = next(leaf for leaf in call.leaves() if leaf.dim()).device
            call = dataclasses.replace(call, kwargs={**call.kwargs, ROWS: torch.arange(count, device=device)})
        return Members(
            guide=part,
            loss=EnsembleLoss(self._loss, problem, self._clip_norm, self._at_once, share, heat),
            call=call,
            whole=whole,
            rows=slice(start, start + share.members),
            share=share,
            rest=rest,
            turn=turn,
            turns=self.turns,
            base=self._base,
            checkpoint=self._folders[turn] if self._folders else None,
            finished=bool(self._found) and self._found[turn][1] >= self._steps,
        )

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def _folders_of(self, checkpoint: str | Path | Checkpoint | None) -> list[Checkpoint]:
        """Return where each group writes its checkpoints: in one folder, or several in it."""
        if checkpoint is None:
            return []
        how = checkpoint if isinstance(checkpoint, Checkpoint) else Checkpoint(checkpoint)
        if self.turns == 1:
            return [how]
        root = Path(how.folder)
        return [dataclasses.replace(how, folder=root / f"group-{turn:03d}") for turn in range(self.turns)]

    def _look(self) -> list[Path]:
        """Return the folders of the groups; raise if they are from other groups."""
        folders = [Path(how.folder) for how in self._folders]
        for root in {folder if self.turns == 1 else folder.parent for folder in folders}:
            if any(root.glob("group-*" if self.turns == 1 else "step-*.safetensors")):
                raise PyroDropoutError(
                    f"{str(root)!r} holds checkpoints of an ensemble that was trained in other groups. Give the same"
                    " group=... to resume, or another folder to start over."
                )
        return folders

    # --- training -----------------------------------------------------------------------------------------------------

    def train(self, train: Callable[[Members], History]) -> History:
        """Train all groups, and put what they learn into the ensemble, even if they are interrupted."""
        histories = []
        for turn in range(self.turns):
            members = self.members(turn)
            try:
                history = train(members)
            except BaseException as stop:
                # Only if all ranks are here for the same reason can they exchange what their members have learned; a
                # cause is an error of torch on this rank, maybe alone.
                together = self._ranks.world == 1 or (isinstance(stop, DivergedError) and stop.__cause__ is None)
                members.finish(together=together)
                if isinstance(stop, DivergedError | KeyboardInterrupt | SystemExit):
                    stop.add_note(self._note(members.rows, together))
                raise
            members.finish(history.losses[(history.best_step or history.steps) - 1])
            histories.append(history)
            self._at_once = members.loss.at_once
            del members  # before the next are made
        self.ensemble.trained.fill_(self.ensemble.rows)
        self._warn_of_lost()
        return _joined(histories)

    def _note(self, rows: slice, together: bool) -> str:
        """Say what the ensemble holds after an interruption of the training of some rows."""
        parts = [
            (self.rows.start, rows.start, "to the end"),
            (rows.start, rows.stop, "so far"),
            (rows.stop, self.rows.stop, "not yet"),
        ]
        told = ", ".join(f"{_named(start, stop)} {how}" for start, stop, how in parts if start < stop)
        own = "" if together else " In each process this is true of its own members only."
        return f"The ensemble holds what was learned: {told}.{own} The next fit trains all of these."

    def _warn_of_lost(self) -> None:
        lost = (self.ensemble.lost[self.rows].nonzero().flatten() + self.rows.start).tolist()
        if lost:
            names = ", ".join(map(str, lost[:8])) + (", ..." if len(lost) > 8 else "")
            warnings.warn(
                f"{len(lost)} of {self._count} members reached a loss that is not finite and are left out from here on"
                f" ({names}); see history.diverged. Lower the learning rate, or clip gradients (clip_norm=...), and"
                f" replace them with more({len(lost)}).",
                stacklevel=5,
            )


def check_members(
    ensemble: Ensemble, update: Update, clip_norm: float | None, distributed: bool
) -> tuple[Update, float | None]:
    """Return the optimiser and the largest norm of a member's gradient; raise an error if members cannot have them."""
    learned = learned_sites(ensemble.template.model)
    if learned:
        raise PyroDropoutError(
            f"the members of an Ensemble share one prior, so its widths cannot be learned ({learned[0]!r}): each member"
            " would have its own. Leave out Prior(learn=...), or train the members as a Fleet."
        )
    if update.beside:
        if isinstance(update.optimiser, torch.optim.Adafactor):
            raise PyroDropoutError(
                "optim must change each number by itself, so that members do not depend on each other; got Adafactor."
                " Use 'adam'."
            )
        rows = ensemble.to_train()
        if distributed or min(ensemble.group or ensemble.rows, rows.stop - rows.start) < ensemble.rows:
            raise PyroDropoutError(
                f"{type(update.optimiser).__name__} holds the parameters of all members, but only some are trained at a"
                " time (after more, with group=..., or with distributed=True); use 'adam', 'adamw', 'sgd' or an Update."
            )
        return update, clip_norm
    if update.clip_norm is not None:
        if update.clip_each:
            raise PyroDropoutError("clip_each is not for an ensemble: clip_norm limits each member's whole gradient.")
        return dataclasses.replace(update, clip_norm=None), update.clip_norm
    return update, clip_norm


def _named(start: int, stop: int) -> str:
    return f"member {start}" if stop - start == 1 else f"members {start} to {stop - 1}"


def _joined(histories: list[History]) -> History:
    """Return the history of all groups as one."""
    first = histories[0]
    losses = torch.cat([history.losses for history in histories], 1)
    return dataclasses.replace(
        first,
        losses=_mean(losses),
        member_losses=losses,
        seconds=sum(history.seconds for history in histories),
        compile_seconds=sum(history.compile_seconds for history in histories),
        traced=histories[-1].traced,
        engine=histories[-1].engine,
        why=histories[-1].why,
        compiled=histories[-1].compiled,  # a group that was finished before is not compiled again
    )


def _mean(losses: Tensor) -> Tensor:
    return torch.where(losses.isfinite(), losses, torch.nan).nanmean(1)
