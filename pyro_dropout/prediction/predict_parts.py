"""Predictions made in parts and joined: of the batches of a ``DataLoader``, or by several processes together."""

import math
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SubsetRandomSampler, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler
from tqdm.auto import tqdm

from pyro_dropout.errors import PyroDropoutError
from pyro_dropout.generative.inputs import AnyInputs, check_inputs, named, takes_all
from pyro_dropout.generative.likelihoods.moments import Running, Sums
from pyro_dropout.generative.random_state import seeded
from pyro_dropout.prediction.linearised import joined, predict_linearised
from pyro_dropout.prediction.predict_network import Request, predict_network, shares_draws, walk_of
from pyro_dropout.prediction.prediction import Prediction
from pyro_dropout.protocols import FunctionPosterior, HasDraws, Predictor
from pyro_dropout.training.checkpoints.tensor_file import digest
from pyro_dropout.training.distributed.process_group import Group, join
from pyro_dropout.training.fit import place_of
from pyro_dropout.training.loader import Target, without

_SHUFFLED = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


def predict_loader(
    model: Predictor, posterior: object, loader: DataLoader[Any], target: Target, asked: Request
) -> Prediction:
    """Return the prediction of all points of a loader, in its order; ``target`` is the part of a batch to leave out."""
    _check(model, posterior, loader)
    device = place_of([model, posterior])
    if asked.method == "linearised":
        one = replace(asked, progress=False)
        bar = tqdm(_inputs(loader, target), total=_length(loader), disable=not asked.progress, desc="predict")
        parts = [predict_linearised(model, posterior, x.to(device), one) for x in bar]
        return joined(parts, asked)
    # Points of all batches lie on the same functions if every batch draws the same weights in the same portions.
    shared = shares_draws(posterior, asked)
    seed = int(torch.randint(2**62, ())) if shared and asked.seed is None else asked.seed
    rest = replace(asked, seed=seed if shared else None, progress=False)
    found: list[Prediction] = []
    kept = 0
    with (
        seeded(None if shared else seed, device),
        tqdm(total=_length(loader), disable=not asked.progress, unit="batch", desc="predict") as bar,
    ):
        for x in _inputs(loader, target):
            x = x.to(device)
            if shared and rest.together is None:
                rest = replace(rest, together=walk_of(model, posterior, x, rest).together)
            answer = predict_network(model, posterior, x, rest)
            kept += 0 if answer._samples is None else answer._samples.numel()
            if not asked.keeps(kept):  # all or none: the parts before this one are not needed any more
                rest = replace(rest, keep_samples=False)
                for part in (*found, answer):
                    part._samples = None
            answer._walk = None
            found.append(answer)
            bar.update()
    if not found:
        raise PyroDropoutError("the DataLoader gave no batch.")
    first = found[0]
    sums = {name: torch.cat([part._sums[name] for part in found]) for name in first._sums}
    whole = all(part._samples is not None for part in found)
    samples = torch.cat([part.samples for part in found], 1) if whole else None
    return Prediction(first.likelihood, sums, asked.samples, first.like, samples, None)


def _inputs(loader: DataLoader[Any], target: Target) -> Iterator[AnyInputs]:
    for batch in loader:
        if target is None and isinstance(batch, tuple | list) and len(batch) > 1:
            raise PyroDropoutError(
                f"a batch of the DataLoader has {len(batch)} parts: if one of them is the target, name it, as in"
                " predict(model, posterior, loader, target=1); if all are inputs, give them as one: ((a, b),)."
            )
        yield check_inputs(without(batch, target), "x of a batch")


def _check(model: Predictor, posterior: object, loader: DataLoader[Any]) -> None:
    # With batch_sampler=..., the sampler of the loader is not the one that is used.
    for sampler in (loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
        shared = isinstance(sampler, DistributedSampler) and (sampler.shuffle or sampler.num_replicas > 1)
        if isinstance(sampler, _SHUFFLED) or shared:
            raise PyroDropoutError(
                f"the DataLoader must give all its data in order, since predictions come in the order of its batches;"
                f" its sampler is {type(sampler).__name__}. Write DataLoader(dataset, shuffle=False, ...)."
            )
    _check_last(loader)
    if takes_all(model) or isinstance(posterior, FunctionPosterior):
        raise PyroDropoutError("all points are needed at once here, so they cannot come in batches; give predict x.")


def _check_last(loader: DataLoader[Any]) -> None:
    """Raise if the loader leaves out its last points, which would have no prediction."""
    batches = loader if loader.batch_sampler is None else loader.batch_sampler
    if not (loader.drop_last or getattr(batches, "drop_last", False)):
        return
    streamed = isinstance(loader.dataset, IterableDataset)
    points = _length(loader.dataset if streamed else getattr(batches, "sampler", None))
    size = getattr(batches, "batch_size", None) or 1
    # Workers of an iterable dataset have a last batch each.
    if points is None or points % size or (streamed and loader.num_workers > 1):
        left = (
            "the points that do not fill a batch" if points is None else f"{points % size or size} of {points} points"
        )
        raise PyroDropoutError(
            f"the DataLoader leaves out {left} (drop_last=True), so they would have no prediction. Write"
            " DataLoader(dataset, drop_last=False, ...)."
        )


def _length(sized: object) -> int | None:
    try:
        return len(sized)  # type: ignore[arg-type]  # what has no length raises
    except TypeError:
        return None


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
        super().__init__(own.likelihood, sums, shards.samples, own.like, None, None)
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
        if self.one_of_several:
            return super()._covariance()
        own, mean = self._own._covariance(), self._sums["mean"]
        if self._shards.shard == "points":
            return self._shards.joined(own, 0)
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
    return Prediction(own.likelihood, sums, asked.samples, own.like, shards.draws(own.samples), None)


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
