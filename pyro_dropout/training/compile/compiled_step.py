"""One step of SVI for arguments of one structure: traced through Pyro, compiled, and checked before every use.

Arguments are trees: dicts, lists, tuples and named tuples of tensors, numbers and text, nested as you like. Every
tensor and every float in them is an input of a compiled step; everything else is part of its structure.
"""

import enum
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from pyro import poutine
from pyro.optim.optim import PyroOptim
from torch import Tensor

from pyro_dropout.engines.choose import chosen
from pyro_dropout.engines.engine import Loop, Step
from pyro_dropout.engines.program import Function, Program
from pyro_dropout.engines.torch_internals import tree_flatten, tree_unflatten
from pyro_dropout.errors import PyroDropoutError
from pyro_dropout.generative.trial_run import quietly
from pyro_dropout.protocols import PyroModel
from pyro_dropout.training.compile.captured_state import CapturedState, Place
from pyro_dropout.training.compile.functional import Buffers, Gradients, Parameters, make_gradients, make_step
from pyro_dropout.training.compile.optimiser_state import OptimiserState
from pyro_dropout.training.loss.elbo import ELBO
from pyro_dropout.training.loss.temperature import at_step
from pyro_dropout.training.optimisers import Update, clock

_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_PLAIN = (bool, int, float, str, bytes, complex, type(None), type(...), slice, range, enum.Enum, *_OF_TORCH)


class Arguments:
    """The arguments of one call of a model.

    Attributes:
        tensors: all tensors, in order.
        floats: all Python floats, in order.
        key: the structure: two calls with equal keys differ in the values of tensors and floats only.
        objects: functions and modules among the arguments, which are known by identity.
        unknown: what cannot be searched for tensors, and why; empty if everything can.
    """

    def __init__(self, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        self.args, self.kwargs = args, dict(sorted(kwargs.items()))
        self._leaves, self._spec = tree_flatten((self.args, self.kwargs))
        self.tensors: list[Tensor] = []
        self.floats: list[float] = []
        self.objects: list[object] = []
        self.unknown = ""
        self.key: Hashable = (self._spec, tuple(map(self._key, self._leaves)))

    def _key(self, leaf: Any) -> Hashable:
        kind = type(leaf)
        if isinstance(leaf, Tensor):
            self.tensors.append(leaf)
            if leaf.requires_grad:
                self.unknown = "a tensor among the arguments requires a gradient, which a compiled step does not give"
            return (kind, leaf.shape, leaf.stride(), leaf.dtype, leaf.device)
        if kind is float:
            self.floats.append(leaf)
            return float
        if isinstance(leaf, _PLAIN):
            return (kind, (leaf.start, leaf.stop, leaf.step) if isinstance(leaf, slice) else leaf)
        if callable(leaf):  # compared by identity, and searched as surroundings
            self.objects.append(leaf)
        else:
            self.unknown = (
                f"an argument is a {kind.__module__}.{kind.__qualname__}, which cannot be searched for tensors; pass"
                " tensors, numbers, or dicts, lists and tuples of them"
            )
        return (kind, id(leaf))

    def rebuilt(
        self, tensors: Iterator[Tensor], floats: Iterator[float | Tensor]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        """Return arguments of the same structure with other tensors and floats."""
        leaves = [
            next(tensors) if isinstance(leaf, Tensor) else next(floats) if type(leaf) is float else leaf
            for leaf in self._leaves
        ]
        found: tuple[tuple[object, ...], dict[str, object]] = tree_unflatten(leaves, self._spec)
        return found


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
        self.changed = ""
        self._optim, self._given, self._fixed, self.loss = optim, given, fixed, loss
        self._scheduled = callable(loss.temperature)
        self.parameters = Parameters(model, guide, loss, given.args, given.kwargs)
        self.buffers = Buffers(model, guide)
        trained, values = list(self.parameters.by_name.values()), self.parameters.values
        state = OptimiserState(optim, trained)
        self._update = self._now = state.update if state.steps is not None else None
        self.t, self.lr = clock(self._update or _NO_UPDATE, values, 0)
        inputs = self._inputs(given)
        self._outside = CapturedState(
            [model, guide, loss, *given.objects], [*trained, *self.buffers.values, *given.tensors]
        )
        if self._outside.unwatched:
            raise PyroDropoutError(self._outside.unwatched)
        gradients_of = make_gradients(model, guide, loss, self.parameters, self._call)
        gradients_of = _by_number(gradients_of) if self._scheduled else gradients_of
        if given.floats and not fixed:
            self._check_floats(model, guide, inputs)
        self._own: Step | None = None
        self._loop: Loop
        with quietly(model, guide):
            if self._update is None:
                self.program = Program(
                    gradients_of, values, self.buffers.values, *inputs, outside=self._outside.tensors
                )
            else:
                whole, slots = make_step(gradients_of, self.parameters, self._update), state.read(self._update)
                like = [step for step in known if step._update is not None]
                self._by_an_engine(whole, values, slots, inputs, like)
        # torch's optimisers skip parameters that the loss does not depend on.
        self._used = [k for k in range(len(trained)) if k not in self.parameters.unused]
        self._state = OptimiserState(optim, [trained[k] for k in self._used])
        self._outside.watch(tensor for _, tensor in self.program.lifted)
        # If the program is the same as before, what has changed does not affect it, and is not watched any longer.
        self.replaces = next((step for step in known if step.program is self.program.twin), None)
        self._place: Place | None = None
        self._ignored: list[Place] = []
        if self.replaces is not None:
            self._ignored = [*self.replaces._ignored, *filter(None, [self.replaces._place])]
            self._outside.forget(self._ignored)

    def _by_an_engine(
        self,
        whole: Function,
        values: list[Tensor],
        slots: list[list[Tensor]],
        inputs: list[Tensor],
        like: Sequence["CompiledStep"],
    ) -> None:
        """Let an engine take the steps, on tensors that the parameters and the optimiser hold from then on."""
        count = len(self.buffers.values)

        def flat(
            values: list[Tensor], state: list[list[Tensor]], t: Tensor, lr: Tensor, *row: Tensor
        ) -> tuple[list[Tensor], list[list[Tensor]], Tensor]:
            return whole(values, state, t, lr, list(row[:count]), *row[count:])

        copies = [value.clone() for value in values], [[slot.clone() for slot in own] for own in slots]
        more: Any = {"row": [*self.buffers.values, *inputs], "outside": self._outside.tensors}
        more |= {"chain": 1, "buffers": count}
        step = Step(flat, *copies, self.t, self.lr, like=[each.program for each in like], **more)
        self.program = step.recorded
        same = next((each for each in like if each.program is self.program.twin), None)
        if same is not None:  # its loop goes on, with what is outside in the places where it was found now
            assert same._own is not None
            same._own.recorded.lifted[:] = self.program.lifted
            self._own, self._loop, self.t, self.lr = same._own, same._loop, same.t, same.lr
            return
        self._own, (self._loop, _) = step, chosen(True, step, warn=_not_eagerly)

    def _call(self, *tensors: Tensor) -> tuple[tuple[object, ...], dict[str, object]]:
        """Return the model's arguments with these tensors, and with tensors for floats that are not fixed."""
        count = len(self._given.tensors)
        floats = self._given.floats if self._fixed else tensors[count:]
        return self._given.rebuilt(iter(tensors[:count]), iter(floats))

    def _check_floats(self, model: PyroModel, guide: PyroModel, inputs: list[Tensor]) -> None:
        """Raise an error unless the loss is the same with tensors in place of floats."""
        found = []
        for args, kwargs in ((self._given.args, self._given.kwargs), self._call(*inputs)):
            with torch.no_grad(), quietly(model, guide), poutine.block():
                found.append(self.loss.differentiable_loss(model, guide, *args, **kwargs))
        slack = 1e3 * torch.finfo(found[0].dtype).eps
        if not torch.allclose(found[0], found[1].to(found[0]), rtol=slack, atol=slack, equal_nan=True):
            raise PyroDropoutError("a float among the arguments behaves differently as a tensor")

    def _inputs(self, given: Arguments) -> list[Tensor]:
        floats = [] if self._fixed else given.floats
        step = [self.loss.steps + 1.0] if self._scheduled else []  # the loss counts its steps, compiled or not
        return [*given.tensors, *(self.t.new_tensor(value) for value in [*floats, *step])]

    # --- before every use ---------------------------------------------------------------------------------------------

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
        if not self.program.fits():
            return self.program.lifted[0][0].name
        if self._update is None:
            return ""
        now = self._now = self._state.update
        same = now is not None and self._state.steps is not None and _settings(now) == _settings(self._update)
        return "" if same else "the optimiser's settings"

    # --- the step -----------------------------------------------------------------------------------------------------

    def step(self, given: Arguments) -> Tensor:
        """Take one step with arguments of the same structure, and return the loss before it."""
        inputs, own, update = self._inputs(given), self._own, self._now
        if own is None or update is None:
            return self._with_other_optimiser(inputs)
        own.t.fill_((self._state.steps or 0) + 1)
        own.lr.fill_(update.lr)
        self._fetch(own.values, own.state, update)
        loss, _ = self._loop.one([*self.buffers.values, *inputs])
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
