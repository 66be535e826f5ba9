"""One SVI step as a function of tensors: parameters and optimiser state in, new ones out.

Pyro keeps parameters in modules and in its store; a tracer needs them as arguments. Here they are found by running the
loss once, and swapped for the tracer's tensors while the loss runs again. A network that a plain function registers
with ``pyro.module`` may be anywhere; it is found as it is called.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import pyro
import torch
from pyro import poutine
from pyro.infer import TraceEnum_ELBO
from torch import Tensor, nn
from torch.distributions import Distribution

from pyro_dropout.engines.engine import WrongStepError, copy_into
from pyro_dropout.engines.program import Function
from pyro_dropout.engines.torch_internals import is_traced
from pyro_dropout.generative.layers import recordable
from pyro_dropout.generative.registration import is_told, note_names
from pyro_dropout.generative.trial_run import holders_of, modules_of, owner_of, quietly
from pyro_dropout.protocols import Record, Trace, Tree
from pyro_dropout.training.loss.temperature import at_step
from pyro_dropout.training.optimisers import Update

Gradients = Callable[..., tuple[Tensor, list[Tensor]]]  # (values, buffers, *inputs) -> (loss, gradients)
Arguments = tuple[Sequence[Any], Mapping[str, Any]]  # a model's (args, kwargs)
Call = Callable[..., Arguments]  # of a step's inputs
_Holder = tuple[dict[str, Any], str]  # where a module holds a tensor: its own dictionary, and the key there


@runtime_checkable
class Loss(Protocol):
    """A loss whose gradient can be taken, as those of Pyro and ``pyro_dropout.ELBO`` are."""

    @property
    def differentiable_loss(self) -> Callable[..., Tensor]:
        """The loss of (model, guide, *args, **kwargs)."""


class Parameters:
    """The trained tensors of a model and a guide, by their names in Pyro's store; the loss is run once to find them."""

    def __init__(
        self, model: object, guide: object, loss: Loss, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> None:
        capture = poutine.trace(param_only=True)
        graph = torch.set_grad_enabled(isinstance(loss, TraceEnum_ELBO))  # which does not run without gradients
        with graph, quietly(model, guide), unvalidated(), poutine.block(), capture:
            loss.differentiable_loss(model, guide, *args, **kwargs)
        trace: Trace = capture.trace
        found = {name: site["value"].unconstrained() for name, site in trace.nodes.items()}
        first: dict[int, str] = {}  # two modules may share a parameter, which is trained once
        for name, value in found.items():
            if value.requires_grad:
                first.setdefault(id(value), name)
        self.by_name: dict[str, Tensor] = {name: found[name] for name in first.values()}
        self.names = list(self.by_name)
        parts = (part for part in map(owner_of, (guide, model)) if isinstance(part, nn.Module))
        frozen = [name for part in parts for name, value in part.named_parameters() if not value.requires_grad]
        self.told: Record = {"frozen": frozen} if frozen else {}  # which are trained, for checkpoints
        # Gradients of a sum over all points are beyond float16; those of the loss divided by its size are not.
        self.divided = any(p.dtype == torch.float16 for m in modules_of(model) for p in m.parameters(recurse=False))
        self.unused: set[int] = set()  # those that the last gradient did not depend on
        self._checked = False
        self._places: dict[str, list[_Holder]] = {name: [] for name in self.names}
        for module in holders_of(model, guide):
            for key, each in module._parameters.items():
                if id(each) in first:
                    self._places[first[id(each)]].append((module._parameters, key))
        own = {id(each) for module in modules_of(model, guide) for each in module._parameters.values()}
        owner = owner_of(model if isinstance(owner_of(guide), nn.Module) else guide)
        note_names(owner, [name for name, value in self.by_name.items() if id(value) not in own])
        self._not_found = {name for name, places in self._places.items() if not places}  # in no module that runs
        store = pyro.get_param_store()._params
        for name, value in found.items():
            if id(value) in first:
                self._places[first[id(value)]].append((store, name))

    def current(self) -> bool:
        """Whether these are still the tensors in Pyro's store, and all of them are still trained."""
        store = pyro.get_param_store()._params
        local = pyro.settings.get("module_local_params")
        return all(value.requires_grad and (local or store.get(name) is value) for name, value in self.by_name.items())

    @property
    def values(self) -> list[Tensor]:
        """The tensors, detached, in the order of ``names``."""
        return [value.detach() for value in self.by_name.values()]

    def write(self, values: list[Tensor]) -> None:
        """Make the parameters hold ``values``; the parameter objects stay the same."""
        for target, value in zip(self.by_name.values(), values, strict=True):
            target.data = value

    def copy(self, values: list[Tensor]) -> None:
        """Copy ``values`` into the parameters, whose memory stays the same."""
        copy_into([*self.by_name.values()], values)

    def check_used(self, gradients: Sequence[Tensor | None]) -> None:
        """Raise an error if the first gradient leaves out a parameter that a script has registered with Pyro.

        A network of this package may have layers that it does not run: what it registers for them is left alone.
        """
        if self._checked:
            return
        pairs = zip(self.by_name.items(), gradients, strict=True)
        unused = [(name, value) for (name, value), slope in pairs if slope is None]
        lost = [name for name, value in unused if name in self._not_found or not is_told(value)]
        if lost:
            named = f"{', '.join(map(repr, lost[:4]))}{' and others' if lost[4:] else ''}"
            raise WrongStepError(
                f"the loss does not depend on {named}, which pyro.param or pyro.module registers, so it would not be"
                " trained. Use it in the model or the guide (call its network, in place of F.linear(x, net.weight)),"
                " leave it unregistered, or freeze it with requires_grad_(False)."
            )
        self._checked = True

    def replaced(self, values: list[Tensor]) -> contextlib.AbstractContextManager[None]:
        """Within the context, modules and Pyro's store hold ``values`` in the parameters' places."""
        places = zip(self._places.values(), values, strict=True)
        return _swapped([(holder, value) for holders, value in places for holder in holders])


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

    @contextlib.contextmanager
    def replaced(self, values: list[Tensor]) -> Iterator[None]:
        """Within the context, modules hold ``values`` in the places of buffers; what is assigned there goes into them.

        What has another shape, such as a cache for longer sequences, is dropped.
        """
        pairs = list(zip(self._places, values, strict=True))
        with _swapped(pairs):
            yield
            for (holder, key), value in pairs:
                now = holder.get(key)
                if now is not None and now is not value and now.shape == value.shape:
                    with torch.no_grad():
                        value.copy_(now)


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


def make_gradients(model: object, guide: object, loss: Loss, parameters: Parameters, call: Call) -> Gradients:
    """Return gradients_of(values, buffers, *inputs) -> (loss, gradients), a pure function of tensors.

    ``call`` turns the other inputs into the model's (args, kwargs). Buffers are inputs too, so that a setting that is
    changed between two steps is seen by a compiled one.
    """
    places = Buffers(model, guide)

    def gradients_of(values: list[Tensor], buffers: list[Tensor], *inputs: Any) -> tuple[Tensor, list[Tensor]]:
        args, kwargs = call(*inputs)
        leaves = [value.detach().requires_grad_() for value in values]
        held, lstm = parameters.replaced(leaves), recordable(holders_of(model, guide), is_traced())
        with places.replaced(buffers), held, lstm, torch.enable_grad(), unvalidated(), poutine.block():
            value = loss.differentiable_loss(model, guide, *args, **kwargs)
            size = value.detach().abs().clamp_min(1) if parameters.divided else None
            gradients = torch.autograd.grad(value if size is None else value / size, leaves, allow_unused=True)
            if size is not None:
                gradients = tuple(None if slope is None else slope * size for slope in gradients)
        parameters.check_used(gradients)
        parameters.unused = {k for k, g in enumerate(gradients) if g is None}
        pairs = zip(leaves, gradients, strict=True)
        return value.detach(), [torch.zeros_like(p) if g is None else g for p, g in pairs]

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
        loss, gradients = numbered(gradients_of)(values, t, *inputs)
        new_values, new_state = update.step(values, gradients, state, t, lr)
        for k in parameters.unused:  # torch's optimisers skip parameters without a gradient
            new_values[k], new_state[k] = values[k], state[k]
        return new_values, new_state, loss

    return step
