"""The training of an ensemble: one member's loss and gradients as a graph, mapped over all members."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from pyro import poutine
from torch import Tensor

from pyro_dropout.errors import PyroDropoutError, UnfinishedTrainingWarning, warn_caller
from pyro_dropout.generative.inputs import takes_all
from pyro_dropout.generative.model_call import ModelCall, is_network
from pyro_dropout.generative.registration import forget
from pyro_dropout.guides.ensemble import Ensemble
from pyro_dropout.protocols import PyroModel, Record, Tree
from pyro_dropout.training.checkpoints.fingerprint import told_loss
from pyro_dropout.training.checkpoints.training_checkpoint import Checkpoint, last_facts
from pyro_dropout.training.compile.functional import (
    Arguments,
    Buffers,
    Gradients,
    Parameters,
    make_gradients,
    numbered,
)
from pyro_dropout.training.ensemble.anchoring import Anchoring, Problem, perturbation, temperature_of
from pyro_dropout.training.fleet.replicas import over_replicas
from pyro_dropout.training.history import History
from pyro_dropout.training.loss.elbo import ELBO
from pyro_dropout.training.loss.learned_widths import learned_sites
from pyro_dropout.training.loss.temperature import current_step
from pyro_dropout.training.optimisers import Update
from pyro_dropout.training.training_run import TrainingTask

_APART = 10.0  # nats: e^-10 of the weight of the best
# Keywords of a model's call that its loss takes: which of all data a mini-batch holds, and which problem is meant.
ROWS, PROBLEM = "rows_of_the_batch", "problem_of_the_member"


@dataclass
class MemberLoss:
    """The loss of a member's guide in its own problem: ``problem`` unless a call names one; None without anchors."""

    inner: Any
    problem: Problem | None
    heat: float  # T of anchored points

    def differentiable_loss(self, model: PyroModel, guide: PyroModel, *args: Tree, **kwargs: Tree) -> Tensor:
        """Return the loss; of an ensemble, that of its template, with the parameters of all members told to Pyro."""
        if isinstance(guide, Ensemble):
            guide.tell()
            guide = guide.template
        rows, problem = kwargs.pop(ROWS, None), kwargs.pop(PROBLEM, self.problem)
        if problem:
            model = Anchoring(**problem, rows=rows, heat=self.heat)(model)
        found: Tensor = self.inner.differentiable_loss(model, guide, *args, **kwargs)
        return found


@dataclass
class Members(TrainingTask):
    """All members of an ensemble, trained together.

    Parameters of a member have the gradient of its own loss; what members share has the mean gradient of those whose
    loss is finite, so that one that diverges does not harm the others.

    Attributes:
        problem: the anchors and perturbed data of all members; None without anchors.
        clip_norm: the largest norm of a member's gradient.
    """

    guide: Ensemble
    loss: MemberLoss  # of the first member
    problem: Problem | None = None
    clip_norm: float | None = None

    less = "a smaller batch_size, or fewer members"
    guarded = False  # a member that diverges stops no other

    def facts(self) -> Record:
        """Return what must be the same when the training is resumed."""
        return super().facts() | {
            "loss": told_loss(self.loss.inner, None if self.guide.anchored else self.call.model),
            "clip_norm": self.clip_norm,
            "members": self.guide.seeds.tolist(),
            "anchored": self.guide.anchored,
        }

    def _gradients(self, parameters: Parameters, call: ModelCall) -> Gradients:
        """Return the losses and gradients of all members, traced for the first, as a function of all parameters."""
        model, ensemble, template = call.model, self.guide, self.guide.template
        template.is_member = False  # so that it registers its parameters, by which they are found
        try:
            solo = Parameters(model, template, self.loss, call.args, call.kwargs)
        finally:
            template.is_member = True
        forget(template.parameters())  # it is the ensemble's that are trained
        rows, own = _named(ensemble.stacked()), _named(dict(template.named_parameters()))
        names = [rows.get(id(value), name) for name, value in parameters.by_name.items()]
        owned = [own.get(id(value), name) for name, value in solo.by_name.items()]
        settings, buffers = {f"guide.{name}" for name in ensemble.settings()}, Buffers(model, template)
        held = [name.replace("|", ".") for name in Buffers(model, ensemble).names]

        def of_member(problem: Problem, args: tuple[Tree, ...], kwargs: dict[str, Tree]) -> Arguments:
            return args, {**kwargs, PROBLEM: problem}

        of_one, values = numbered(make_gradients(model, template, self.loss, solo, of_member)), solo.values
        example = (values, _step(values), buffers.values, self.loss.problem or {}, call.args, call.kwargs)
        by_member = [0 if name in own.values() else None for name in owned]
        by_setting = [0 if name in settings else None for name in buffers.names]
        dims = by_member, None, by_setting, 0, None, None
        together: Any = over_replicas(of_one, example, dims, (model, template))
        parameters.unused = {names.index(owned[k]) for k in solo.unused}

        def of_all(values: list[Tensor], now: list[Tensor], *index: Tensor) -> tuple[Tensor, list[Tensor]]:
            given, set_to = dict(zip(names, values, strict=True)), dict(zip(held, now, strict=True))
            inputs = [given[name].detach() for name in owned]
            fixed = [set_to.get(name, value) for name, value in zip(buffers.names, buffers.values, strict=True)]
            with torch.no_grad():
                losses, slopes = together(inputs, _step(inputs), fixed, self.problem or {}, *self._arguments(*index))
                slopes = _averaged(losses, self._clipped(slopes), [dim is None for dim in by_member])
            found = dict(zip(owned, slopes, strict=True))
            return losses, [found[name] for name in names]

        return of_all

    def _clipped(self, slopes: list[Tensor]) -> list[Tensor]:
        """Return gradients, (members, ...), each member's with a norm of ``clip_norm`` at most."""
        if self.clip_norm is None:
            return slopes
        norms = torch.stack([slope.reshape(len(slope), -1).square().sum(1) for slope in slopes]).sum(0).sqrt()
        shrink = (self.clip_norm / (norms + 1e-6)).clamp(max=1.0)
        return [slope * _beside(shrink, slope) for slope in slopes]


def _named(tensors: Mapping[str, Tensor]) -> dict[int, str]:
    return {id(value): name for name, value in tensors.items()}


def _step(values: list[Tensor]) -> Tensor:
    """Return the number of the step that is being taken."""
    t = current_step()
    return values[0].new_ones(()) if t is None else t


def _averaged(losses: Tensor, slopes: list[Tensor], shared: list[bool]) -> list[Tensor]:
    """Average the gradients of what members share, over those members for which they and the loss are finite."""
    common = [slope for slope, is_shared in zip(slopes, shared, strict=True) if is_shared]
    if not common:
        return slopes
    finite = torch.stack([losses.isfinite(), *(s.reshape(len(s), -1).isfinite().all(1) for s in common)]).all(0)
    count = finite.sum().to(common[0]).clamp(min=1.0)
    means = iter([torch.where(_beside(finite, slope), slope, 0.0).sum(0) / count for slope in common])
    return [next(means) if is_shared else slope for slope, is_shared in zip(slopes, shared, strict=True)]


def _beside(each: Tensor, slope: Tensor) -> Tensor:
    """Return one number for each member, shaped as its gradient."""
    return each.reshape(-1, *[1] * (slope.dim() - 1))


def train_members(members: Members, train: Callable[[Members], History]) -> History:
    """Train all members of an ensemble, and note which have diverged; also after an interruption."""
    ensemble = members.guide
    try:
        history = train(members)
    except BaseException:
        ensemble.lost.copy_(~ensemble.finite())
        raise
    each = history.losses
    kept = each[(history.best_step or history.steps) - 1]  # the losses at the parameters that were kept
    ensemble.lost.copy_(~(ensemble.finite() & kept.isfinite().to(ensemble.lost.device)))
    lost = ensemble.lost.nonzero().flatten().tolist()
    if lost:
        names = ", ".join(map(str, lost[:8])) + ", ..." * (len(lost) > 8)
        warn_caller(
            f"{len(lost)} of {ensemble.rows} members reached a loss that is not finite and are left out from here"
            f" on ({names}); see history.diverged. Lower the learning rate, or clip gradients (clip_norm=...).",
        )
    if not is_network(members.call.model):
        _warn_if_apart(each[:, ~ensemble.lost.to(each.device)])
    mean = torch.where(each.isfinite(), each, torch.nan).nanmean(1)
    return dataclasses.replace(history, losses=mean, member_losses=each)


def _warn_if_apart(losses: Tensor) -> None:
    """Warn if some members, (steps, members), ended far above the best: the mixture gives each the same weight."""
    last = losses[-(len(losses) // 20 or 1) :].double()
    ends, noise = last.mean(0), last.std(0, correction=0) / math.sqrt(len(last))
    best = ends.argmin() if len(ends) else 0
    above = (ends > ends[best] + _APART + 5 * (noise + noise[best])).nonzero().flatten()
    if len(above):
        warn_caller(
            f"{len(above)} of {len(ends)} members ended with a loss more than {_APART:.0f} nats above the best"
            f" ({ends[best]:.6g}; the worst: {ends.max():.6g}), and the posterior gives each of them the same weight."
            " They have not arrived, or lie in a lesser mode. Raise steps or the learning rate, or let all start at one"
            " place: Ensemble(..., start='module').",
            UnfinishedTrainingWarning,
        )


def enlisted(
    ensemble: Ensemble,
    call: ModelCall,
    batch: int,
    *,
    loss: Any = None,
    clip_norm: float | None = None,
    checkpoint: Checkpoint | None = None,
) -> Members:
    """Return what trains the members, with their anchors and their perturbed data.

    ``batch`` counts points in a mini-batch. The members' seeds are those of a ``checkpoint``, if there is one.
    """
    ensemble.meet(call)
    with poutine.block():
        ensemble.tell()
    seeds = None if checkpoint is None else last_facts(checkpoint).get("members")
    if isinstance(seeds, list) and len(seeds) == ensemble.rows:
        ensemble.seeds.copy_(torch.tensor(seeds))
    if loss is None:
        loss = ELBO(per_example=False if ensemble.points or takes_all(call.model) else "auto")
    problem, first, heat = None, None, 1.0
    if ensemble.anchored:
        heat = temperature_of(loss, ensemble.template, call, batch)
        problem = perturbation(ensemble.template, ensemble.seeds.tolist(), call, batch, heat)
        first = {part: {name: value[0] for name, value in own.items()} for part, own in problem.items()}
        count = call.count or 1
        if batch < count:
            device = next(leaf for leaf in call.leaves() if leaf.dim()).device
            call = dataclasses.replace(call, kwargs={**call.kwargs, ROWS: torch.arange(count, device=device)})
    of_first = MemberLoss(loss, first, heat)
    return Members(ensemble, of_first, call, problem=problem, clip_norm=clip_norm)


def check_members(ensemble: Ensemble, update: Update, clip_norm: float | None) -> tuple[Update, float | None]:
    """Return the optimiser and the largest norm of a member's gradient; raise an error if members cannot have them."""
    learned = learned_sites(ensemble.template.model)
    if learned:
        raise PyroDropoutError(
            f"the members of an Ensemble share one prior, so its widths cannot be learned ({learned[0]!r}): each member"
            " would have its own. Leave out Prior(learn=...), or train the members as a Fleet."
        )
    if isinstance(update.optimiser, torch.optim.Adafactor):
        raise PyroDropoutError(
            "optim must change each number by itself, so that members do not depend on each other; got Adafactor."
            " Use 'adam'."
        )
    if update.optimiser is not None or update.clip_norm is None:
        return update, clip_norm
    return dataclasses.replace(update, clip_norm=None), update.clip_norm
