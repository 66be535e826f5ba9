"""One step of SVI for arguments of one structure: traced through Pyro, compiled, and checked before every use.

Arguments are trees: dicts, lists, tuples and named tuples of tensors, numbers and text, nested as you like. Every
tensor and every float in them is an input of a compiled step; everything else is part of its structure.
"""

import enum
from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import pyro
import torch
from pyro import poutine
from pyro.optim.optim import PyroOptim, _load_state_dict
from torch import Tensor

from pyro_dropout.engines.choose import chosen
from pyro_dropout.engines.engine import Step
from pyro_dropout.engines.program import Program
from pyro_dropout.engines.torch_internals import tree_flatten, tree_unflatten
from pyro_dropout.errors import PyroDropoutError
from pyro_dropout.generative.trial_run import quietly
from pyro_dropout.protocols import PyroModel, Record
from pyro_dropout.training.compile.captured_state import CapturedState, Place
from pyro_dropout.training.compile.functional import Buffers, Parameters, make_gradients, make_step
from pyro_dropout.training.loss.elbo import ELBO
from pyro_dropout.training.loss.temperature import at_step
from pyro_dropout.training.optimisers import Update, clock, from_group
from pyro_dropout.training.preflight import check_trained

_SLOTS = {"adam": ("exp_avg", "exp_avg_sq"), "adamw": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}
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

    def rebuilt(self, tensors: Sequence[Tensor]) -> tuple[tuple[object, ...], dict[str, object]]:
        """Return arguments of the same structure with other tensors: first those for tensors, then those for floats."""
        own, numbers = iter(tensors), iter(tensors[len(self.tensors) :])
        leaves = [
            next(own) if isinstance(leaf, Tensor) else next(numbers) if type(leaf) is float else leaf
            for leaf in self._leaves
        ]
        found: tuple[tuple[object, ...], dict[str, object]] = tree_unflatten(leaves, self._spec)
        return found


class CompiledStep:
    """A compiled step; the optimiser's state stays where Pyro keeps it.

    It is traced with the arguments ``given``. ``known`` are steps for arguments of the same structure, whose
    surroundings have since changed.

    Attributes:
        changed: what had invalidated the step at the last check; empty if nothing had.
        replaces: a step of ``known`` that has the same program.
        counts: whether it is one more program; not if what had changed is of no account.
    """

    def __init__(
        self,
        model: PyroModel,
        guide: PyroModel,
        loss: ELBO,
        optim: PyroOptim,
        given: Arguments,
        known: Sequence["CompiledStep"],
    ) -> None:
        self.changed, self.loss, self._optim = "", loss, optim
        self._scheduled = callable(loss.temperature)
        self.parameters = Parameters(model, guide, loss, given.args, given.kwargs)
        check_trained(self.parameters.names, guide)
        self.buffers = Buffers(model, guide)
        trained, values = list(self.parameters.by_name.values()), self.parameters.values
        whole_state = OptimiserState(optim, trained)
        now = whole_state.shared
        self._update = None if now is None else from_group(now.kind, {**now.options, "lr": now.lr})
        self._options = None if now is None else now.options
        self._t, self._lr = clock(0.0, values, 0)
        self._outside = CapturedState([model, guide, loss, *given.objects], trained)
        if self._outside.unwatched:
            raise PyroDropoutError(self._outside.unwatched)
        # Each a tensor of its own, so that one which is found elsewhere, or given twice, is not taken for this one.
        row, count = [each.detach() for each in self._row(given)], len(self.buffers.values)
        if given.floats:
            self._check_floats(model, guide, given, row[count:])
        gradients_of = make_gradients(model, guide, loss, self.parameters, lambda *inputs: given.rebuilt(inputs))

        def gradients(values: list[Tensor], *row: Tensor) -> tuple[Tensor, list[Tensor]]:
            with at_step(row[-1]) if self._scheduled else nullcontext():
                return gradients_of(values, list(row[:count]), *row[count : len(row) - self._scheduled])

        with quietly(model, guide):
            if self._update is None:
                self._own: Step | None = None
                self.program = Program(gradients, values, *row, outside=self._outside.tensors)
            else:
                like = [step for step in known if step._own is not None]
                whole = make_step(gradients, self.parameters, self._update)
                moments = [[slot.clone() for slot in each] for each in whole_state.read(self._update)]
                own = [value.clone() for value in values], moments
                more: Any = {"outside": self._outside.tensors, "chain": 0}
                step = Step(whole, *own, self._t, self._lr, row=row, like=[each.program for each in like], **more)
                self.program = step.recorded
                # An engine takes the steps, on tensors that the parameters and the optimiser hold from then on.
                same = next((each for each in like if each.program is self.program.twin), None)
                if same is None:
                    self._own, (self._loop, _) = step, chosen(True, step, warn=_not_eagerly)
                else:  # the loop of the same program goes on, with what is outside in the places where it is now
                    assert same._own is not None
                    same._own.recorded.lifted[:] = self.program.lifted
                    self._own, self._loop = same._own, same._loop
        # torch's optimisers skip parameters that the loss does not depend on.
        self._used = [k for k in range(len(trained)) if k not in self.parameters.unused]
        self._state = OptimiserState(optim, [trained[k] for k in self._used])
        self._outside.watch(self.program.lifted)
        # If the program is the same as before, what no code names does not affect it, and is not watched any longer.
        self.replaces = next((step for step in known if step.program is self.program.twin), None)
        self._place: Place | None = None
        self._ignored: list[Place] = []
        self.counts = self.replaces is None
        if self.replaces is not None:
            place = self.replaces._place
            self.counts = place is not None and not self._outside.may_forget(place)
            self._ignored = [*self.replaces._ignored, *([] if place is None or self.counts else [place])]
            self._outside.forget(self._ignored)

    def _check_floats(self, model: PyroModel, guide: PyroModel, given: Arguments, inputs: list[Tensor]) -> None:
        """Raise an error unless the loss is the same with tensors in place of floats."""
        found = []
        for args, kwargs in ((given.args, given.kwargs), given.rebuilt(inputs)):
            with torch.no_grad(), quietly(model, guide), poutine.block():
                found.append(self.loss.differentiable_loss(model, guide, *args, **kwargs))
        slack = 1e3 * torch.finfo(found[0].dtype).eps
        if not torch.allclose(found[0], found[1].to(found[0]), rtol=slack, atol=slack, equal_nan=True):
            raise PyroDropoutError("a float among the arguments behaves differently as a tensor")

    def _row(self, given: Arguments) -> list[Tensor]:
        """Return what a step is given anew: buffers, tensors, floats and, for a schedule, the number of the step."""
        step = [self.loss.steps + 1.0] if self._scheduled else []  # the loss counts its steps, compiled or not
        numbers = [self._t.new_tensor(value) for value in [*given.floats, *step]]
        return [*self.buffers.values, *given.tensors, *numbers]

    def valid(self) -> bool:
        """Whether the step still matches an eager one: nothing around the model has changed."""
        self.changed = self._what_changed()
        return not self.changed

    def _what_changed(self) -> str:
        self._place = None
        if not self.parameters.current():
            return "the parameter store"
        self._place = self._outside.changed()
        if self._place is not None:
            return self._place.name or "the model"
        if not self.program.fits():
            return self.program.lifted[0][0].name
        now = None if self._own is None else self._state.shared
        return "" if self._own is None or (now and now.options == self._options) else "the optimiser's settings"

    def step(self, given: Arguments) -> Tensor:
        """Take one step with arguments of the same structure, and return the loss before it."""
        row, own, update, now = self._row(given), self._own, self._update, self._state.shared
        if own is None or update is None or now is None:
            return self._with_other_optimiser(row)
        own.t.fill_(now.steps + 1)
        own.lr.fill_(now.lr)
        # What a step of another shape, or the user, has put elsewhere.
        slots = [own.state[k] for k in self._used]
        for mine, theirs in zip([own.values, *slots], [self.parameters.values, *self._state.read(update)], strict=True):
            for here, there in zip(mine, theirs, strict=True):
                if here.data_ptr() != there.data_ptr():
                    here.copy_(there)
        loss, _ = self._loop.one(row)
        self.parameters.write(own.values)
        self._state.write(update, slots)
        return loss

    def _with_other_optimiser(self, row: list[Tensor]) -> Tensor:
        """Compute compiled gradients, and leave the rest to the optimiser."""
        loss, gradients = self.program(self.parameters.values, *row)
        trained = list(self.parameters.by_name.values())
        for k in self._used:
            trained[k].grad = gradients[k]
        self._optim([trained[k] for k in self._used])
        for parameter in trained:
            parameter.grad = None
        return torch.as_tensor(loss)


def _not_eagerly(cause: Exception, engine: str) -> None:
    raise cause


# --- the optimiser's state, shared with eager steps: each continues where the other left off --------------------------
# Pyro keeps one torch optimiser for each parameter. A compiled step reads its moments there and writes the new ones
# back, so that ``get_state`` and ``save`` hold what eager steps would, and ``set_state`` takes effect.


class Shared(NamedTuple):
    """What all parameters of an optimiser have in common at a step."""

    kind: type
    options: Record  # without the learning rate
    lr: float
    steps: int  # taken before; 0 where they are not counted


class OptimiserState:
    """The torch optimisers behind a Pyro optimiser, for the parameters that a step trains."""

    def __init__(self, optim: PyroOptim, parameters: list[Tensor]) -> None:
        self._pairs: list[tuple[Any, Tensor]] = [(_of(optim, parameter), parameter) for parameter in parameters]
        # A scheduler wraps its optimiser, and steps separately; Pyro clips gradients outside its optimisers.
        known = all(isinstance(each, torch.optim.Optimizer) for each, _ in self._pairs)
        self._alike = known and len({type(each) for each, _ in self._pairs}) == 1 and not optim.pt_clip_args

    @property
    def shared(self) -> Shared | None:
        """What all parameters have in common; None if they differ in their settings or their numbers of steps."""
        groups = [group for each, _ in self._pairs for group in each.param_groups] if self._alike else []
        if len(groups) != len(self._pairs) or not groups:
            return None
        settings = [{name: value for name, value in group.items() if name != "params"} for group in groups]
        counts = {int(each.state[p].get("step", 0)) if p in each.state else 0 for each, p in self._pairs}
        if len(counts) > 1 or any(other != settings[0] for other in settings[1:]):
            return None
        return Shared(type(self._pairs[0][0]), settings[0], settings[0].pop("lr"), counts.pop())

    def read(self, update: Update) -> list[list[Tensor]]:
        """Return the moments of all parameters; zeros where there are none yet."""
        names, found = _SLOTS[update.name][: update.slots], []
        for each, p in self._pairs:
            state = each.state.get(p) or {}
            found.append([torch.zeros_like(p.detach()) if state.get(k) is None else state[k] for k in names])
        return found

    def write(self, update: Update, slots: list[list[Tensor]]) -> None:
        """Write the moments after one more step back to the optimisers."""
        names, counters = _SLOTS[update.name][: update.slots], []
        for (each, p), values in zip(self._pairs, slots, strict=True):
            state = each.state[p] if names else {}  # torch has no entry for a parameter without state
            state.update(zip(names, values, strict=True))
            if update.name != "sgd":
                if "step" not in state:
                    group = each.param_groups[0]
                    there = p.device if group.get("capturable") or group.get("fused") else torch.device("cpu")
                    state["step"] = torch.zeros((), dtype=torch.float32, device=there)
                counters.append(state["step"])
        if counters:
            torch._foreach_add_(counters, 1)


def _of(optim: PyroOptim, parameter: Tensor) -> Any:
    """Return the optimiser of a parameter, or a scheduler, created as Pyro does when it first sees the parameter."""
    if parameter not in optim.optim_objs:
        optim.optim_objs[parameter] = optim._get_optim(parameter)
        optim.grad_clip[parameter] = optim._get_grad_clip(parameter)  # type: ignore[arg-type]  # Pyro gives it too
        name = pyro.get_param_store().param_name(parameter)
        waiting = optim._state_waiting_to_be_consumed.pop(name, None)
        if waiting is not None:
            _load_state_dict(optim.optim_objs[parameter], waiting)
    return optim.optim_objs[parameter]
