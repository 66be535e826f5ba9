"""Mini-batches as inputs of a training step: rows of data in memory, or what a torch ``DataLoader`` gives.

A loader has random numbers of its own (torch's, Python's and numpy's), seeded by the epoch, so that the order of the
data and augmentations do not depend on the training. To resume in the middle of an epoch, its batches are loaded again
up to that position.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from pyro_dropout.engines.engine import CHAIN
from pyro_dropout.engines.torch_internals import tree_flatten
from pyro_dropout.errors import PyroDropoutError, RangeError, ShapeError
from pyro_dropout.generative.inputs import check_inputs, check_pairs, takes_all
from pyro_dropout.generative.likelihoods import likelihood_of
from pyro_dropout.generative.misfits import check_call_finite
from pyro_dropout.generative.model_call import ModelCall, is_network, name_of, takes
from pyro_dropout.generative.process_state import RandomState, forked, random_state, seed_generators, set_random_state
from pyro_dropout.guides.ensemble import Ensemble
from pyro_dropout.mathematics.checks import check_count
from pyro_dropout.protocols import Record, Tree
from pyro_dropout.training.loader import Target, divided, length_of, number_of_data
from pyro_dropout.training.preflight import check_data, outputs_at

Call = tuple[tuple[Tree, ...], dict[str, Tree]]  # the arguments that a batch holds

_AHEAD = 8 * CHAIN  # batches that are drawn at once, as long as they are
_MOST = 2**21  # indices at most


class Batches:
    """Mini-batches of indices, shuffled and without replacement within an epoch.

    The few left over at the end of an epoch are skipped in it. ``rows``, (count,) or (replicas, count), are those to
    choose from, for one run or for each of several.
    """

    chained, together = True, CHAIN

    def __init__(self, size: int, rows: Tensor) -> None:
        self.size, self.rows = size, rows
        # A separate generator: the order does not depend on how many steps are taken at a time, or in total.
        self.generator = torch.Generator(rows.device).manual_seed(int(torch.randint(2**62, ())))
        self.waiting = rows.new_empty((0, *rows.shape[:-1], size))

    def example(self) -> list[Tensor]:
        """Return a batch like any other, as the input of a step."""
        return [self.rows[..., : self.size].contiguous()]

    def inputs(self, count: int) -> Iterator[list[Tensor]]:
        """Yield the next ``count`` batches, as inputs of steps."""
        return ([row] for row in self.take(count))

    def state(self) -> dict[str, Tensor]:
        """Return what later batches depend on."""
        return {"waiting": self.waiting, "order": self.generator.get_state()}

    def set_state(self, tensors: dict[str, Tensor]) -> None:
        """Restore a state."""
        self.waiting = tensors["waiting"].to(self.rows.device)
        self.generator.set_state(tensors["order"])

    def take(self, count: int) -> Tensor:
        """Return the next ``count`` batches, (count, size) or (count, replicas, size)."""
        while len(self.waiting) < count:
            each = self.rows.shape[-1] // self.size
            # So many epochs are drawn at a time that the order does not depend on how many batches are asked for.
            epochs = max(1, min(_AHEAD // each, _MOST // self.rows.numel()))
            draws = torch.rand((epochs, *self.rows.shape), device=self.rows.device, generator=self.generator)
            order = _order(draws)[..., : each * self.size]
            rows = self.rows.expand_as(draws).gather(-1, order).unflatten(-1, (each, self.size))
            self.waiting = torch.cat([self.waiting, rows.movedim(-2, 1).flatten(0, 1)])
        taken, self.waiting = self.waiting[:count], self.waiting[count:]
        return taken


def _order(draws: Tensor) -> Tensor:
    """Return the places of numbers in [0, 1), the least first; equal ones stay in order."""
    if draws.is_cuda or draws.dtype != torch.float32:
        return draws.argsort(dim=-1, stable=True)
    # numpy sorts whole numbers, of a number's bits and its place, ten times as fast as torch finds an order.
    keys = draws.view(torch.int32).long() << 32 | torch.arange(draws.shape[-1])
    return torch.from_numpy(np.sort(keys.numpy())) & 0xFFFFFFFF


class Stream:
    """The batches of a loader, which ``read`` turns into the arguments of a model, as inputs of a training step."""

    chained, together = False, 1  # a step waits for its batch

    def __init__(self, loader: DataLoader[Any], read: Callable[[object], Call], seed: int | None) -> None:
        if loader.persistent_workers:  # their random numbers would go on from one epoch, or training, to the next
            loader = copy.copy(loader)
            vars(loader)["persistent_workers"] = False
        self._loader, self._read = loader, read
        self._seed = int(torch.randint(2**62, ())) if seed is None else int(seed)
        self._epoch = self._position = 0
        self._iterator: Iterator[object] = iter(())
        self._numbers: RandomState = random_state()
        samplers = (loader, loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
        found = [getattr(each, "generator", None) for each in samplers]
        self._generators = list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())
        self.device = torch.device("cpu")
        self._begin()
        self.first = self._read(self._next())
        self._example, self.spec = tree_flatten(self.first)
        self._waiting: list[Call] = [self.first]  # read, and not trained on yet

    def example(self) -> list[Tensor]:
        """Return the tensors of the first batch, each by itself: two of them that are one may differ in the next."""
        return [self._placed(leaf).detach() for leaf in self._example]

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
        found = length_of(self._loader)
        if found is None:
            raise RangeError("epochs needs a DataLoader with a length, and this one has none. Give steps instead.")
        return found

    def facts(self) -> Record:
        """Return what must be the same when the training is resumed; not the data, which would all have to be read."""
        name, size = type(self._loader.dataset).__name__, length_of(self._loader)
        shapes = [f"{leaf.dtype}{tuple(leaf.shape)}" for leaf in self._example]
        return {"dataset": name, "batches in an epoch": size, "first batch": shapes}

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
        with forked():
            set_random_state(self._numbers)
            batch = next(self._iterator, None)
            self._numbers = random_state()
        self._position += batch is not None
        return batch

    def _next(self) -> object:
        """Return the next batch, of the next epoch if this one has ended."""
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


def open_loader(
    loader: DataLoader[Any],
    model: Any,
    kwargs: Mapping[str, object],
    *,
    guide: object,
    batch_size: object,
    target: Target,
    num_data: int | None,
    seed: int | None,
) -> tuple[Stream, ModelCall]:
    """Return a stream of the loader's batches, and the call of the model with the first of them and ``num_data``."""
    if batch_size is not None:
        raise PyroDropoutError(f"batch_size is that of the DataLoader; leave it out. Got {batch_size}.")
    if isinstance(guide, Ensemble):
        raise ShapeError("an Ensemble is trained on tensors, x and y, not on a DataLoader.")
    if num_data is not None:
        check_count("num_data", num_data)
    if takes_all(model):
        raise PyroDropoutError(f"{name_of(model)} takes all its points at once (whole_batch=True); give fit x and y.")
    if not takes(model, "num_data"):
        raise PyroDropoutError(
            f"{name_of(model)} takes no num_data, so the batches of a DataLoader would not be scaled up; give the model"
            " a num_data argument."
        )
    count, f = number_of_data(loader, num_data), list[Tensor | None]()

    def read(batch: object) -> Call:
        """Turn a batch into the arguments of the model, and check it."""
        if not is_network(model):
            given: Call = ((tuple(batch) if isinstance(batch, tuple | list) else (batch,)), {})
            given = ((), dict(batch)) if isinstance(batch, Mapping) else given
            check_call_finite(ModelCall(model, given[0], {**kwargs, **given[1], "num_data": count}))
            return given
        x, y = divided(batch, target)
        x = check_inputs(x, "x of a batch")
        check_pairs("x and y of a batch", x, y)
        number_of_data(loader, num_data, len(y))
        f[:] = f or [outputs_at(model, x[:2])]
        if f[0] is not None:  # a compiled step cannot look at values, and may read outside a table of classes
            rows, likelihood = f[0].cpu(), likelihood_of(model)
            likelihood.check_values(rows, likelihood.checked(rows[:1].expand(len(y), -1), y))
        return (x, y), {}

    stream = Stream(loader, read, seed)
    args, own = stream.first
    if is_network(model):
        call = check_data(ModelCall(model, args, dict(kwargs)), None)
        return stream, replace(call, args=(*call.args[:2], count))
    return stream, check_data(ModelCall(model, args, {**kwargs, **own, "num_data": count}), None)
