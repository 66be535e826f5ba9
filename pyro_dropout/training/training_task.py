"""What a training run fits: a model call, a guide and a loss; the data are there, or come from a ``DataLoader``."""

import contextlib
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pyro_dropout.engines.choose import HowCompiled
from pyro_dropout.engines.engine import Step, is_large
from pyro_dropout.engines.program import apart_in_memory
from pyro_dropout.engines.torch_internals import tree_unflatten
from pyro_dropout.generative.model_call import ModelCall
from pyro_dropout.generative.trial_run import quietly
from pyro_dropout.protocols import PyroModel, Record
from pyro_dropout.training.batches import Batches, Stream
from pyro_dropout.training.checkpoints.fingerprint import told_loss
from pyro_dropout.training.checkpoints.tensor_file import digest
from pyro_dropout.training.compile.functional import (
    Buffers,
    Gradients,
    Loss,
    Parameters,
    make_gradients,
    make_step,
    numbered,
    unvalidated,
)
from pyro_dropout.training.early_stopping import Watch
from pyro_dropout.training.loss.elbo import ELBO
from pyro_dropout.training.optimisers import TorchOptimiser, Update
from pyro_dropout.training.preflight import check_trained
from pyro_dropout.training.runner import TrainingRun, surroundings


@dataclass
class TrainingTask:
    """A model call, a guide and a loss: what a training run fits.

    Attributes:
        call: with all data, or with the first batch of a stream.
        stream: every step has its next batch; None if the data are in ``call``.
    """

    guide: PyroModel
    loss: Loss
    call: ModelCall
    stream: Stream | None = None

    less: ClassVar[str] = "a smaller batch_size"  # what to do if a step does not fit into memory
    guarded: ClassVar[bool] = True  # whether steps that are not finite may be left out
    watched_by: ClassVar[type[Watch]] = Watch  # what stops the training early

    @property
    def parts(self) -> tuple[PyroModel, PyroModel, Loss]:
        """Model, guide and loss."""
        return self.call.model, self.guide, self.loss

    def start(self, update: Update, batch: int, compile: HowCompiled) -> TrainingRun:
        """Return a training run, ready to start."""
        parameters, count = self._parameters(batch), self.call.count or 1
        batches: Batches | Stream | None = self.stream
        if batches is None and batch < count:
            device = next(leaf for leaf in self.call.leaves() if leaf.dim()).device
            batches = Batches(batch, torch.arange(count, device=device))
        gradients_of, places = self._gradients(parameters), Buffers(self.call.model, self.guide)
        buffers = places.values
        values, write = parameters.values, None
        beside = None if update.optimiser is None else TorchOptimiser(update, list(parameters.by_name.values()))
        # Weights of a recurrent layer on a GPU are parts of one tensor.
        if beside is None and not apart_in_memory([*values, *buffers], len(values)):
            values, write = [value.clone() for value in values], parameters.copy
        around, state = surroundings(values, update, (buffers,), batches), update.start(values)
        t, lr = around["t"], around["lr"]

        def move(gradients: list[Tensor]) -> None:
            if beside is not None:
                beside.move(values, gradients, t)
            else:
                some = [k for k in range(len(values)) if k not in parameters.unused]
                own = [values[k] for k in some], [gradients[k] for k in some], [state[k] for k in some]
                update.in_place(*own, t, lr)
            t.add_(1)

        whole = make_step(gradients_of, parameters, update) if beside is None else None
        # Steps of a large network are left out if they are not finite; others are taken back, by copied parameters.
        around["guarded"] = self.guarded and beside is None and is_large(values)
        step = Step(whole, values, state, gradient=numbered(gradients_of), move=move, **around)
        with quietly(self.call.model, self.guide):  # compiling runs the model, whose buffers must not change
            own = dict(zip(places.names, buffers, strict=True))
            return TrainingRun(step, write=write, buffers=own, batches=batches, compile=compile, beside=beside)

    def _gradients(self, parameters: Parameters) -> Gradients:
        return make_gradients(*self.parts, parameters, self._arguments)

    def _parameters(self, batch: int) -> Parameters:
        first = self.call if batch == (self.call.count or 1) else self.call.at(slice(0, batch))
        found = Parameters(*self.parts, first.args, first.kwargs)
        check_trained(found.names, self.guide)
        return found

    def _arguments(self, *row: Tensor) -> tuple[tuple[object, ...], dict[str, object]]:
        """Return the model's arguments at a step: those at an index, or those that a batch of the stream holds."""
        if self.stream is not None:
            args, kwargs = tree_unflatten(row, self.stream.spec)
            return (*args, *self.call.args[len(args) :]), {**self.call.kwargs, **kwargs}
        call = self.call.at(row[0]) if row else self.call
        return call.args, call.kwargs

    def facts(self) -> Record:
        """Return what must be the same when the training is resumed."""
        told = {"loss": told_loss(self.loss, self.call.model)}
        if self.stream is not None:
            return self.stream.facts() | told
        leaves = list(self.call.leaves())
        names = ("x", "y") if len(leaves) == 2 else [f"tensor {k}" for k in range(len(leaves))]
        return {name: digest(leaf) for name, leaf in zip(names, leaves, strict=True)} | told

    def blame(self) -> str:
        """Name a site whose term is not finite at the published parameters; "" if there is none."""
        if not isinstance(self.loss, ELBO):
            return ""
        # Parameters that are not finite spoil running means, and some distributions reject them.
        rejected = contextlib.suppress(RuntimeError, ValueError)
        with torch.no_grad(), unvalidated(), quietly(self.call.model, self.guide), rejected:
            terms = self.loss.by_site(self.call.model, self.guide, *self.call.args, **self.call.kwargs)
            return next((name for name, term in terms.items() if not bool(torch.isfinite(term).all())), "")
        return ""
