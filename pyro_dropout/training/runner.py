"""The state of one training run: parameters, optimiser, data order, and the loop that takes the steps.

A run changes always the same tensors. Those of a guide are its own, so that parameters exist once; those of a fleet
belong to the run, and ``publish`` puts them back.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyro_dropout.engines.choose import HowCompiled, chosen
from pyro_dropout.engines.engine import (
    CHAIN,
    Direct,
    Eager,
    Gradient,
    Loop,
    Row,
    Step,
    Taken,
    copy_into,
    is_large,
)
from pyro_dropout.engines.program import apart_in_memory
from pyro_dropout.engines.torch_internals import tree_leaves
from pyro_dropout.errors import PyroDropoutError
from pyro_dropout.generative.precision import precision_now, products_in
from pyro_dropout.generative.random_state import forked
from pyro_dropout.protocols import Record, Tree
from pyro_dropout.training.batches import Batches
from pyro_dropout.training.compile.functional import Gradients, Parameters, make_step, numbered
from pyro_dropout.training.history import is_divergence
from pyro_dropout.training.loader import Stream
from pyro_dropout.training.optimisers import Update, clock, plain
from pyro_dropout.training.svi import warn_uncompiled

Source = Batches | Stream  # where mini-batches come from
_MANY = 2**20  # more steps than any engine takes at once


class TrainingRun:
    """One training run: a step of tensors that is taken repeatedly.

    Args:
        step: the step, and the tensors that it changes.
        write: puts parameters into their owners; None if the step changes the owners' own tensors.
        batches: where mini-batches come from; None for all data at every step.
        compile: "auto", "traced", "plain", True or False, as ``decided`` returns it.
        fatal: errors that are raised, and not a reason for another engine.

    Attributes:
        refused: whether the last step was left out, because its loss or gradient was not finite.
        failed: the error of torch that ended the last step, because its numbers have diverged.
        why: why faster engines do not take the steps.
        break_off: asked after each step: are no more wanted?
    """

    def __init__(
        self,
        step: Step,
        *,
        write: Callable[[list[Tensor]], None] | None = None,
        batches: Source | None = None,
        compile: HowCompiled = "auto",
        fatal: tuple[type[Exception], ...] = (),
    ) -> None:
        self._step, self._write, self._batches, self._precision = step, write, batches, precision_now()
        self._eager: Loop = Direct(step)
        self.refused, self.compile_seconds = False, 0.0
        self.failed: Exception | None = None
        self.break_off: Callable[[], bool] = lambda: False
        start = time.perf_counter()
        how: Any = {"fatal": fatal, "around": forked, "warn": warn_uncompiled}
        self._loop, self.why = chosen(compile, step, **how)
        if self.engine != Eager.name:
            self.compile_seconds = time.perf_counter() - start

    @property
    def engine(self) -> str:
        """What takes the steps."""
        return self._loop.name

    @property
    def chained(self) -> bool:
        """Whether several steps run at a time."""
        return self._loop.at_once(CHAIN) > 0

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
            self._loop.begin()
            for row in [[]] * count if self._batches is None else self._batches.inputs(count):
                usual = self._batches is None or self._batches.usual(row)
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
    def leaves(self) -> list[Tensor]:
        """The current parameters, then the optimiser's state."""
        return self._loop.changed[:-1]

    @property
    def t(self) -> Tensor:
        """The number of the next step."""
        return self._loop.changed[-1]

    @property
    def values(self) -> list[Tensor]:
        """The current parameters."""
        return self._loop.changed[: len(self._step.values)]

    def snapshot(self, over: list[Tensor] | None = None) -> list[Tensor]:
        """Return a copy of the current parameters; it is written over an earlier one that is given, if that fits."""
        found = over or []
        if [each.shape for each in found] != [each.shape for each in self.values]:
            return [value.detach().clone() for value in self.values]
        copy_into(found, self.values)
        return found

    def restore(self, values: list[Tensor]) -> None:
        """Restore a snapshot of the parameters; the optimiser's state stays as it is."""
        copy_into(self.values, values)

    def publish(self) -> None:
        """Put copies of the current parameters back into their owners, unless these have them."""
        if self._write is not None:
            self._write(self.snapshot())

    def state(self) -> tuple[dict[str, Tensor], Record]:
        """Return everything that later steps depend on, except the random generators: tensors by name, and the rest."""
        found = {f"leaf.{k:05d}": leaf.detach() for k, leaf in enumerate(self.leaves)}
        found |= {"t": self.t} | self._loop.kept
        if self._batches is not None:
            found |= self._batches.state()
        return found, {}

    def set_state(self, tensors: dict[str, Tensor], rest: Record) -> None:
        """Restore a state; one that another engine has left may lack what this one keeps."""
        names = [f"leaf.{k:05d}" for k in range(len(self.leaves))]
        copy_into([*self.leaves, self.t], [tensors[name] for name in [*names, "t"]])
        for name, value in self._loop.kept.items():
            if name in tensors:
                value.copy_(tensors[name])
        if self._batches is not None:
            self._batches.set_state(tensors)


# --- runs of one guide or of an ensemble ------------------------------------------------------------------------------


def make_run(
    gradients_of: Gradients,
    parameters: Parameters,
    update: Update,
    *,
    inputs: tuple[Tree, ...],
    guarded: bool = True,
    **how: Any,
) -> TrainingRun:
    """Return a training run whose steps change the owners' own tensors.

    Args:
        gradients_of: (values, *inputs, *row) -> (loss, gradients).
        parameters: what is trained.
        update: an optimiser of this package, inside the step, or one of torch's beside it.
        inputs: the other inputs of every step: trees of tensors.
        guarded: whether steps of a large network are left out if their loss or gradient is not finite; others are taken
            back, by a copy of the parameters.
        how: batches, compile and fatal, as in ``TrainingRun``.
    """
    if update.optimiser is not None:
        return TorchOptimiserRun(gradients_of, parameters, update, inputs, **how)
    gradient_of = numbered(gradients_of)
    values, write = parameters.values, None
    # Weights of a recurrent layer on a GPU are parts of one tensor.
    if not apart_in_memory([*values, *tree_leaves(inputs)], len(values)):
        values, write = [value.clone() for value in values], parameters.copy
    around, state = surroundings(values, update, inputs, how["batches"]), update.start(values)
    t, lr = around["t"], around["lr"]
    guarded = guarded and is_large(values)

    def moving(gradients: list[Tensor]) -> Callable[[Tensor, Tensor], None]:
        some = [k for k in range(len(values)) if k not in parameters.unused]
        return update.in_place([values[k] for k in some], [gradients[k] for k in some], [state[k] for k in some])

    def take(row: Row, recorded: Gradient | None) -> Taken:
        loss, gradients = (recorded or gradient_of)(values, t, *inputs, *row)
        if guarded:
            sizes = torch.stack([loss.to(t), *(size.to(t) for size in torch._foreach_norm(gradients))])
            if not bool(torch.isfinite(sizes).all()):
                return loss, False
        moving(gradients)(t, lr)
        t.add_(1)
        return loss, True

    def bind(gradients: list[Tensor]) -> Callable[[], None]:
        move = moving(gradients)

        def moved() -> None:
            move(t, lr)
            t.add_(1)

        return moved

    whole = make_step(gradients_of, parameters, update)
    step = Step(whole, values, state, gradient=gradient_of, take=take, bind=bind, guarded=guarded, **around)
    return TrainingRun(step, write=write, **how)


def surroundings(
    values: list[Tensor], update: Update, inputs: tuple[Tree, ...], batches: Source | None
) -> dict[str, Any]:
    """Return what a step has besides its functions, parameters and state."""
    t, lr = clock(update, values, 1)
    row = [] if batches is None else batches.example()
    return {"t": t, "lr": lr, "inputs": inputs, "row": row, "chained": batches is None or batches.chained}


class TorchOptimiserRun(TrainingRun):
    """A training run whose optimiser is torch's own, and runs beside a step that gives gradients.

    What it holds is trained, and nothing else, with the settings of each group and the state that it has.
    """

    def __init__(
        self, gradients_of: Gradients, parameters: Parameters, update: Update, inputs: tuple[Tree, ...], **how: Any
    ) -> None:
        assert update.optimiser is not None
        self._update, self._optimiser = update, update.optimiser
        trained = list(parameters.by_name.values())
        held = {id(each) for group in update.optimiser.param_groups for each in group["params"]}
        self._held = {k: each for k, each in enumerate(trained) if id(each) in held}
        if trained and not self._held:
            raise PyroDropoutError(
                f"optim must hold parameters of the guide or the model; this {update.name} holds none of them. Make it"
                " with guide.parameters()."
            )
        gradient, values = numbered(gradients_of), [each.detach() for each in trained]
        around = surroundings(values, update, inputs, how["batches"])
        t = around["t"]

        def move(gradients: list[Tensor]) -> None:
            self._move(gradients, t)
            for mine, theirs in zip(values, trained, strict=True):  # an optimiser may give a parameter new memory
                if mine.data_ptr() != theirs.data_ptr():
                    theirs.data = mine.copy_(theirs.detach())
            t.add_(1)

        def take(row: Row, recorded: Gradient | None) -> Taken:
            loss, gradients = (recorded or gradient)(values, t, *inputs, *row)
            move(gradients)
            return loss, True

        def bind(gradients: list[Tensor]) -> Callable[[], None]:
            return lambda: move([each.clone() for each in gradients])  # an optimiser may change them

        step = Step(None, values, [[] for _ in values], gradient=gradient, take=take, bind=bind, **around)
        super().__init__(step, **how)

    def _move(self, gradients: list[Tensor], t: Tensor) -> None:
        """Let the optimiser take a step with these gradients, at its own learning rates times the schedule."""
        slopes, factor = self._update.prepared([gradients[k] for k in self._held], t, torch.ones_like(t))
        for parameter, slope in zip(self._held.values(), slopes, strict=True):
            parameter.grad = slope
        rates = [group["lr"] for group in self._optimiser.param_groups]
        if self._update.schedule is not None:
            for group, rate in zip(self._optimiser.param_groups, rates, strict=True):
                group["lr"] = rate * float(factor)
        self._optimiser.step()
        self._optimiser.zero_grad()
        for group, rate in zip(self._optimiser.param_groups, rates, strict=True):
            group["lr"] = rate

    def state(self) -> tuple[dict[str, Tensor], Record]:
        """Return the state of the steps and that of the optimiser."""
        found, _ = super().state()
        whole = self._optimiser.state_dict()
        rest: Record = {"groups": plain(whole["param_groups"]), "numbers": []}
        for index, slots in whole["state"].items():
            for slot, value in slots.items():
                if isinstance(value, Tensor):
                    found[f"optimiser.{index}.{slot}"] = value
                elif value is None or isinstance(value, int | float | bool | str):
                    rest["numbers"].append([index, slot, value])
                else:
                    raise PyroDropoutError(
                        f"the state of {self._update.name} ({slot!r} is a {type(value).__name__}) cannot be written to"
                        " a checkpoint; train without one, or with Adam, AdamW or SGD."
                    )
        return found, rest

    def set_state(self, tensors: dict[str, Tensor], rest: Record) -> None:
        """Restore a state."""
        state: dict[int, dict[str, object]] = {}
        for name, value in tensors.items():
            if name.startswith("optimiser."):
                _, index, slot = name.split(".", 2)
                state.setdefault(int(index), {})[slot] = value
        for index, slot, value in rest["numbers"]:
            state.setdefault(index, {})[slot] = value
        groups = [
            {name: _like(now.get(name), value) for name, value in kept.items()}
            for kept, now in zip(rest["groups"], self._optimiser.param_groups, strict=True)
        ]
        self._optimiser.load_state_dict({"state": state, "param_groups": groups})
        super().set_state(tensors, rest)


def _like(now: object, value: object) -> object:
    """Return a number read from a file as a tensor, if the current value is a tensor."""
    return torch.as_tensor(value).to(now) if isinstance(now, Tensor) else value
