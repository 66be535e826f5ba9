"""One training run: what it fits, its parameters, optimiser and data order, and the engine that takes the steps.

A run changes always the same tensors. Those of a guide are its own, so that parameters exist once; those of a fleet
belong to the run, and ``publish`` puts them back.
"""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from pyro_dropout.engines.choose import HowCompiled, chosen
from pyro_dropout.engines.engine import CHAIN, Direct, Eager, Step, copied, copy_into, is_large
from pyro_dropout.engines.program import apart_in_memory
from pyro_dropout.engines.torch_internals import tree_unflatten
from pyro_dropout.generative.model_call import ModelCall
from pyro_dropout.generative.precision import precision_now, products_in
from pyro_dropout.generative.process_state import forked
from pyro_dropout.generative.trial_run import quietly
from pyro_dropout.protocols import PyroModel, Record, Tree
from pyro_dropout.training.batches import Batches, Stream
from pyro_dropout.training.checkpoints.fingerprint import told_loss
from pyro_dropout.training.checkpoints.tensor_file import digest
from pyro_dropout.training.compile.functional import (
    Arguments,
    Buffers,
    Gradients,
    Loss,
    Parameters,
    make_gradients,
    make_step,
    numbered,
    unvalidated,
)
from pyro_dropout.training.history import is_divergence
from pyro_dropout.training.loss.elbo import ELBO
from pyro_dropout.training.optimisers import TorchOptimiser, Update, clock
from pyro_dropout.training.preflight import check_trained
from pyro_dropout.training.svi import warn_uncompiled

Source = Batches | Stream  # where mini-batches come from
_MANY = 2**20  # more steps than any engine takes at once


class TrainingRun:
    """One training run: a step of tensors that is taken repeatedly, on mini-batches from ``batches`` if there are any.

    ``write`` puts parameters into their owners, unless a step changes these themselves. ``buffers`` are the tensors of
    model and guide, by name, that a step may change as it runs them, such as running statistics.
    """

    def __init__(
        self,
        step: Step,
        *,
        write: Callable[[list[Tensor]], None] | None = None,
        buffers: dict[str, Tensor] | None = None,
        batches: Source | None = None,
        compile: HowCompiled = "auto",
        beside: TorchOptimiser | None = None,
    ) -> None:
        self._step, self._write, self._batches, self._beside = step, write, batches, beside
        self.buffers = {} if buffers is None else buffers
        self._precision, self._eager = precision_now(), Direct(step)
        self.refused = False  # whether the last step was left out, because its loss or gradient was not finite
        self.failed: Exception | None = None  # torch's, which ended the last step, because its numbers have diverged
        self.break_off: Callable[[], bool] = lambda: False  # asked after each step: are no more wanted?
        self.agreed: Callable[..., Any] = lambda *numbers: numbers  # by all processes that share the run
        self.shared = False  # whether there are several
        self.ready: Callable[[], None] = lambda: None  # called before the first step, after a checkpoint is restored
        self.compile_seconds = 0.0
        start = time.perf_counter()
        self._loop, self.why = chosen(compile, step, around=forked, warn=warn_uncompiled)
        if self.engine != Eager.name:
            self.compile_seconds = time.perf_counter() - start

    @property
    def engine(self) -> str:
        """What takes the steps."""
        return self._loop.name

    @property
    def chained(self) -> bool:
        """Whether steps are taken in blocks of a fixed size."""
        return self._loop.at_once(1) == 0 < self._loop.at_once(CHAIN)

    @property
    def together(self) -> int:
        """How many steps are best taken before the next look at the clock."""
        return max(CHAIN, self._loop.at_once(_MANY))

    @property
    def guarded(self) -> bool:
        """Whether a step that is not finite is not taken, so that the parameters stay good."""
        return self._loop.guarded

    def advance(self, steps: int) -> Tensor:
        """Take ``steps`` steps, or fewer but at least one; return the loss before each."""
        count = self._loop.at_once(steps)
        if count:
            return self._loop.many(count, self._batches.take(count) if isinstance(self._batches, Batches) else None)
        count = min(steps, CHAIN if self._batches is None else self._batches.together)
        losses = []
        with products_in(self._precision):
            for row in [[]] * count if self._batches is None else self._batches.inputs(count):
                usual = not isinstance(self._batches, Stream) or self._batches.usual(row)
                try:
                    loss, taken = (self._loop if usual else self._eager).one(row)
                except (RuntimeError, ValueError) as cause:
                    if not is_divergence(cause, self.values):
                        raise
                    self.failed = cause
                    break
                losses.append(loss)
                self.refused = not taken
                if self.refused or self.break_off():
                    break
        return torch.stack(losses) if losses else self.t.new_empty(0)

    # --- the tensors that steps change --------------------------------------------------------------------------------

    @property
    def t(self) -> Tensor:
        """The number of the next step."""
        return self._loop.changed[-1]

    @property
    def values(self) -> list[Tensor]:
        """The current parameters."""
        return self._loop.changed[: len(self._step.values)]

    @property
    def held(self) -> list[Tensor]:
        """What a trained model is made of: the current parameters, then the buffers."""
        return [*self.values, *self.buffers.values()]

    def snapshot(self) -> list[Tensor]:
        """Return a copy of parameters and buffers."""
        return copied(self.held)

    def restore(self, values: list[Tensor]) -> None:
        """Restore a snapshot of parameters and buffers; the optimiser's state stays as it is."""
        copy_into(self.held, values)

    def publish(self) -> None:
        """Put copies of the current parameters back into their owners, unless these have them."""
        if self._write is not None:
            self._write(copied(self.values))

    def _named(self) -> dict[str, Tensor]:
        *leaves, t = self._loop.changed
        return {f"leaf.{k:05d}": leaf for k, leaf in enumerate(leaves)} | {"t": t}

    def state(self) -> tuple[dict[str, Tensor], Record]:
        """Return everything that later steps depend on, except the random generators: tensors by name, and the rest."""
        found = {name: value.detach() for name, value in self._named().items()} | self._loop.kept
        if self._batches is not None:
            found |= self._batches.state()
        held, rest = ({}, {}) if self._beside is None else self._beside.state()
        return found | held, rest

    def set_state(self, tensors: dict[str, Tensor], rest: Record) -> None:
        """Restore a state; one that another engine has left may lack what this one keeps."""
        if self._beside is not None:
            self._beside.set_state(tensors, rest)
        kept = {name: value for name, value in self._loop.kept.items() if name in tensors}
        targets = self._named() | kept
        copy_into([*targets.values()], [tensors[name] for name in targets])
        if self._batches is not None:
            self._batches.set_state(tensors)


def surroundings(
    values: list[Tensor], update: Update, inputs: tuple[Tree, ...], batches: Source | None
) -> dict[str, Any]:
    """Return what a step has besides its functions, parameters and state."""
    t, lr = clock(update.lr, values, 1)
    row = [] if batches is None else batches.example()
    return {"t": t, "lr": lr, "inputs": inputs, "row": row, "chain": CHAIN if batches is None or batches.chained else 0}


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
    told: Record = field(default_factory=dict, init=False)  # which parameters are trained, once it has started

    less: ClassVar[str] = "a smaller batch_size"  # what to do if a step does not fit into memory
    guarded: ClassVar[bool] = True  # whether steps that are not finite may be left out

    @property
    def parts(self) -> tuple[PyroModel, PyroModel, Loss]:
        """Model, guide and loss."""
        return self.call.model, self.guide, self.loss

    def start(self, update: Update, batch: int, compile: HowCompiled) -> TrainingRun:
        """Return a training run, ready to start."""
        count = self.call.count or 1
        first = self.call if batch == count else self.call.at(slice(0, batch))
        parameters = Parameters(*self.parts, first.args, first.kwargs)
        check_trained(parameters.names, self.guide)
        batches: Batches | Stream | None = self.stream
        if batches is None and batch < count:
            device = next(leaf for leaf in self.call.leaves() if leaf.dim()).device
            batches = Batches(batch, torch.arange(count, device=device))
        gradients_of, places = self._gradients(parameters, first), Buffers(self.call.model, self.guide)
        buffers = places.values
        values, write = parameters.values, None
        beside = None
        self.told = parameters.told
        if update.optimiser is not None:
            beside = TorchOptimiser(update, list(parameters.by_name.values()), self.guide)
            self.told |= beside.told
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

    def _gradients(self, parameters: Parameters, call: ModelCall) -> Gradients:
        """Return what a step differentiates, as a function of tensors; ``call`` has a batch like any other."""
        return make_gradients(*self.parts, parameters, self._arguments)

    def _arguments(self, *row: Tensor) -> Arguments:
        """Return the model's arguments at a step: those at an index, or those that a batch of the stream holds."""
        if self.stream is not None:
            args, kwargs = tree_unflatten(row, self.stream.spec)
            return (*args, *self.call.args[len(args) :]), {**self.call.kwargs, **kwargs}
        call = self.call.at(row[0]) if row else self.call
        return call.args, call.kwargs

    def facts(self) -> Record:
        """Return what must be the same when the training is resumed."""
        told = {"loss": told_loss(self.loss, self.call.model), **self.told}
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
