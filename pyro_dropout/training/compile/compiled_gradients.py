"""The loss and its gradient for arguments of one structure: traced through Pyro, compiled, checked before every use.

Arguments are trees: dicts, lists, tuples and named tuples of tensors, numbers and text, nested as you like. Every
tensor and every float in them is an input of the program; everything else is part of its structure.
"""

import enum
from collections.abc import Hashable
from typing import Any

import torch
from pyro import poutine
from torch import Tensor

from pyro_dropout.engines.choose import chosen
from pyro_dropout.engines.engine import Step
from pyro_dropout.engines.torch_internals import tree_flatten, tree_unflatten
from pyro_dropout.errors import PyroDropoutError
from pyro_dropout.generative.trial_run import quietly
from pyro_dropout.protocols import PyroModel
from pyro_dropout.training.compile.captured_state import CapturedState
from pyro_dropout.training.compile.functional import Buffers, Parameters, make_gradients
from pyro_dropout.training.loss.elbo import ELBO
from pyro_dropout.training.loss.temperature import at_step
from pyro_dropout.training.optimisers import clock

_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_PLAIN = (bool, int, float, str, bytes, complex, type(None), type(...), slice, range, enum.Enum, *_OF_TORCH)


class Arguments:
    """The arguments of one call of a model.

    Attributes:
        inputs: all tensors and Python floats, in order.
        key: the structure: two calls with equal keys differ in the values of their inputs only.
        objects: functions and modules among the arguments, which are known by identity.
        unknown: what cannot be searched for tensors, and why; empty if everything can.
    """

    def __init__(self, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        self.args, self.kwargs = args, dict(sorted(kwargs.items()))
        self._leaves, self._spec = tree_flatten((self.args, self.kwargs))
        self.inputs: list[Tensor | float] = []
        self.objects: list[object] = []
        self.unknown = ""
        self.key: Hashable = (self._spec, tuple(map(self._key, self._leaves)))

    def _key(self, leaf: Any) -> Hashable:
        kind = type(leaf)
        if isinstance(leaf, Tensor):
            self.inputs.append(leaf)
            if leaf.requires_grad:
                self.unknown = "a tensor among the arguments requires a gradient, which a compiled step does not give"
            return (kind, leaf.shape, leaf.stride(), leaf.dtype, leaf.device)
        if kind is float:
            self.inputs.append(leaf)
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

    def rebuilt(self, *inputs: Tensor) -> tuple[tuple[object, ...], dict[str, object]]:
        """Return arguments of the same structure with other inputs."""
        others = iter(inputs)
        leaves = [next(others) if isinstance(leaf, Tensor) or type(leaf) is float else leaf for leaf in self._leaves]
        found: tuple[tuple[object, ...], dict[str, object]] = tree_unflatten(leaves, self._spec)
        return found


class CompiledGradients:
    """The loss and its gradient as a program, for arguments of the structure of those ``given``.

    To an engine it is a step whose parameters are the gradient: it writes each one over the one before.
    """

    def __init__(self, model: PyroModel, guide: PyroModel, loss: ELBO, given: Arguments) -> None:
        self._loss = loss
        self._parameters = Parameters(model, guide, loss, given.args, given.kwargs)
        self._buffers = Buffers(model, guide)
        self._outside = CapturedState([model, guide, loss, *given.objects], self._parameters.by_name.values())
        if self._outside.unwatched:
            raise PyroDropoutError(self._outside.unwatched)
        gradients_of = make_gradients(model, guide, loss, self._parameters, given.rebuilt)
        values, buffers = self._parameters.values, len(self._buffers.values)
        own = buffers + len(values)  # of each row; the rest are the model's arguments

        def step(
            _: list[Tensor], state: list[list[Tensor]], t: Tensor, lr: Tensor, *row: Tensor
        ) -> tuple[list[Tensor], list[list[Tensor]], Tensor]:
            with at_step(t):
                loss, gradients = gradients_of(list(row[buffers:own]), list(row[:buffers]), *row[own:])
            return gradients, state, loss

        self._t, lr = clock(0.0, values, 1)
        # Each a tensor of its own, so that one which is found elsewhere, or given twice, is not taken for this one.
        row = [each.detach() for each in self._row(given)]
        if float in map(type, given.inputs):
            self._check_floats(model, guide, given, row[own:])
        gradients = [torch.empty_like(value) for value in values]
        how: Any = {"outside": self._outside.tensors, "chain": 1, "buffers": buffers}
        self._step = Step(step, gradients, [[] for _ in gradients], self._t, lr, row=row, **how)
        with quietly(model, guide):
            self._loop, _ = chosen(True, self._step, warn=_refused)
        self._outside.watch(self._step.recorded.lifted)

    def _check_floats(self, model: PyroModel, guide: PyroModel, given: Arguments, inputs: list[Tensor]) -> None:
        """Raise an error unless the loss is the same with tensors in place of floats."""
        found = []
        for args, kwargs in ((given.args, given.kwargs), given.rebuilt(*inputs)):
            with torch.no_grad(), quietly(model, guide), poutine.block():
                found.append(self._loss.differentiable_loss(model, guide, *args, **kwargs))
        slack = 1e3 * torch.finfo(found[0].dtype).eps
        if not torch.allclose(found[0], found[1].to(found[0]), rtol=slack, atol=slack, equal_nan=True):
            raise PyroDropoutError("a float among the arguments behaves differently as a tensor")

    def _row(self, given: Arguments) -> list[Tensor]:
        """Return what a step is given anew: buffers, parameters, arguments."""
        inputs = [each if isinstance(each, Tensor) else self._t.new_tensor(each) for each in given.inputs]
        return [*self._buffers.values, *self._parameters.values, *inputs]

    def changed(self) -> str:
        """Return what around the model is no longer as it was when this was compiled; "" if nothing."""
        if not self._parameters.current():
            return "the parameter store"
        place = self._outside.changed()
        if place is not None:
            return place.name or "the model"
        program = self._step.recorded
        return "" if program.fits() else program.lifted[0][0].name

    def __call__(self, given: Arguments) -> Tensor:
        """Return the loss, give the parameters their gradients, and report them to Pyro."""
        self._t.fill_(self._loss.steps + 1)  # the loss counts its steps, compiled or not
        loss, _ = self._loop.one(self._row(given))
        self._loss.steps += 1
        for k, parameter in enumerate(self._parameters.by_name.values()):
            self._parameters.tell(k)
            if k not in self._parameters.unused:  # Pyro's optimisers skip those without a gradient
                parameter.grad = self._step.values[k]
        return loss


def _refused(cause: Exception, engine: str) -> None:
    raise cause
