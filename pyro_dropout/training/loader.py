"""Mini-batches from a torch ``DataLoader``: what a batch holds, how many data there are, and where the epoch stands.

Batches are loaded with random numbers of their own (torch's, Python's and numpy's), seeded by the epoch, so that the
order of the data and augmentations do not depend on the training. To resume in the middle of an epoch, its batches are
loaded again up to that position.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from pyro_dropout.engines.torch_internals import tree_flatten, tree_unflatten
from pyro_dropout.errors import PyroDropoutError, RangeError, ShapeError
from pyro_dropout.generative.random_state import RandomState, forked, random_state, seed_generators, set_random_state
from pyro_dropout.protocols import Record, Tree

Call = tuple[tuple[Tree, ...], dict[str, Tree]]  # the arguments that a batch holds
Target = str | int | None

_WHOLE = (SequentialSampler, RandomSampler, WeightedRandomSampler, DistributedSampler)  # they choose among all data


def loader_of(args: tuple[object, ...]) -> DataLoader[Any] | None:
    """Return the loader that a public function was given in place of data; None if it was given data."""
    loader = next((arg for arg in args if isinstance(arg, DataLoader)), None)
    if loader is None:
        return None
    if len(args) > 1:
        raise PyroDropoutError(f"a DataLoader takes the place of all data; got {len(args)} arguments.")
    if _length(loader) == 0:
        raise ShapeError("the DataLoader must give at least one batch; its length is 0.")
    return loader


def divided(batch: object, target: Target) -> tuple[object, Tensor]:
    """Return x and y of a batch: of a pair, or of a dict with its target under the key ``target``.

    Example:
        >>> import torch
        >>> x, y = divided({"ids": torch.zeros(4, 7), "labels": torch.ones(4)}, "labels")
        >>> list(x), y.shape
        (['ids'], torch.Size([4]))
    """
    if target is None and isinstance(batch, tuple | list) and len(batch) == 2:
        target = 1
    x, y = without(batch, target), None if target is None else batch[target]  # type: ignore[index]
    if not isinstance(y, Tensor):
        raise ShapeError(
            "a batch of the DataLoader must be a pair (x, y), or a dict with its targets under the key that"
            f" fit(target=...) names; got {_described(batch)}."
        )
    return x, y


def all_of(loader: DataLoader[Any], target: Target) -> tuple[object, Tensor]:
    """Return x and y of all batches of a loader as one; random numbers of its own, and no others, are drawn."""
    with forked():
        seed_generators(0, torch.device("cpu"))
        batches = [divided(batch, target) for batch in loader]
    if not batches:
        raise ShapeError("the DataLoader must give at least one batch; it gave none.")
    leaves, specs = zip(*map(tree_flatten, batches), strict=True)
    if any(spec != specs[0] for spec in specs):
        raise ShapeError("all batches of the DataLoader must hold the same.")
    parts = ((each, isinstance(each[0], Tensor) and each[0].dim() > 0) for each in zip(*leaves, strict=True))
    x, y = tree_unflatten([torch.cat(each) if rows else each[0] for each, rows in parts], specs[0])
    return x, y


def without(batch: object, target: Target) -> object:
    """Return the inputs in a batch: all of it, or what is left without the target, a key or an index."""
    keys = batch if isinstance(batch, Mapping) else range(len(batch)) if isinstance(batch, tuple | list) else ()
    if target is not None and target not in keys:
        raise ShapeError(f"a batch of the DataLoader must have the target {target!r}; got {_described(batch)}.")
    if isinstance(batch, Mapping):
        return {key: value for key, value in batch.items() if key != target}
    if not isinstance(batch, tuple | list):
        return batch
    left = tuple(part for k, part in enumerate(batch) if k != target)
    if len(left) > 1:
        return left
    return tuple(left[0]) if isinstance(left[0], list) else left[0]


def number_of_data(loader: DataLoader[Any], given: int | None) -> int:
    """Return N, to which the likelihood of a batch is scaled up; raise if it is unknown."""
    if given is not None:
        return given
    sampler, size = loader.sampler, _length(loader.dataset)
    if isinstance(loader.dataset, IterableDataset):
        if size is None:
            raise PyroDropoutError(
                "the number of data is unknown: the DataLoader's dataset has no length. Give it, as in"
                " fit(num_data=...)."
            )
        return size
    if isinstance(sampler, SubsetRandomSampler):
        return len(sampler)
    if size is None or not (isinstance(sampler, _WHOLE) or _length(sampler) == size):
        raise PyroDropoutError(
            f"the number of data is unknown: {type(sampler).__name__} may choose among {_length(sampler)} of"
            f" {size} data. Give it, as in fit(num_data=...)."
        )
    return size


class Stream:
    """The batches of a loader, one epoch after another, as inputs of a training step.

    Args:
        loader: the loader.
        read: turns a batch into the arguments of a model, without ``num_data``; raises if it is not valid.
        seed: of the order and the augmentations; drawn if not given.
    """

    chained, together = False, 1  # a step waits for its batch

    def __init__(self, loader: DataLoader[Any], read: Callable[[object], Call], seed: int | None) -> None:
        self._loader, self._read = loader, read
        self._seed = int(torch.randint(2**62, ())) if seed is None else int(seed)
        self._epoch = self._position = 0
        self._iterator: Iterator[object] | None = None
        self._numbers: RandomState | None = None
        samplers = (loader, loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
        found = [getattr(each, "generator", None) for each in samplers]
        self._generators = list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())
        self.device = torch.device("cpu")
        self.first = self._read(self._next())
        self._example, self.spec = tree_flatten(self.first)
        self._waiting: list[Call] = [self.first]  # read, and not trained on yet

    # --- what a training run asks for ---------------------------------------------------------------------------------

    def example(self) -> list[Tensor]:
        """Return the tensors of the first batch."""
        return [self._placed(leaf) for leaf in self._example]

    def usual(self, inputs: list[Tensor]) -> bool:
        """Whether a batch has the shapes of the first one, for which the step is compiled."""
        pairs = zip(inputs, self._example, strict=True)
        return all(now.shape == then.shape and now.dtype == then.dtype for now, then in pairs)

    def inputs(self, count: int) -> Iterator[list[Tensor]]:
        """Yield the tensors of the next batches."""
        for _ in range(count):
            call = self._waiting.pop() if self._waiting else self._read(self._next())
            leaves, spec = tree_flatten(call)
            if spec != self.spec:
                raise ShapeError(
                    f"all batches of the DataLoader must hold the same; the first one has {self.spec}, and one has"
                    f" {spec}."
                )
            yield [self._placed(leaf) for leaf in leaves]

    def state(self) -> dict[str, Tensor]:
        """Return where the epoch stands."""
        found = {f"loader.generator.{k}": state for k, state in enumerate(self._starts)}
        return found | {"loader": torch.tensor([self._seed, self._epoch, self._position - len(self._waiting)])}

    def set_state(self, tensors: dict[str, Tensor]) -> None:
        """Go to a position in an epoch: its batches are loaded up to there and dropped."""
        self._seed, self._epoch, position = tensors["loader"].tolist()
        for k, generator in enumerate(self._generators):
            generator.set_state(tensors[f"loader.generator.{k}"])
        self._waiting = []
        self._begin()
        for _ in range(position):
            self._load()

    @property
    def length(self) -> int:
        """How many batches an epoch has."""
        found = _length(self._loader)
        if found is None:
            raise RangeError("epochs needs a DataLoader with a length, and this one has none. Give steps instead.")
        return found

    def facts(self) -> Record:
        """Return what must be the same when the training is resumed; not the data, which would all have to be read."""
        name, size = type(self._loader.dataset).__name__, _length(self._loader)
        shapes = [f"{leaf.dtype}{tuple(leaf.shape)}" for leaf in self._example]
        return {"dataset": name, "batches in an epoch": size, "first batch": shapes}

    # --- loading ------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Start an epoch, with random numbers that depend on its number alone."""
        self._starts = [generator.get_state() for generator in self._generators]
        if hasattr(self._loader.sampler, "set_epoch"):
            self._loader.sampler.set_epoch(self._epoch)
        with forked():
            seed_generators((self._seed + self._epoch) % 2**63, torch.device("cpu"))
            self._iterator, self._position = iter(self._loader), 0
            self._numbers = random_state()

    def _load(self) -> object:
        """Return the next batch of the epoch; None at its end."""
        assert self._iterator is not None
        assert self._numbers is not None
        with forked():
            set_random_state(self._numbers)
            batch = next(self._iterator, None)
            self._numbers = random_state()
        self._position += batch is not None
        return batch

    def _next(self) -> object:
        """Return the next batch, of the next epoch if this one has ended."""
        if self._iterator is None:
            self._begin()
        batch = self._load()
        if batch is None and self._position:
            self._epoch += 1
            self._begin()
            batch = self._load()
        if batch is None:
            raise ShapeError(f"the DataLoader gave no batch in epoch {self._epoch + 1}.")
        return batch

    def _placed(self, leaf: Tensor) -> Tensor:
        return leaf.to(self.device, non_blocking=leaf.is_pinned()).contiguous()


def _length(sized: object) -> int | None:
    try:
        return len(sized)  # type: ignore[arg-type]  # what has no length raises
    except TypeError:
        return None


def _described(batch: object) -> str:
    if isinstance(batch, Mapping):
        return f"a dict with {', '.join(map(repr, batch))}"
    if isinstance(batch, tuple | list):
        return f"a {type(batch).__name__} of {len(batch)}"
    return type(batch).__name__
