"""Training on the batches of a ``DataLoader``: a model call whose data come anew at every step."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

from pyro_dropout.engines.torch_internals import tree_unflatten
from pyro_dropout.generative.inputs import check_pairs, inputs_of, takes_all
from pyro_dropout.generative.likelihoods import likelihood_of
from pyro_dropout.generative.model_call import ModelCall, is_network, name_of, takes
from pyro_dropout.guides.ensemble import Ensemble
from pyro_dropout.mathematics.checks import check_count
from pyro_dropout.mathematics.errors import PyroDropoutError, ShapeError
from pyro_dropout.protocols import PyroModel, Record
from pyro_dropout.training.checkpoints.fingerprint import told_loss
from pyro_dropout.training.loader import Call, Stream, Target, divided, number_of_data
from pyro_dropout.training.preflight import check_data, outputs_at
from pyro_dropout.training.training_task import TrainingTask


@dataclass
class LoaderTask(TrainingTask):
    """A model call with the first batch of a stream; every step has the next one."""

    stream: Stream

    def _batches(self, batch: int) -> Stream:
        return self.stream

    def _arguments(self, *leaves: Tensor) -> tuple[tuple[object, ...], dict[str, object]]:
        args, kwargs = tree_unflatten(leaves, self.stream.spec)
        return (*args, *self.call.args[len(args) :]), {**self.call.kwargs, **kwargs}

    def facts(self) -> Record:
        """Return what must be the same when the training is resumed."""
        return self.stream.facts() | {"loss": told_loss(self.loss, self.call.model)}


def open_loader(
    loader: DataLoader[Any],
    model: PyroModel,
    kwargs: Mapping[str, object],
    *,
    target: Target,
    num_data: int | None,
    seed: int | None,
) -> tuple[Stream, ModelCall]:
    """Return a stream of the loader's batches, and the call of the model with the first of them and ``num_data``.

    Args:
        loader: gives pairs (x, y), or dicts; for a model that is not a network, its arguments.
        model: the model.
        kwargs: its other keyword arguments.
        target: the key of the targets in a dict.
        num_data: N, where the loader does not know it.
        seed: of the order of the data.
    """
    if num_data is not None:
        check_count("num_data", num_data)
    if takes_all(model):
        raise PyroDropoutError(f"{name_of(model)} takes all its points at once (whole_batch=True); give fit x and y.")
    if not takes(model, "num_data"):
        raise PyroDropoutError(
            f"{name_of(model)} takes no num_data, so the batches of a DataLoader would not be scaled up; give the model"
            " a num_data argument."
        )
    count = number_of_data(loader, num_data)
    stream = Stream(loader, _Reader(model, target), seed)
    args, own = stream.first
    if is_network(model):
        call = check_data(ModelCall(model, args, {**kwargs, **own}), None)
        return stream, replace(call, args=(*call.args[:2], count))
    return stream, check_data(ModelCall(model, args, {**kwargs, **own, "num_data": count}), None)


class _Reader:
    """Turns a batch into the arguments of a model, and checks it."""

    def __init__(self, model: PyroModel, target: Target) -> None:
        self._model, self._target = model, target
        self._f: Tensor | None = None

    def __call__(self, batch: object) -> Call:
        if not is_network(self._model):
            if isinstance(batch, Mapping):
                return (), dict(batch)
            return (tuple(batch) if isinstance(batch, tuple | list) else (batch,)), {}
        x, y = divided(batch, self._target)
        inputs = inputs_of(x)
        check_pairs("x and y of a batch", inputs, y)
        if self._f is None:
            self._f = outputs_at(self._model, inputs[:2])
        if self._f is not None:  # a compiled step cannot look at values, and may read outside a table of classes
            likelihood = likelihood_of(self._model)
            f = self._f.cpu()
            likelihood.check_values(f, likelihood.checked(f[:1].expand(len(y), -1), y))
        return (inputs, y), {}


def check_loader(guide: object, batch_size: object, distributed: bool) -> None:
    """Raise if an option of ``fit`` does not go with a loader."""
    if batch_size is not None:
        raise PyroDropoutError(f"batch_size is that of the DataLoader; leave it out. Got {batch_size}.")
    if distributed:
        raise PyroDropoutError("distributed=True needs x and y: its processes divide every batch. Leave it out.")
    if isinstance(guide, Ensemble):
        raise ShapeError("an Ensemble is trained on tensors, x and y, not on a DataLoader.")
