"""A prediction by several processes together: each computes its share of the points, or of the draws."""

import math
from dataclasses import asdict, replace
from typing import Literal

import torch
from torch import Tensor, nn

from pyro_dropout.generative.inputs import AnyInputs, named, takes_all
from pyro_dropout.mathematics.errors import PyroDropoutError
from pyro_dropout.prediction.moments import Running, Sums, indicator_covariance
from pyro_dropout.prediction.predict_network import Request, predict_network, shares_draws, walk_of
from pyro_dropout.prediction.prediction import Prediction
from pyro_dropout.protocols import FunctionPosterior, HasDraws, Predictor
from pyro_dropout.training.checkpoints.tensor_file import digest
from pyro_dropout.training.distributed.process_group import Group, join

Shard = Literal["points", "samples"]

_ROWS = 2**18  # in one forward pass on a GPU, where all ranks must draw weights in equal portions


class Shards:
    """Which rank has which points or draws, and how their results are combined."""

    def __init__(self, group: Group, shard: Shard, points: int, samples: int) -> None:
        self.group, self.shard, self.points, self.samples = group, shard, points, samples
        self._window = math.ceil(points / group.world)

    def own_points(self, rank: int) -> tuple[slice, int]:
        """Return the points that a rank computes, and how many of the first of them another rank computes too.

        All ranks compute the same number of points, so that some are computed twice: then all draw whole functions in
        equal portions, and points of different ranks lie on the same functions.
        """
        if self.shard == "samples":
            return slice(0, self.points), 0
        begin = rank * self._window
        start = min(begin, self.points - self._window)
        return slice(start, start + self._window), min(begin - start, self._window)

    def own_draws(self, rank: int) -> int:
        """Return how many of a rank's draws count."""
        if self.shard == "points":
            return self.samples
        share = Group(rank, self.group.world).share(self.samples)
        return int(share.stop - share.start)

    def joined(self, own: Tensor, dim: int) -> Tensor:
        """Return every rank's points joined in order; ``dim`` is the dimension of the points."""
        parts = []
        for rank in range(self.group.world):
            _, doubled = self.own_points(rank)
            parts.append(self.group.copied(own, rank).narrow(dim, doubled, self._window - doubled))
        return torch.cat(parts, dim)

    def of_each(self, own: Tensor) -> list[tuple[int, Tensor]]:
        """Return every rank's tensor with its number of draws; ranks without draws are left out."""
        found = [(self.own_draws(rank), self.group.copied(own, rank)) for rank in range(self.group.world)]
        return [(count, each) for count, each in found if count]

    def sums(self, own: Sums) -> Sums:
        """Return the sums over all draws at all points."""
        names = sorted(own)
        if self.shard == "points":
            return {name: self.joined(own[name], 0) for name in names}
        each = {name: self.of_each(own[name]) for name in names}
        running, seen = Running(self.points), 0
        for k, (count, _) in enumerate(each["mean"]):
            running.add(seen, count, slice(0, self.points), {name: each[name][k][1] for name in names})
            seen += count
        return running.sums

    def draws(self, own: Tensor) -> Tensor:
        """Return the outputs of all draws at all points, (T, N, D)."""
        if self.shard == "points":
            return self.joined(own, 1)
        counts = [self.own_draws(rank) for rank in range(self.group.world)]
        padded = own.new_empty(max(counts), *own.shape[1:])
        padded[: len(own)] = own
        return torch.cat([each[:count] for count, each in self.of_each(padded)])


class ShardedPrediction(Prediction):
    """A prediction whose samples were not kept: whatever needs them must be called on all ranks."""

    def __init__(self, own: Prediction, shards: Shards, sums: Sums) -> None:
        super().__init__(own.likelihood, sums, shards.samples, own._like, None, None)
        self._own, self._shards = own, shards

    def log_prob(self, y: Tensor) -> Tensor:
        """Return log p(y | x) of each point, (N,); every rank repeats its draws."""
        points, _ = self._shards.own_points(self._shards.group.rank)
        own = self._own.log_prob(self.checked_targets(y)[points])
        if self._shards.shard == "points":
            return self._shards.joined(own, 0)
        each = [part.double() + math.log(count / self._count) for count, part in self._shards.of_each(own)]
        return torch.logsumexp(torch.stack(each), 0).to(own)

    def _covariance(self) -> Tensor:
        """Cov[y] between the targets of a point, (N, D, D), in float64; every rank repeats its draws."""
        own = self._own._covariance()
        if self._shards.shard == "points":
            return self._shards.joined(own, 0)
        mean = self._sums["mean"]
        if self.one_of_several:
            return indicator_covariance(mean)
        found = torch.zeros_like(own)
        means = self._shards.of_each(self._own._sums["mean"])
        # The law of total covariance: within each rank's draws, and between their means
        for (count, within), (_, middle) in zip(self._shards.of_each(own), means, strict=True):
            apart = middle - mean
            found += (within + apart.unsqueeze(-1) * apart.unsqueeze(-2)) * (count / self._count)
        return found


def predict_together(model: Predictor, posterior: object, x: AnyInputs, asked: Request, shard: Shard) -> Prediction:
    """Return the prediction that all ranks make together, on all of them; they have the same parameters."""
    _check_divisible(model, posterior, shard)
    group = join(x.device)
    # Whether samples are kept depends on their total size, not on that of a rank's share.
    width = walk_of(model, posterior, x if takes_all(model) else x[:1], replace(asked, samples=1)).like.shape[-1]
    asked = replace(asked, keep_samples=asked.keeps(asked.samples * len(x) * width))
    modules = [part for part in (model, posterior) if isinstance(part, nn.Module)]
    values = [digest(t) for module in modules for t in (*module.parameters(), *module.buffers())]
    digests = {name: digest(leaf) for name, leaf in named(x).items()}
    group.check_same({**asdict(asked), "shard": shard, **digests, "the parameters of model and posterior": values})
    shards = Shards(group, shard, len(x), asked.samples)
    base = group.one_seed(asked.seed)
    if shard == "points" and shares_draws(posterior, asked):
        mine = replace(asked, seed=base, chunk=asked.chunk or (_ROWS if x.is_cuda else None))
    else:
        mine = replace(asked, seed=group.seed(base))
    points, _ = shards.own_points(group.rank)
    # A rank without draws makes one all the same, for the shapes of the others' results.
    mine = replace(mine, samples=max(1, shards.own_draws(group.rank)), progress=asked.progress and group.first)
    own = predict_network(model, posterior, x[points], mine)
    sums = shards.sums(own._sums)
    if not asked.keep_samples:
        return ShardedPrediction(own, shards, sums)
    return Prediction(own.likelihood, sums, asked.samples, own._like, shards.draws(own.samples), None)


def _check_divisible(model: object, posterior: object, shard: Shard) -> None:
    if shard == "points" and takes_all(model):
        raise PyroDropoutError(
            "the network takes all its points at once (whole_batch=True), so they cannot be divided: use"
            " shard='samples'."
        )
    if shard == "points" and isinstance(posterior, FunctionPosterior):
        raise PyroDropoutError(
            f"{type(posterior).__name__} draws its functions at all points together, so they cannot be divided: use"
            " shard='samples'."
        )
    if shard == "samples" and isinstance(posterior, HasDraws):
        raise PyroDropoutError(
            f"{type(posterior).__name__} has a fixed set of draws, each used once before any is repeated, so they"
            " cannot be divided: use shard='points'."
        )
