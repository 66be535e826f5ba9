"""Predictions of the batches of a ``DataLoader``, one after another, joined in order."""

from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler
from tqdm.auto import tqdm

from pyro_dropout.errors import PyroDropoutError
from pyro_dropout.generative.inputs import check_inputs, takes_all
from pyro_dropout.generative.random_state import seeded
from pyro_dropout.prediction.linearised import joined, predict_linearised
from pyro_dropout.prediction.predict_network import Request, keeps, predict_network, shares_draws, walk_of
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
    device, linearised = place_of([model, posterior]), asked.method == "linearised"
    # Points of all batches lie on the same functions if every batch draws the same weights in the same portions.
    shared = shares_draws(posterior, asked) and not linearised
    seed = int(torch.randint(2**62, ())) if shared and asked.seed is None else asked.seed
    rest = replace(asked, seed=seed if shared else None, progress=False)
    found: list[Any] = []
    kept = 0
    with seeded(None if shared else seed, device):
        for batch in tqdm(loader, disable=not asked.progress, unit="batch", desc="predict"):
            if target is None and isinstance(batch, tuple | list) and len(batch) > 1:
                raise PyroDropoutError(
                    f"a batch of the DataLoader has {len(batch)} parts: if one of them is the target, name it, as in"
                    " predict(model, posterior, loader, target=1); if all are inputs, give them as one: ((a, b),)."
                )
            x = check_inputs(without(batch, target), "x of a batch").to(device)
            if shared and rest.together is None:
                rest = replace(rest, together=walk_of(model, posterior, x, rest).together)
            answer = (predict_linearised if linearised else predict_network)(model, posterior, x, rest)
            found.append(answer)
            kept += 0 if answer._samples is None else answer._samples.numel()
            if not keeps(asked.keep_samples, kept):  # all or none
                rest = replace(rest, keep_samples=False)
                for part in found:
                    part._samples = None
    if not found:
        raise PyroDropoutError("the DataLoader gave no batch.")
    if linearised:
        return joined(found, asked)
    first, samples = found[0], None
    if all(part._samples is not None for part in found):
        samples = torch.cat([part.samples for part in found], 1)
    sums = {name: torch.cat([part._sums[name] for part in found]) for name in first._sums}
    return Prediction(first.likelihood, sums, asked.samples, first.like, samples)


def _check(model: Predictor, posterior: object, loader: DataLoader[Any]) -> None:
    """Raise unless a loader gives all its points once and in order, and they can come in batches."""
    wanted = "the DataLoader must give all its data in order, as DataLoader(dataset, shuffle=False) does;"
    # With batch_sampler=..., the sampler of the loader is not the one that is used.
    for sampler in (loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
        shared = isinstance(sampler, DistributedSampler) and (sampler.shuffle or sampler.num_replicas > 1)
        if isinstance(sampler, _SHUFFLED) or shared:
            raise PyroDropoutError(f"{wanted} its sampler is {type(sampler).__name__}.")
    if loader.drop_last or getattr(loader.batch_sampler, "drop_last", False):
        raise PyroDropoutError(f"{wanted} with drop_last=True, some points would have no prediction.")
    if takes_all(model) or isinstance(posterior, FunctionPosterior):
        raise PyroDropoutError("all points are needed at once here, so they cannot come in batches; give predict x.")
