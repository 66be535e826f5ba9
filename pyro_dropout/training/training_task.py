"""What a training run fits: a model call, a guide and a loss; the data are there, or come from a ``DataLoader``."""

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from pyro_dropout.engines.choose import HowCompiled
from pyro_dropout.engines.torch_internals import tree_unflatten
from pyro_dropout.errors import PyroDropoutError, ShapeError
from pyro_dropout.generative.inputs import check_pairs, inputs_of, takes_all
from pyro_dropout.generative.likelihoods import likelihood_of
from pyro_dropout.generative.model_call import ModelCall, is_network, name_of, takes
from pyro_dropout.generative.random_state import forked
from pyro_dropout.generative.trial_run import quietly
from pyro_dropout.guides.ensemble import Ensemble
from pyro_dropout.mathematics.checks import check_count
from pyro_dropout.protocols import PyroModel, Record
from pyro_dropout.training.batches import Batches
from pyro_dropout.training.checkpoints.fingerprint import told_loss
from pyro_dropout.training.checkpoints.tensor_file import digest
from pyro_dropout.training.compile.functional import (
    Buffers,
    Gradients,
    Loss,
    Parameters,
    loss_and_gradients,
    make_gradients,
    unvalidated,
)
from pyro_dropout.training.distributed.process_group import Group
from pyro_dropout.training.early_stopping import Watch
from pyro_dropout.training.loader import Call, Stream, Target, divided, number_of_data
from pyro_dropout.training.loss.elbo import ELBO
from pyro_dropout.training.optimisers import Update
from pyro_dropout.training.preflight import check_data, check_parallel, check_trained, outputs_at
from pyro_dropout.training.runner import Source, TrainingRun, make_run


@dataclass
class TrainingTask:
    """A model call, a guide and a loss: what a training run fits."""

    guide: PyroModel
    loss: Loss
    call: ModelCall

    @property
    def parts(self) -> tuple[PyroModel, PyroModel, Loss]:
        """Model, guide and loss."""
        return self.call.model, self.guide, self.loss

    less = "a smaller batch_size"  # what to do if a step does not fit into memory
    guarded = True  # whether steps that are not finite may be left out
    fatal: ClassVar[tuple[type[Exception], ...]] = ()  # errors that are no reason for another engine

    def start(
        self,
        update: Update,
        batch: int,
        compile: HowCompiled,
        seed: int | None = None,
        group: Group | None = None,
    ) -> TrainingRun:
        """Return a training run, ready to start: one of this process, or one of all ranks of a group.

        Ranks draw masks of their own, and the same batches.
        """
        base = 0
        if group is not None:
            check_parallel(self.call, batch, group.world, compile)
            base = group.one_seed(seed)
            torch.manual_seed(base)
        parameters = self._parameters(batch)
        batches, gradients_of = self._batches(batch), self._gradients(parameters)
        how: Any = {"batches": batches, "compile": compile, "fatal": self.fatal, "guarded": self.guarded}
        if group is not None:
            start_alike(group, self.parts[:2], parameters)
            gradients_of = SharedGradients(group, self, parameters, batch)
            how |= {"compile": False, "guarded": False}
        how["inputs"] = (Buffers(self.call.model, self.guide).values,)
        with quietly(self.call.model, self.guide):  # compiling runs the model, whose buffers must not change
            run = self._within_memory(lambda: make_run(gradients_of, parameters, update, **how))
        if group is not None:
            torch.manual_seed(group.seed(base))
        return run

    def _within_memory(self, work: Callable[[], TrainingRun]) -> TrainingRun:
        return work()

    def _gradients(self, parameters: Parameters) -> Gradients:
        return make_gradients(*self.parts, parameters, self._arguments)

    def _parameters(self, batch: int) -> Parameters:
        first = self.call if batch == (self.call.count or 1) else self.call.at(slice(0, batch))
        found = Parameters(*self.parts, first.args, first.kwargs)
        check_trained(found.names, self.guide)
        return found

    def trial(self, batch: int) -> None:
        """Run the loss of a step once, and leave no trace of it."""
        with forked():
            self._parameters(batch)

    def _batches(self, batch: int) -> Source | None:
        count = self.call.count or 1
        if batch == count:
            return None
        device = next(leaf for leaf in self.call.leaves() if leaf.dim()).device
        return Batches(batch, torch.arange(count, device=device))

    def watch(
        self, call: ModelCall, run: TrainingRun, patience: int, every: int, seed: int | None, group: Group
    ) -> Watch:
        """Return what stops the training early, by the held-out data of ``call``."""
        return Watch(call, self.guide, run, patience, every, seed, group)

    def _arguments(self, *index: Tensor) -> tuple[tuple[object, ...], dict[str, object]]:
        call = self.call.at(index[0]) if index else self.call
        return call.args, call.kwargs

    def facts(self) -> Record:
        """Return what must be the same when the training is resumed."""
        leaves = list(self.call.leaves())
        names = ("x", "y") if len(leaves) == 2 else [f"tensor {k}" for k in range(len(leaves))]
        return {name: digest(leaf) for name, leaf in zip(names, leaves, strict=True)} | {
            "loss": told_loss(self.loss, self.call.model)
        }

    def blame(self) -> str:
        """Name a site whose term is not finite at the published parameters; "" if there is none."""
        if not isinstance(self.loss, ELBO):
            return ""
        # Parameters that are not finite spoil running means, and some distributions reject them.
        with (
            torch.no_grad(),
            unvalidated(),
            quietly(self.call.model, self.guide),
            contextlib.suppress(RuntimeError, ValueError),
        ):
            terms = self.loss.by_site(self.call.model, self.guide, *self.call.args, **self.call.kwargs)
            return next((name for name, term in terms.items() if not bool(torch.isfinite(term).all())), "")
        return ""


# --- a DataLoader -----------------------------------------------------------------------------------------------------


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


# --- several processes ------------------------------------------------------------------------------------------------
#
# With N points, a batch of B and R ranks, rank r has s_r of the batch's points, and its loss is that of a mini-batch of
# s_r, L_r = (N / s_r) Σ_{i in share} -log p(y_i | w) + KL. The gradients of (R s_r / B) L_r are averaged over ranks,
# and since Σ_r s_r = B, that average is (N / B) Σ_{i in batch} -log p(y_i | w) + KL: the loss of the whole batch with
# one KL, even if B is not a multiple of R.


class SharedGradients:
    """The gradients of a batch that is split among the ranks, as a function of parameters, buffers and indices."""

    def __init__(self, group: Group, task: TrainingTask, parameters: Parameters, batch: int) -> None:
        model, guide, _ = self._parts = task.parts
        (x, self._y), self._group, self._parameters = task.call.args[:2], group, parameters
        self._x = x
        self._share = group.share(batch)
        self._weight = group.world * (self._share.stop - self._share.start) / batch
        self._places = Buffers(model, guide)
        first = [torch.arange(batch, device=x.device)] if batch < len(x) else []
        before = [buffer.clone() for buffer in self._places.values]
        with quietly(model, guide):
            self._own(parameters.values, *first)
            moved = [not torch.equal(*pair) for pair in zip(before, self._places.values, strict=True)]
        self._changing = [k for k, any_rank in enumerate(group.any(*moved)) if any_rank]

    def __call__(self, values: list[Tensor], buffers: list[Tensor], *index: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return this rank's part of the loss, whose mean over ranks is the loss, and the whole gradients."""
        with self._places.replaced(buffers):
            loss, gradients = self._own(values, *index)
        found = [buffers[k] for k in self._changing]
        # Running means are averaged; whole numbers, such as how many batches were seen, are those of the first rank.
        self._average([*gradients, *(buffer for buffer in found if buffer.is_floating_point())])
        self._group.copy_from_first([buffer for buffer in found if not buffer.is_floating_point()])
        return loss, gradients

    def _own(self, values: list[Tensor], *index: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the weighted loss of this rank's share of a batch, and its gradients."""
        rows = index[0][self._share] if index else self._share
        args = (self._x[rows], self._y[rows], len(self._x))
        loss, gradients = loss_and_gradients(*self._parts, self._parameters, values, args, {})
        self._parameters.unused = set()  # another rank's share may depend on them
        return self._weight * loss, [self._weight * slope for slope in gradients]

    def _average(self, tensors: list[Tensor]) -> None:
        """Replace tensors by their means over ranks, in one message for each type."""
        if self._group.world == 1:
            return
        for kind in dict.fromkeys(tensor.dtype for tensor in tensors):
            own = [tensor for tensor in tensors if tensor.dtype == kind]
            flat = torch.cat([tensor.reshape(-1) for tensor in own]) / self._group.world
            dist.all_reduce(flat)
            for tensor, mean in zip(own, flat.split([tensor.numel() for tensor in own]), strict=True):
                tensor.copy_(mean.reshape(tensor.shape))


def start_alike(group: Group, parts: Iterable[object], parameters: Parameters) -> None:
    """Give all ranks the tensors of the first: those of modules, and what is trained; raise unless they are alike."""
    modules = [part for part in parts if isinstance(part, nn.Module)]
    tensors = {id(t): t for module in modules for t in (*module.parameters(), *module.buffers())}
    tensors |= {id(tensor): tensor for tensor in parameters.by_name.values()}
    group.check_same({"the tensors of model and guide": [[*t.shape, str(t.dtype)] for t in tensors.values()]})
    group.copy_from_first(list(tensors.values()))
