"""Predictions of the batches of a ``DataLoader``, one after another, joined in order."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler
from tqdm.auto import tqdm

from pyro_dropout.errors import PyroDropoutError
from pyro_dropout.generative.inputs import AnyInputs, check_inputs, takes_all
from pyro_dropout.generative.random_state import seeded
from pyro_dropout.prediction.linearised import joined, predict_linearised
from pyro_dropout.prediction.predict_network import Request, predict_network, shares_draws, walk_of
from pyro_dropout.prediction.prediction import Prediction
from pyro_dropout.protocols import FunctionPosterior, Predictor
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
    if loader.drop_last or getattr(loader.batch_sampler, "drop_last", False):
        raise PyroDropoutError(
            "the DataLoader leaves out the points that do not fill a batch (drop_last=True), so they would have no"
            " prediction. Write DataLoader(dataset, drop_last=False, ...)."
        )
    if takes_all(model) or isinstance(posterior, FunctionPosterior):
        raise PyroDropoutError("all points are needed at once here, so they cannot come in batches; give predict x.")


def _length(loader: DataLoader[Any]) -> int | None:
    try:
        return len(loader)
    except TypeError:  # of a stream
        return None
