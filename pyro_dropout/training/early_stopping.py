"""Early stopping: training ends when held-out data no longer become more probable, and the best parameters are kept.

With them go the buffers of that step, such as running statistics.

An ensemble stops by the density of held-out data under the mixture of all members.
"""

import hashlib
import math

import torch
from torch import Tensor

from pyro_dropout.engines.engine import CHAIN
from pyro_dropout.generative.inputs import takes_all
from pyro_dropout.generative.likelihoods import likelihood_of
from pyro_dropout.generative.model_call import ModelCall
from pyro_dropout.generative.process_state import seeded
from pyro_dropout.generative.trial_run import evaluating
from pyro_dropout.guides.ensemble import Ensemble
from pyro_dropout.protocols import PyroModel, Record
from pyro_dropout.training.checkpoints.tensor_file import digest
from pyro_dropout.training.loss.elbo import ELBO
from pyro_dropout.training.training_run import TrainingRun

_PARTICLES = 8  # draws of a network's weights, for each check
_AT_ONCE = 2**24  # outputs of an ensemble that are computed at once
_MEMBER_DRAWS = 8  # the fewest, of members that are no points


class Watch:
    """Keeps the parameters and buffers under which held-out data, the arguments of ``call``, were most probable.

    It checks every ``every`` steps, and allows ``patience`` checks without improvement.
    """

    def __init__(
        self, call: ModelCall, guide: PyroModel, run: TrainingRun, patience: int, every: int, seed: int | None = None
    ) -> None:
        self.guide, self.run, self.patience, self.every = guide, run, patience, every
        self.call = call.to(run.t.device)
        self.seed = torch.initial_seed() % 2**62 if seed is None else seed
        self.best, self.best_step, self.waited = float("inf"), 0, 0
        self.kept: list[Tensor] = []
        self.seen: list[tuple[int, float]] = []

    def stop(self, step: int) -> bool:
        """Evaluate the held-out data at ``step``, and return whether to stop; the training's draws do not change."""
        self.run.publish()
        seed = int.from_bytes(hashlib.sha256(f"{self.seed + step}:0".encode()).digest()[:8]) % 2**32
        with evaluating(self.call.model), seeded(seed, self.run.t.device):
            value = float(self.run.agreed(float(self.surprise()))[0])
        self.seen.append((step, value))
        if value < self.best:
            self.best, self.best_step, self.waited = value, step, 0
            self.kept = self.run.snapshot()
        else:
            self.waited += 1
        return self.waited >= self.patience

    def surprise(self) -> Tensor:
        """Return E[-log p(y|w)] per point."""
        x, y = self.call.args
        loss = ELBO(per_example=not takes_all(self.call.model), num_particles=_PARTICLES)
        return loss.parts(self.call.model, self.guide, x, y)["nll"].double() / len(x)

    def ahead(self, done: int) -> int:
        """Return how many steps to take before the next check; steps in blocks of twenty do not stop for it."""
        return self.every if self.run.chained and self.every >= CHAIN else self.every - done % self.every

    def facts(self) -> Record:
        """Return what must be the same when the training is resumed."""
        held = [digest(leaf) for leaf in self.call.leaves()]
        data = {"x": held[0], "y": held[1]} if len(held) == 2 else {"data": held}
        return {**data, "patience": self.patience, "every": self.every, "buffers": len(self.run.buffers)}

    def state(self) -> tuple[dict[str, Tensor], Record]:
        """Return its state: tensors, and the rest."""
        rest = {name: getattr(self, name) for name in ("best", "best_step", "waited", "seen", "seed")}
        return {f"kept.{k:05d}": value for k, value in enumerate(self.kept)}, rest

    def set_state(self, tensors: dict[str, Tensor], rest: Record) -> None:
        """Restore a state."""
        self.best, self.best_step, self.waited = rest["best"], rest["best_step"], rest["waited"]
        self.seen = [(int(step), float(value)) for step, value in rest["seen"]]
        self.seed = rest.get("seed", self.seed)
        self.kept = [tensors[name].to(self.run.t.device) for name in sorted(tensors) if name.startswith("kept.")]


class EnsembleWatch(Watch):
    """Early stopping by the log density of held-out targets under the mixture of all members."""

    guide: Ensemble

    def surprise(self) -> Tensor:
        """Return minus the log density of the targets under the mixture, per point."""
        model, (inputs, targets), numbers = self.call.model, self.call.args, self._numbers()
        likelihood, found = likelihood_of(model), []
        if not len(numbers):
            return torch.tensor(math.inf)
        weights, rows = self.guide.draws_at(numbers), max(1, _AT_ONCE // (len(numbers) * 64))
        for x, y in zip(inputs.split(rows), targets.split(rows), strict=True):
            f = model.evaluate(weights, x).reshape(len(numbers), len(x), -1)
            found.append(likelihood.distribution(f).log_prob(likelihood.checked(f, y)))
        each = torch.cat(found, 1)
        good = each[each.isfinite().any(1) & ~each.isnan().any(1)].double()  # members that diverge have no density
        return math.log(max(1, len(good))) - torch.logsumexp(good, 0).mean()

    def _numbers(self) -> Tensor:
        """Return the member of each draw: each the same number of times, without those that have diverged."""
        self.guide.lost.copy_(~self.guide.finite())
        times = 1 if self.guide.points else -(-_MEMBER_DRAWS // self.guide.rows)
        return torch.arange(self.guide.members).repeat(times)
