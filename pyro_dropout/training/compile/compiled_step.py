"""One step of SVI for arguments of one structure: traced through Pyro, compiled, and checked before every use."""

from collections.abc import Sequence
from typing import Any

import torch
from pyro import poutine
from pyro.optim.optim import PyroOptim
from torch import Tensor

from pyro_dropout.engines.choose import chosen
from pyro_dropout.engines.engine import Loop, Step
from pyro_dropout.engines.inductor import Chain
from pyro_dropout.engines.program import Function, Program
from pyro_dropout.errors import PyroDropoutError
from pyro_dropout.generative.trial_run import quietly
from pyro_dropout.protocols import PyroModel, Tree
from pyro_dropout.training.compile.arguments import Arguments
from pyro_dropout.training.compile.captured_state import CapturedState, Place
from pyro_dropout.training.compile.functional import (
    Buffers,
    Gradients,
    Loss,
    Parameters,
    make_gradients,
    make_step,
)
from pyro_dropout.training.compile.optimiser_state import OptimiserState
from pyro_dropout.training.loss.elbo import ELBO
from pyro_dropout.training.loss.temperature import at_step
from pyro_dropout.training.optimisers import Update, clock


class CompiledStep:
    """A compiled step; the optimiser's state stays where Pyro keeps it.

    It is traced with the arguments ``given``. ``known`` are steps for arguments of the same structure, whose
    surroundings have since changed. ``fixed`` makes the floats among the arguments part of the structure, because the
    model reads their values.

    Attributes:
        changed: what had invalidated the step at the last check; empty if nothing had.
        replaces: a step of ``known`` that has the same program.
    """

    def __init__(
        self,
        model: PyroModel,
        guide: PyroModel,
        loss: ELBO,
        optim: PyroOptim,
        given: Arguments,
        known: Sequence["CompiledStep"],
        fixed: bool = False,
    ) -> None:
        self.program: Program
        self._loop: Loop
        self.changed = ""
        self._optim, self._given, self._fixed, self.loss = optim, given, fixed, loss
        self._scheduled = callable(loss.temperature)
        self.parameters = Parameters(model, guide, loss, given.args, given.kwargs)
        self.buffers = Buffers(model, guide)
        trained, values = list(self.parameters.by_name.values()), self.parameters.values
        self._dtype = clock(_NO_UPDATE, values, 0)[0].dtype
        inputs = self._inputs(given)
        outside = CapturedState([model, guide, loss, *given.objects], [*trained, *self.buffers.values, *given.tensors])
        if outside.unwatched:
            raise PyroDropoutError(outside.unwatched)
        state = OptimiserState(optim, trained)
        self._update = state.update if state.steps is not None else None
        gradients_of = make_gradients(model, guide, loss, self.parameters, self._call)
        gradients_of = _by_number(gradients_of) if self._scheduled else gradients_of
        buffers = self.buffers.values
        like = [step.program for step in known if step._update is not None]
        if given.floats and not fixed:
            self._check_floats(model, guide, loss, inputs)
        with quietly(model, guide):
            if self._update is None:
                self.program = Program(gradients_of, values, buffers, *inputs, outside=outside.tensors)
            else:
                whole = make_step(gradients_of, self.parameters, self._update)
                self.t, self.lr = clock(self._update, values, 0)
                self._slots = state.read(self._update)
                if self.t.is_cuda:
                    tensors = (values, self._slots, self.t, self.lr, buffers, *inputs)
                    self.program = Program(whole, *tensors, outside=outside.tensors, like=like, captured=True)
                else:
                    self._on_own_tensors(whole, values, inputs, outside, known)
        # torch's optimisers skip parameters that the loss does not depend on.
        self._used = [k for k in range(len(trained)) if k not in self.parameters.unused]
        self._state = OptimiserState(optim, [trained[k] for k in self._used])
        outside.watch(tensor for _, tensor in self.program.lifted)
        # If the program is the same as before, what has changed does not affect it, and is not watched any longer.
        self.replaces = next((step for step in known if step.program is self.program.twin), None)
        self._ignored: list[Place] = []
        if self.replaces is not None:
            self._ignored = [*self.replaces._ignored, *filter(None, [self.replaces._place])]
            outside.forget(self._ignored)
        self._outside = outside
        self._place: Place | None = None
        self._now = self._update
        self.chain: Chain | None = None
        if self._update is not None and self.t.is_cuda:
            self._static = [x.clone() for x in [*inputs, *self.program.outside()]]
            rest = (buffers, *self._static)
            self.chain = Chain(self._fixed_step, values, self._slots, self.t, self.lr, [rest])
            self._captured = self._where()

    def _on_own_tensors(
        self,
        whole: Function,
        values: list[Tensor],
        inputs: list[Tensor],
        outside: CapturedState,
        known: Sequence["CompiledStep"],
    ) -> None:
        """Let an engine take the steps, on tensors that the parameters and the optimiser hold from then on."""
        count = len(self.buffers.values)

        def flat(
            values: list[Tensor], state: list[list[Tensor]], t: Tensor, lr: Tensor, *row: Tensor
        ) -> tuple[list[Tensor], list[list[Tensor]], Tensor]:
            return whole(values, state, t, lr, list(row[:count]), *row[count:])

        copies = [value.clone() for value in values], [[slot.clone() for slot in own] for own in self._slots]
        row = [*self.buffers.values, *inputs]
        like = [each for each in known if each._update is not None]
        more: Any = {"row": row, "outside": outside.tensors, "like": [each.program for each in like]}
        self._step = Step(flat, *copies, self.t, self.lr, **more)
        self.program = self._step.recorded
        same = next((each for each in like if each.program is self.program.twin), None)
        if same is not None:  # its loop goes on, with what is outside in the places where it was found now
            same._step.recorded.lifted = self.program.lifted
            self._step, self._loop, self.t, self.lr = same._step, same._loop, same.t, same.lr
            return
        self._loop, _ = chosen(True, self._step, warn=_not_eagerly)

    def _call(self, *tensors: Tensor) -> tuple[tuple[object, ...], dict[str, object]]:
        """Return the model's arguments with these tensors, and with tensors for floats that are not fixed."""
        count = len(self._given.tensors)
        floats = self._given.floats if self._fixed else tensors[count:]
        return self._given.rebuilt(iter(tensors[:count]), iter(floats))

    def _check_floats(self, model: PyroModel, guide: PyroModel, loss: Loss, inputs: list[Tensor]) -> None:
        """Raise an error unless the loss is the same with tensors in place of floats."""
        found = []
        for args, kwargs in ((self._given.args, self._given.kwargs), self._call(*inputs)):
            with torch.no_grad(), quietly(model, guide), poutine.block():
                found.append(loss.differentiable_loss(model, guide, *args, **kwargs))
        slack = 1e3 * torch.finfo(found[0].dtype).eps
        if not torch.allclose(found[0], found[1].to(found[0]), rtol=slack, atol=slack, equal_nan=True):
            raise PyroDropoutError("a float among the arguments behaves differently as a tensor")

    def _inputs(self, given: Arguments) -> list[Tensor]:
        device = next((p.device for p in self.parameters.by_name.values()), torch.device("cpu"))
        floats = [] if self._fixed else given.floats
        # The loss counts its steps, compiled or not.
        step = [self.loss.steps + 1.0] if self._scheduled else []
        numbers = [torch.tensor(value, dtype=self._dtype, device=device) for value in [*floats, *step]]
        return [*given.tensors, *numbers]

    def _where(self) -> list[int]:
        return [buffer.data_ptr() for buffer in self.buffers.values]

    def _fixed_step(self, *inputs: Tree) -> tuple[list[Tensor], list[list[Tensor]], Tensor]:
        """Use the compiled step with the tensors around the model at fixed addresses, as a CUDA graph requires."""
        count = len(inputs) - len(self.program.lifted)
        values, state, loss = self.program(*inputs[:count], lifted=inputs[count:])
        return values, state, loss

    def valid(self, given: Arguments) -> bool:
        """Whether the step still matches an eager one: nothing around the model has changed."""
        self.changed = self._what_changed(given)
        return not self.changed

    def _what_changed(self, given: Arguments) -> str:
        self._place = None
        if self._fixed and given.floats != self._given.floats:
            return "a float among the arguments"
        if not self.parameters.current():
            return "the parameter store"
        self._place = self._outside.changed()
        if self._place is not None:
            return self._place.name or "the model"
        # A CUDA graph reads buffers at the addresses they had when it was captured.
        if self.chain is not None and self._where() != self._captured:
            return "a buffer"
        if not self.program.fits():
            return self.program.lifted[0][0].name
        if self._update is None:
            return ""
        now = self._now = self._state.update
        same = now is not None and self._state.steps is not None and _settings(now) == _settings(self._update)
        return "" if same else "the optimiser's settings"

    def step(self, given: Arguments) -> Tensor:
        """Take one step with arguments of the same structure, and return the loss before it."""
        inputs = self._inputs(given)
        if self._update is None:
            return self._with_other_optimiser(inputs)
        update = self._now
        assert update is not None
        self.t.fill_((self._state.steps or 0) + 1)
        self.lr.fill_(update.lr)
        if self.chain is not None:
            return self._replay(self.chain, inputs, update)
        return self._advance(self._loop, self._step, inputs, update)

    def _advance(self, loop: Loop, own: Step, inputs: list[Tensor], update: Update) -> Tensor:
        """Take a step on an engine's tensors, which then are those of the parameters and of the optimiser."""
        self._fetch(own.values, own.state, update)
        loss, _ = loop.one([*self.buffers.values, *inputs])
        self.parameters.write(own.values)
        self._state.write(update, [own.state[k] for k in self._used])
        return loss

    def _fetch(self, values: list[Tensor], state: list[list[Tensor]], update: Update) -> None:
        """Copy what a step of another shape, or the user, has put elsewhere."""
        for mine, theirs in zip(values, self.parameters.values, strict=True):
            if mine.data_ptr() != theirs.data_ptr():
                mine.copy_(theirs)
        for k, other in zip(self._used, self._state.read(update), strict=True):
            for slot, value in zip(state[k], other, strict=True):
                if slot is not value:
                    slot.copy_(value)

    def _with_other_optimiser(self, inputs: list[Tensor]) -> Tensor:
        """Compute compiled gradients, and leave the rest to the optimiser."""
        loss, gradients = self.program(self.parameters.values, self.buffers.values, *inputs)
        trained = list(self.parameters.by_name.values())
        for k in self._used:
            trained[k].grad = gradients[k]
        self._optim([trained[k] for k in self._used])
        for parameter in trained:
            parameter.grad = None
        return torch.as_tensor(loss)

    def _replay(self, chain: Chain, inputs: list[Tensor], update: Update) -> Tensor:
        for target, source in zip(self._static, [*inputs, *self.program.outside()], strict=True):
            target.copy_(source)
        self._fetch(chain.values, chain.state, update)
        chain.t.copy_(self.t)
        chain.lr.copy_(self.lr)
        chain.replay()
        self.parameters.write(chain.values)
        self._state.write(update, [chain.state[k] for k in self._used])
        return chain.losses[0]


def _by_number(gradients_of: Gradients) -> Gradients:
    """Return the same function with one more input, the number of the step."""

    def numbered(values: list[Tensor], buffers: list[Tensor], *inputs: Tensor) -> tuple[Tensor, list[Tensor]]:
        *rest, step = inputs
        with at_step(step):
            return gradients_of(values, buffers, *rest)

    return numbered


def _not_eagerly(cause: Exception, engine: str) -> None:
    raise cause


_NO_UPDATE = Update("none", 0.0, 0, lambda p, g, state, *numbers: (p, state))


def _settings(update: Update) -> object:
    """Return the parts of an update that are compiled into a step; the learning rate is an input."""
    return update.name, update.slots, update.options
