"""Early stopping of an ensemble: by the density of held-out data under the mixture of all members, of all ranks."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from pyro_dropout.generative.likelihoods import likelihood_of
from pyro_dropout.guides.ensemble import Ensemble
from pyro_dropout.protocols import Record
from pyro_dropout.training.early_stopping import Watch

_AT_ONCE = 2**24  # outputs that are computed at once
_DRAWS = 8  # the fewest, of members that are no points


class EnsembleWatch(Watch):
    """Early stopping by the log density of held-out targets under the mixture of all members.

    Attributes:
        guide: the members of this rank.
        all_members: how many all ranks train.
        idle: whether the members of this rank do not count.
        whole: makes parameters of all ranks' members from those of this rank's.
        own: the reverse.
    """

    guide: Ensemble
    all_members: int
    idle: bool
    whole: Callable[[list[Tensor]], list[Tensor]]
    own: Callable[[list[Tensor]], list[Tensor]]

    def _of_network(self) -> Tensor:
        """Return minus the log density of the targets under the mixture, and their number, (2,)."""
        model, (inputs, targets) = self.call.model, self.call.args
        likelihood, numbers = likelihood_of(model), self._numbers()
        weights = self.guide.draws_at(numbers) if len(numbers) else {}
        rows = max(1, _AT_ONCE // (max(1, len(numbers)) * 64))
        found = []
        for x, y in zip(inputs.split(rows), targets.split(rows), strict=True):
            if len(numbers):
                f = model.evaluate(weights, x).reshape(len(numbers), len(x), -1)
                found.append(likelihood.distribution(f).log_prob(likelihood.checked(f, y)))
        return self._mixture(torch.cat(found, 1) if found else None)

    def _of_sites(self) -> Tensor:
        """Return minus the log density of the observed sites under the mixture, and the number of points, (2,)."""
        found = []
        for number in self._numbers().tolist():
            with self.guide.as_member(number) as guide:
                found.append(self._log_densities(guide))
        return self._mixture(torch.stack(found) if found else None)

    def _numbers(self) -> Tensor:
        """Return the member of each draw: each the same number of times, without those that have diverged."""
        self.guide.lost.copy_(~self.guide.finite())
        if self.idle:
            return torch.arange(0)
        times = 1 if self.guide.points else -(-_DRAWS // self.all_members)
        return torch.arange(self.guide.members).repeat(times)

    def _mixture(self, each: Tensor | None) -> Tensor:
        """Return the sum for all points, and their number, from the log densities of this rank's draws.

        Draws of members that diverge, without a density at any point, are left out.
        """
        if each is not None:
            each = each[each.isfinite().any(1) & ~each.isnan().any(1)]
        draws, points = (0, 0) if each is None else each.shape
        device = self.run.t.device
        points, count = self.group.any(points)[0], sum(self.group.gather_facts(draws))
        own = torch.full((points,), -math.inf, dtype=torch.float64, device=device)
        if each is not None and draws:
            own = torch.logsumexp(each.double(), 0)
        total = torch.logsumexp(torch.stack(self.group.gather(own)), 0) - math.log(max(1, count))
        return torch.stack([-total.sum(), total.new_tensor(points)])

    def state(self) -> tuple[dict[str, Tensor], Record]:
        """Return its state, with the parameters of all ranks' members; all ranks call this."""
        own, self.kept = self.kept, self.whole(self.kept)
        try:
            return super().state()
        finally:
            self.kept = own

    def set_state(self, tensors: dict[str, Tensor], rest: Record) -> None:
        """Restore a state: this rank's part of it."""
        super().set_state(tensors, rest)
        self.kept = self.own(self.kept)
