"""What ``fit`` does differently for an ensemble: its loss, its seeds after an interruption, and early stopping."""

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from pyro_dropout.generative.likelihoods import likelihood_of
from pyro_dropout.generative.model_call import ModelCall
from pyro_dropout.guides.ensemble import Ensemble
from pyro_dropout.training.checkpoints.training_checkpoint import Checkpoint, last_facts
from pyro_dropout.training.early_stopping import Watch
from pyro_dropout.training.ensemble.anchoring import perturbation
from pyro_dropout.training.ensemble.member_loss import ROWS, EnsembleLoss
from pyro_dropout.training.loss.elbo import ELBO

_AT_ONCE = 2**24  # outputs that early stopping computes at once


@dataclass
class Members:
    """The members that a training is for.

    Attributes:
        whole: the ensemble.
        part: the members that are trained: those that were added last, or else all.
        loss: their loss.
        call: the model call, which says which of all data a mini-batch holds.
    """

    whole: Ensemble
    part: Ensemble
    loss: EnsembleLoss
    call: ModelCall

    def finish(self) -> None:
        """Put what was learned into the ensemble."""
        self.whole.take_back(self.part)

    def facts(self) -> dict[str, object]:
        """Return what must be the same when the training is resumed."""
        return {"members": self.part.seeds.tolist(), "anchored": self.part.anchored}


def enlist(
    ensemble: Ensemble,
    call: ModelCall,
    batch: int,
    loss: object,
    clip_norm: float | None,
    checkpoint: str | Path | Checkpoint | None,
) -> Members:
    """Return the members to train, with their loss.

    Args:
        ensemble: the ensemble.
        call: the model with all data.
        batch: points in a mini-batch.
        loss: the loss of a member; None for the default.
        clip_norm: the largest norm of a member's gradient.
        checkpoint: where the training may have been interrupted; its members' seeds are used again.
    """
    ensemble.meet(call)
    part = ensemble.to_train()
    seeds = (last_facts(checkpoint) or {}).get("members") if checkpoint is not None else None
    if isinstance(seeds, list) and len(seeds) == part.members:
        part.seeds.copy_(torch.tensor(seeds))
        ensemble.seeds[-len(seeds) :] = part.seeds
    inner = (ELBO(per_example=False) if part.points else ELBO(per_example="auto")) if loss is None else loss
    problem = perturbation(part.template, part.seeds.tolist(), call, batch) if part.anchored else None
    count = call.count or 1
    if part.anchored and batch < count:
        device = next(leaf for leaf in call.leaves() if leaf.dim()).device
        call = replace(call, kwargs={**call.kwargs, ROWS: torch.arange(count, device=device)})
    return Members(ensemble, part, EnsembleLoss(inner, problem, clip_norm), call)


class EnsembleWatch(Watch):
    """Early stopping by the log density of held-out targets under the mixture of all members."""

    def _of_network(self) -> Tensor:
        """Return minus the log density of the targets under the mixture, and their number, (2,)."""
        assert isinstance(self.guide, Ensemble)
        ensemble, model = self.guide, self.call.model
        likelihood, (inputs, targets) = likelihood_of(model), self.call.args
        weights = ensemble.draws_at(torch.arange(ensemble.members))
        rows = max(1, _AT_ONCE // (ensemble.members * 64))
        total = torch.zeros((), dtype=torch.float64, device=inputs.device)
        for x, y in zip(inputs.split(rows), targets.split(rows), strict=True):
            f = model.evaluate(weights, x).reshape(ensemble.members, len(x), -1)
            checked = likelihood.checked(f, y)
            each = likelihood.distribution(f).log_prob(checked)
            total -= (torch.logsumexp(each.double(), 0) - math.log(ensemble.members)).sum()
        return torch.stack([total, total.new_tensor(len(inputs))])
