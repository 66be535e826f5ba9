"""Early stopping: training ends when held-out data no longer become more probable, and the best parameters are kept.

An ensemble stops by the density of held-out data under the mixture of all members.
"""

import math

import torch
from pyro import poutine
from torch import Tensor

from pyro_dropout.engines.engine import CHAIN
from pyro_dropout.errors import PyroDropoutError
from pyro_dropout.generative.inputs import takes_all
from pyro_dropout.generative.likelihoods import likelihood_of
from pyro_dropout.generative.model_call import ModelCall, is_network
from pyro_dropout.generative.observed_sites import observed_sites, point_log_likelihood, trace_of
from pyro_dropout.generative.random_state import seeded
from pyro_dropout.generative.trial_run import evaluating
from pyro_dropout.guides.ensemble import Ensemble
from pyro_dropout.protocols import PyroModel, Record
from pyro_dropout.training.checkpoints.tensor_file import digest
from pyro_dropout.training.distributed.process_group import ALONE, Group
from pyro_dropout.training.loss.elbo import ELBO
from pyro_dropout.training.runner import TrainingRun

_PARTICLES = 8  # draws of a network's weights, for each check
_DRAWS = 16  # of the guide of any other model


class Watch:
    """Keeps the parameters under which held-out data, the arguments of ``call``, were most probable.

    It checks every ``every`` steps, and allows ``patience`` checks without improvement.
    """

    def __init__(
        self,
        call: ModelCall,
        guide: PyroModel,
        run: TrainingRun,
        patience: int,
        every: int,
        seed: int | None = None,
        group: Group = ALONE,
    ) -> None:
        self.guide, self.run, self.patience, self.every, self.group = guide, run, patience, every, group
        self.call = call.to(run.t.device)
        base = torch.initial_seed() % 2**62 if seed is None else seed
        self.seed = int(group.copied(torch.tensor(base)))
        self.best, self.best_step, self.waited = float("inf"), 0, 0
        self.kept: list[Tensor] = []
        self.seen: list[tuple[int, float]] = []

    def stop(self, step: int) -> bool:
        """Evaluate the held-out data at ``step``, and return whether to stop; the training's draws do not change."""
        self.run.publish()
        surprise = self._of_network if is_network(self.call.model) else self._of_sites
        with evaluating(self.call.model), seeded(self.group.seed(self.seed + step), self.run.t.device):
            sums = surprise()
        nll, points = self.group.mean(sums).tolist()
        value = nll / points
        self.seen.append((step, value))
        if value < self.best:
            self.best, self.best_step, self.waited = value, step, 0
            self.kept = self.run.snapshot()
        else:
            self.waited += 1
        return self.waited >= self.patience

    def _of_network(self) -> Tensor:
        """Return E[-log p(y|w)] summed over the points, and their number, (2,)."""
        x, y = self.call.args
        # Ranks share the points; if there are too few, every rank has all of them.
        share = self.group.share(len(x)) if len(x) >= self.group.world else slice(None)
        loss = ELBO(per_example=not takes_all(self.call.model), num_particles=_PARTICLES)
        nll = loss.parts(self.call.model, self.guide, x[share], y[share])["nll"]
        return torch.stack([nll.double(), nll.new_tensor(len(x[share])).double()])

    def _of_sites(self) -> Tensor:
        """Return minus the log predictive density of the observed sites, and the number of points, (2,)."""
        each = torch.stack([self._log_densities(self.guide) for _ in range(_DRAWS)])
        density = torch.logsumexp(each, 0) - math.log(_DRAWS)
        return torch.stack([-density.sum(), density.new_tensor(len(density))])

    def _log_densities(self, guide: PyroModel) -> Tensor:
        """Return the log density of every point of the observed sites at one draw of a guide."""
        with poutine.block():
            guide_trace = self.call.of(poutine.trace(guide).get_trace)
        drawn = {name: site["value"] for name, site in guide_trace.nodes.items() if site["type"] == "sample"}
        found = observed_sites(trace_of(self.call, drawn), drawn)
        if not found:
            raise PyroDropoutError("validation must hold data: the model observes nothing with these arguments.")
        return torch.cat([point_log_likelihood(site).reshape(-1) for site in found.values()])

    def ahead(self, done: int) -> int:
        """Return how many steps to take before the next check; steps in blocks of twenty do not stop for it."""
        return self.every if self.run.chained and self.every >= CHAIN else self.every - done % self.every

    def facts(self) -> Record:
        """Return what must be the same when the training is resumed."""
        held = [digest(leaf) for leaf in self.call.leaves()]
        data = {"x": held[0], "y": held[1]} if is_network(self.call.model) and len(held) == 2 else {"data": held}
        return {**data, "patience": self.patience, "every": self.every}

    def state(self) -> tuple[dict[str, Tensor], Record]:
        """Return its state: tensors, and the rest."""
        rest = {"best": self.best, "best_step": self.best_step, "waited": self.waited, "seen": self.seen}
        return {f"kept.{k:04d}": value for k, value in enumerate(self.kept)}, {**rest, "seed": self.seed}

    def set_state(self, tensors: dict[str, Tensor], rest: Record) -> None:
        """Restore a state."""
        self.best, self.best_step, self.waited = rest["best"], rest["best_step"], rest["waited"]
        self.seen = [(int(step), float(value)) for step, value in rest["seen"]]
        self.seed = rest.get("seed", self.seed)
        self.kept = [tensors[name].to(self.run.t.device) for name in sorted(tensors) if name.startswith("kept.")]


# --- ensembles --------------------------------------------------------------------------------------------------------

_AT_ONCE = 2**24  # outputs that are computed at once
_MEMBER_DRAWS = 8  # the fewest, of members that are no points
_NOBODY = torch.tensor([math.inf, 1.0])  # where all members have diverged


class EnsembleWatch(Watch):
    """Early stopping by the log density of held-out targets under the mixture of all members."""

    guide: Ensemble

    def _of_network(self) -> Tensor:
        """Return minus the log density of the targets under the mixture, and their number, (2,)."""
        model, (inputs, targets) = self.call.model, self.call.args
        likelihood, numbers = likelihood_of(model), self._numbers()
        if not len(numbers):
            return _NOBODY
        weights = self.guide.draws_at(numbers)
        rows = max(1, _AT_ONCE // (len(numbers) * 64))
        found = []
        for x, y in zip(inputs.split(rows), targets.split(rows), strict=True):
            f = model.evaluate(weights, x).reshape(len(numbers), len(x), -1)
            found.append(likelihood.distribution(f).log_prob(likelihood.checked(f, y)))
        return _mixture(torch.cat(found, 1))

    def _of_sites(self) -> Tensor:
        """Return minus the log density of the observed sites under the mixture, and the number of points, (2,)."""
        found = []
        for number in self._numbers().tolist():
            with self.guide.as_member(number) as guide:
                found.append(self._log_densities(guide))
        return _mixture(torch.stack(found)) if found else _NOBODY

    def _numbers(self) -> Tensor:
        """Return the member of each draw: each the same number of times, without those that have diverged."""
        self.guide.lost.copy_(~self.guide.finite())
        times = 1 if self.guide.points else -(-_MEMBER_DRAWS // self.guide.rows)
        return torch.arange(self.guide.members).repeat(times)


def _mixture(each: Tensor) -> Tensor:
    """Return minus the log density of a mixture, summed over points, and their number, from that of each draw.

    Draws of members that diverge, without a density at any point, are left out.
    """
    good = each[each.isfinite().any(1) & ~each.isnan().any(1)].double()
    total = torch.logsumexp(good, 0) - math.log(max(1, len(good)))
    return torch.stack([-total.sum(), total.new_tensor(len(total))])
