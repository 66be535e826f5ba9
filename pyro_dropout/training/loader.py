"""What a batch of a torch ``DataLoader`` holds, and how many data there are."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from pyro_dropout.engines.torch_internals import tree_map
from pyro_dropout.errors import PyroDropoutError, ShapeError
from pyro_dropout.generative.process_state import forked, seed_generators

Target = str | int | None

_WHOLE = (RandomSampler, WeightedRandomSampler)  # they choose among all data, however many of them


def loader_of(args: tuple[object, ...]) -> DataLoader[Any] | None:
    """Return the loader that a public function was given in place of data; None if it was given data."""
    loader = next((arg for arg in args if isinstance(arg, DataLoader)), None)
    if loader is None:
        return None
    if len(args) > 1:
        raise PyroDropoutError(f"a DataLoader takes the place of all data; got {len(args)} arguments.")
    if length_of(loader) == 0:
        raise ShapeError("the DataLoader must give at least one batch; its length is 0.")
    return loader


def divided(batch: object, target: Target) -> tuple[object, Tensor]:
    """Return x and y of a batch: of a pair, or of a dict with its target under the key ``target``."""
    if target is None and isinstance(batch, tuple | list) and len(batch) == 2:
        target = 1
    x, y = without(batch, target), None if target is None else batch[target]  # type: ignore[index]
    if not isinstance(y, Tensor):
        raise ShapeError(
            "a batch of the DataLoader must be a pair (x, y), or a dict with its targets under the key that"
            f" fit(target=...) names; got {_named(batch)}."
        )
    return x, y


def all_of(loader: DataLoader[Any], target: Target) -> tuple[object, Tensor]:
    """Return x and y of all batches of a loader as one; random numbers of its own, and no others, are drawn."""
    with forked():
        seed_generators(0, torch.device("cpu"))
        batches = [divided(batch, target) for batch in loader]
    if not batches:
        raise ShapeError("the DataLoader must give at least one batch; it gave none.")
    try:
        x, y = tree_map(
            lambda one, *more: torch.cat([one, *more]) if isinstance(one, Tensor) and one.dim() else one, *batches
        )
    except ValueError:  # of trees that differ
        raise ShapeError("all batches of the DataLoader must hold the same.") from None
    return x, y


def without(batch: object, target: Target) -> object:
    """Return the inputs in a batch: all of it, or what is left without the target, a key or an index."""
    keys = batch if isinstance(batch, Mapping) else range(len(batch)) if isinstance(batch, tuple | list) else ()
    if target is not None and target not in keys:
        raise ShapeError(f"a batch of the DataLoader must have the target {target!r}; got {_named(batch)}.")
    if isinstance(batch, Mapping):
        return {key: value for key, value in batch.items() if key != target}
    if not isinstance(batch, tuple | list):
        return batch
    left = tuple(part for k, part in enumerate(batch) if k != target)
    if len(left) > 1:
        return left
    return tuple(left[0]) if isinstance(left[0], list) else left[0]


def number_of_data(loader: DataLoader[Any], given: int | None, rows: int = 0) -> int:
    """Return N, to which the likelihood of a batch is scaled up; raise if it is unknown.

    ``rows`` are those of a batch: more than the loader has put there, if each of its data holds several.
    """
    if given is not None:
        return given
    # With batch_sampler=..., the sampler of the loader is not the one that is used.
    sampler, size = getattr(loader.batch_sampler, "sampler", None), length_of(loader.dataset)
    several = rows > (loader.batch_size or rows)
    if isinstance(sampler, SubsetRandomSampler) and not several:
        return len(sampler)
    whole = isinstance(loader.dataset, IterableDataset) or isinstance(sampler, _WHOLE)
    if size is None or sampler is None or several or not (whole or length_of(sampler) == size):
        why = f"{type(sampler).__name__} may choose among {length_of(sampler)} of {size} data"
        if several:
            why = f"the DataLoader takes {loader.batch_size} of its data for a batch, and one has {rows} rows"
        elif sampler is None:
            why = "the DataLoader does not make its batches itself, but its dataset or its batch_sampler does"
        elif size is None:
            why = "the DataLoader's dataset has no length"
        raise PyroDropoutError(f"the number of data is unknown: {why}. Give it, as in fit(num_data=...).")
    return size


def length_of(sized: object) -> int | None:
    """Return the length of something; None if it has none."""
    try:
        return len(sized)  # type: ignore[arg-type]  # what has no length raises
    except TypeError:
        return None


def _named(batch: object) -> str:
    """Say what a batch is."""
    if isinstance(batch, Mapping):
        return f"a dict with {', '.join(map(repr, batch))}"
    return f"a {type(batch).__name__}" + (f" of {len(batch)}" if isinstance(batch, tuple | list) else "")
