"""One SVI step as a function of tensors: parameters and optimiser state in, new ones out.

Pyro keeps parameters in modules and in its store; a tracer needs them as arguments. Here they are found by running the
loss once, and swapped for the tracer's tensors while the loss runs again. A network that a plain function registers
with ``pyro.module`` is in its closure, among the globals, or anywhere else; what holds its parameters need not be
found: an operation that is given one of them computes with its stand-in.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import pyro
import torch
from pyro import poutine
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.overrides import TorchFunctionMode

from pyro_dropout.engines.engine import WrongStepError
from pyro_dropout.engines.program import Function
from pyro_dropout.engines.torch_internals import function_modes, is_traced
from pyro_dropout.errors import PyroDropoutError
from pyro_dropout.generative.layers import recordable
from pyro_dropout.generative.registration import is_told, note_names, tell_again
from pyro_dropout.generative.trial_run import holders_of, modules_of, owner_of, quietly
from pyro_dropout.protocols import Trace, Tree
from pyro_dropout.training.loss.temperature import at_step
from pyro_dropout.training.optimisers import Update

Gradients = Callable[..., tuple[Tensor, list[Tensor]]]  # (values, buffers, *inputs) -> (loss, gradients)
Call = Callable[..., tuple[Sequence[object], Mapping[str, object]]]  # a step's inputs -> the model's (args, kwargs)
_Holder = tuple[dict[str, Any], str]  # where a module holds a tensor: its own dictionary, and the key there


@runtime_checkable
class Loss(Protocol):
    """A loss whose gradient can be taken, as those of Pyro and ``pyro_dropout.ELBO`` are."""

    @property
    def differentiable_loss(self) -> Callable[..., Tensor]:
        """The loss of (model, guide, *args, **kwargs)."""


class UntrainedError(WrongStepError):
    """A parameter that a script has registered with Pyro gets no gradient."""


class Parameters:
    """The trained tensors of a model and a guide, by their names in Pyro's store; the loss is run once to find them."""

    def __init__(
        self, model: object, guide: object, loss: Loss, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> None:
        capture = poutine.trace(param_only=True)
        with torch.no_grad(), quietly(model, guide), unvalidated(), poutine.block(), capture:
            loss.differentiable_loss(model, guide, *args, **kwargs)
        trace: Trace = capture.trace
        found = {name: site["value"].unconstrained() for name, site in trace.nodes.items()}
        self._aliases: dict[int, list[str]] = {}  # two modules may share a parameter, which is trained once
        for name, value in found.items():
            if value.requires_grad:
                self._aliases.setdefault(id(value), []).append(name)
        self.by_name: dict[str, Tensor] = {names[0]: found[names[0]] for names in self._aliases.values()}
        self.names = list(self.by_name)
        # Gradients of a sum over all points are beyond float16; those of the loss divided by its size are not.
        self.divided = any(p.dtype == torch.float16 for m in modules_of(model) for p in m.parameters(recurse=False))
        self.unused: set[int] = set()  # those that the last gradient did not depend on
        self._checked = False
        places: dict[int, list[_Holder]] = {}
        for module in modules_of(model, guide):
            for key, each in module._parameters.items():
                places.setdefault(id(each), []).append((module._parameters, key))
        self._places = {name: places.get(id(value), []) for name, value in self.by_name.items()}
        owner = owner_of(model if isinstance(owner_of(guide), nn.Module) else guide)
        note_names(owner, [name for name, where in self._places.items() if not where])
        # Pyro's store holds these for networks that are elsewhere: there is nothing to put another tensor into.
        self._elsewhere = [
            name for name, value in self.by_name.items() if isinstance(value, nn.Parameter) and not self._places[name]
        ]

    def current(self) -> bool:
        """Whether these are still the tensors in Pyro's store, and all of them are still trained."""
        store = pyro.get_param_store()._params
        local = pyro.settings.get("module_local_params")
        return all(value.requires_grad and (local or store.get(name) is value) for name, value in self.by_name.items())

    @property
    def values(self) -> list[Tensor]:
        """The tensors, detached, in the order of ``names``."""
        return [value.detach() for value in self.by_name.values()]

    def tell(self, number: int) -> Tensor:
        """Report a parameter to Pyro's handlers, and return the tensor that is in its place now."""
        name = self.names[number]
        stored = stand_in_of(self.by_name[name])
        if stored is None:
            stored = pyro.get_param_store()._params.get(name, self.by_name[name])
        here = next((holder[key] for holder, key in self._places[name]), stored)
        tell_again(name, here)
        return here

    def write(self, values: list[Tensor]) -> None:
        """Make the parameters hold ``values``; the parameter objects stay the same."""
        for target, value in zip(self.by_name.values(), values, strict=True):
            target.data = value

    def copy(self, values: list[Tensor]) -> None:
        """Copy ``values`` into the parameters, whose memory stays the same."""
        with torch.no_grad():
            for target, value in zip(self.by_name.values(), values, strict=True):
                target.copy_(value)

    def check_used(self, gradients: Sequence[Tensor | None]) -> None:
        """Raise an error if the first gradient leaves out a parameter that a script has registered with Pyro.

        A network of this package may have layers that it does not run: what it registers for them is left alone.
        """
        if self._checked:
            return
        pairs = zip(self.by_name.items(), gradients, strict=True)
        lost = [name for (name, value), slope in pairs if slope is None and not is_told(value)]
        if lost:
            named = f"{', '.join(map(repr, lost[:4]))}{' and others' if lost[4:] else ''}"
            raise UntrainedError(
                f"the loss does not depend on {named}, which"
                " pyro.param or pyro.module registers, so it would not be trained. Use it in the model or the guide,"
                " leave it unregistered, or freeze it with requires_grad_(False)."
            )
        self._checked = True

    @contextlib.contextmanager
    def replaced(self, values: list[Tensor]) -> Iterator[None]:
        """Within the context, modules and Pyro's store hold ``values`` in the parameters' places."""
        store = pyro.get_param_store()._params
        now = dict(zip(self.names, values, strict=True))
        pairs = {id(self.by_name[name]): now.pop(name) for name in self._elsewhere}
        places = [(holder, value) for name, value in now.items() for holder in self._places[name]]
        places += [((store, alias), now[name]) for name in now for alias in self._aliases[id(self.by_name[name])]]
        with _swapped(places), StandIns(pairs) if pairs else contextlib.nullcontext():
            yield


class Buffers:
    """The tensors of a model and a guide that are not trained: settings such as keep, τ and length-scales."""

    def __init__(self, model: object, guide: object) -> None:
        roots = [(label, root) for label, root in (("guide", guide), ("model", model)) if isinstance(root, nn.Module)]
        paths = {id(module): f"{label}.{path}" for label, root in roots for path, module in root.named_modules()}
        self._places: list[_Holder] = []
        self.names: list[str] = []
        for number, module in enumerate(holders_of(model, guide)):
            keys = [key for key, value in module._buffers.items() if value is not None]
            self._places += [(module._buffers, key) for key in keys]
            self.names += [f"{paths.get(id(module), f'called.{number}').rstrip('.')}.{key}" for key in keys]

    @property
    def values(self) -> list[Tensor]:
        """The tensors, in the order of ``names``."""
        return [holder[key] for holder, key in self._places]

    def replaced(self, values: list[Tensor]) -> contextlib.AbstractContextManager[None]:
        """Within the context, modules hold ``values`` in the buffers' places."""
        return _swapped(list(zip(self._places, values, strict=True)))


@contextlib.contextmanager
def _swapped(pairs: list[tuple[_Holder, Tensor]]) -> Iterator[None]:
    """Within the context, dictionaries hold other tensors in these places."""
    kept = [holder.get(key) for (holder, key), _ in pairs]
    try:
        for (holder, key), value in pairs:
            holder[key] = value
        yield
    finally:
        for ((holder, key), _), before in zip(pairs, kept, strict=True):
            if before is None:
                holder.pop(key, None)
            else:
                holder[key] = before


@contextlib.contextmanager
def unvalidated() -> Iterator[None]:
    """Switch off checks that read values: a tracer has none."""
    before = Distribution._validate_args
    with pyro.validation_enabled(False):
        Distribution.set_default_validate_args(False)
        try:
            yield
        finally:
            Distribution.set_default_validate_args(before)


def loss_and_gradients(
    model: object,
    guide: object,
    loss: Loss,
    parameters: Parameters,
    values: list[Tensor],
    args: Sequence[object],
    kwargs: Mapping[str, object],
) -> tuple[Tensor, list[Tensor]]:
    """Return the loss and its gradient in each parameter, as a pure function of ``values``."""
    if not values:
        raise PyroDropoutError("there is nothing to train: model and guide have no parameter with requires_grad=True.")
    leaves = [value.detach().requires_grad_() for value in values]
    lstm = recordable(holders_of(model, guide), is_traced())
    with torch.enable_grad(), unvalidated(), lstm, poutine.block(), parameters.replaced(leaves):
        value = loss.differentiable_loss(model, guide, *args, **kwargs)
        size = value.detach().abs().clamp_min(1) if parameters.divided else None
        gradients = torch.autograd.grad(value if size is None else value / size, leaves, allow_unused=True)
        if size is not None:
            gradients = tuple(None if slope is None else slope * size for slope in gradients)
    parameters.check_used(gradients)
    parameters.unused = {k for k, g in enumerate(gradients) if g is None}
    return value.detach(), [torch.zeros_like(p) if g is None else g for p, g in zip(leaves, gradients, strict=True)]


def make_gradients(model: object, guide: object, loss: Loss, parameters: Parameters, call: Call) -> Gradients:
    """Return gradients_of(values, buffers, *inputs) -> (loss, gradients).

    ``call`` turns the tensor inputs into the model's (args, kwargs). Buffers are inputs too, so that a setting that is
    changed between two steps is seen by a compiled one.
    """
    places = Buffers(model, guide)

    def gradients_of(values: list[Tensor], buffers: list[Tensor], *inputs: Tensor) -> tuple[Tensor, list[Tensor]]:
        args, kwargs = call(*inputs)
        with places.replaced(buffers):
            return loss_and_gradients(model, guide, loss, parameters, values, args, kwargs)

    return gradients_of


def numbered(gradients_of: Gradients) -> Gradients:
    """Return the same function with the number of the step as an input, to be recorded."""

    def at(values: list[Tensor], t: Tensor, *inputs: Tree) -> tuple[Tensor, list[Tensor]]:
        with at_step(t):
            return gradients_of(values, *inputs)

    return at


def make_step(gradients_of: Gradients, parameters: Parameters, update: Update) -> Function:
    """Return step(values, state, t, lr, *inputs) -> (values, state, loss), t the number of the step, from 1."""

    def step(
        values: list[Tensor], state: list[list[Tensor]], t: Tensor, lr: Tensor, *inputs: Tree
    ) -> tuple[list[Tensor], list[list[Tensor]], Tensor]:
        with at_step(t):
            loss, gradients = gradients_of(values, *inputs)
        new_values, new_state = update.step(values, gradients, state, t, lr)
        for k in parameters.unused:  # torch's optimisers skip parameters without a gradient
            new_values[k], new_state[k] = values[k], state[k]
        return new_values, new_state, loss

    return step


# --- networks that no module holds ------------------------------------------------------------------------------------


class StandIns(TorchFunctionMode):
    """Within this context, operations compute with other tensors in the place of some parameters."""

    def __init__(self, pairs: Mapping[int, Tensor]) -> None:
        super().__init__()
        self.pairs = pairs

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation with the stand-ins of its arguments."""
        return func(*map(self._now, args), **{key: self._now(value) for key, value in (kwargs or {}).items()})

    def _now(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.pairs.get(id(value), value)
        if type(value) in (list, tuple):  # as the weights of a recurrent layer
            return type(value)(map(self._now, value))
        return value


def stand_in_of(parameter: Tensor) -> Tensor | None:
    """Return the tensor that stands in for a parameter here; None if there is none."""
    modes = (mode for mode in reversed(function_modes()) if isinstance(mode, StandIns))
    return next((mode.pairs[id(parameter)] for mode in modes if id(parameter) in mode.pairs), None)
