"""Steps of training and their runs: with an optimiser of this package inside, or with one of torch beside them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pyro_dropout.engines.choose import HowCompiled
from pyro_dropout.engines.engine import Engine, Gradient, Row, Step, Taken, is_large
from pyro_dropout.engines.program import Function, apart_in_memory
from pyro_dropout.engines.torch_internals import tree_leaves
from pyro_dropout.errors import PyroDropoutError
from pyro_dropout.protocols import Record, Tree
from pyro_dropout.training.batches import Source
from pyro_dropout.training.compile.functional import Gradients, Parameters, make_step, numbered
from pyro_dropout.training.optimisers import Update, clock, plain
from pyro_dropout.training.runner import TrainingRun
from pyro_dropout.training.torch_optimisers import held_by


def own_step(
    function: Function,
    values: list[Tensor],
    update: Update,
    *,
    inputs: tuple[Tree, ...],
    batches: Source | None,
    lr: Tensor | None = None,
) -> Step:
    """Return a step on copies of ``values``, with the optimiser's state at its start.

    Args:
        function: (values, state, t, lr, *inputs, *row) -> (values, state, loss).
        values: the parameters to start from.
        update: the optimiser.
        inputs: the other inputs of every step: trees of tensors.
        batches: where the rows come from.
        lr: the base learning rate as a tensor, if it is not the optimiser's, such as one per replica.
    """
    values = [value.detach().clone(memory_format=torch.contiguous_format) for value in values]
    return Step(function, values, update.start(values), **_around(values, update, inputs, batches, lr))


def _around(
    values: list[Tensor], update: Update, inputs: tuple[Tree, ...], batches: Source | None, lr: Tensor | None = None
) -> dict[str, Any]:
    """Return what a step has besides its functions, parameters and state."""
    t, rate = clock(update, values, 1)
    row = [] if batches is None else batches.example()
    chained = batches is None or batches.chained
    return {"t": t, "lr": rate if lr is None else lr.to(rate), "inputs": inputs, "row": row, "chained": chained}


def make_run(
    gradients_of: Gradients,
    parameters: Parameters,
    update: Update,
    *,
    inputs: tuple[Tree, ...],
    batches: Source | None,
    compile: HowCompiled,
    before: Sequence[Engine] = (),
    guarded: bool = True,
) -> TrainingRun:
    """Return the training run of one guide, whose own tensors steps change.

    Args:
        gradients_of: (values, *inputs, *row) -> (loss, gradients).
        parameters: what is trained.
        update: an optimiser of this package, inside the step, or one of torch beside it.
        inputs: the other inputs of every step: trees of tensors.
        batches: where mini-batches come from; None for all data at every step.
        compile: as in ``TrainingRun``.
        before: engines that are tried first.
        guarded: whether steps of a large network are left out if their loss or gradient is not finite; others are taken
            back, by a copy of the parameters.
    """
    how: Any = {"batches": batches, "compile": compile, "before": before}
    if update.beside:
        return TorchOptimiserRun(gradients_of, parameters, update, inputs, **how)
    gradient_of = numbered(gradients_of)
    values, write = parameters.values, None
    if not apart_in_memory(
        [*values, *tree_leaves(inputs)], len(values)
    ):  # weights of a recurrent layer on a GPU are parts of one tensor
        values, write = [value.clone() for value in values], parameters.copy
    around, state = _around(values, update, inputs, batches), update.start(values)
    t, lr = around["t"], around["lr"]
    guarded = guarded and is_large(values)

    def used(gradients: list[Tensor]) -> tuple[list[Tensor], list[Tensor], list[list[Tensor]]]:
        some = [k for k in range(len(values)) if k not in parameters.unused]
        return [values[k] for k in some], [gradients[k] for k in some], [state[k] for k in some]

    def take(row: Row, recorded: Gradient | None) -> Taken:
        loss, gradients = (recorded or gradient_of)(values, t, *inputs, *row)
        if guarded:
            sizes = torch.stack([loss.to(t), *(size.to(t) for size in torch._foreach_norm(gradients))])
            if not bool(torch.isfinite(sizes).all()):
                return loss, False
        update.step_in_place(*used(gradients), t, lr)
        t.add_(1)
        return loss, True

    def bind(gradients: list[Tensor]) -> Callable[[], None]:
        move = update.bound(*used(gradients))

        def moved() -> None:
            move(t, lr)
            t.add_(1)

        return moved

    whole = make_step(gradients_of, parameters, update)
    step = Step(whole, values, state, gradient=gradient_of, take=take, bind=bind, guarded=guarded, **around)
    return TrainingRun(step, write=write, **how)


class TorchOptimiserRun(TrainingRun):
    """A training run whose optimiser is torch's own, and runs beside a step that gives gradients."""

    def __init__(
        self, gradients_of: Gradients, parameters: Parameters, update: Update, inputs: tuple[Tree, ...], **how: Any
    ) -> None:
        assert update.optimiser is not None
        self._update, self._optimiser = update, update.optimiser
        trained = list(parameters.by_name.values())
        held = held_by(update.optimiser)
        self._held = {k: each for k, each in enumerate(trained) if id(each) in held}
        if trained and not self._held:
            raise PyroDropoutError(
                f"optim must hold parameters of the guide or the model; this {type(update.optimiser).__name__} holds"
                " none of them. Make it with guide.parameters()."
            )
        gradient, values = numbered(gradients_of), [each.detach() for each in trained]
        around = _around(values, update, inputs, how["batches"])
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
                        f"the state of {type(self._optimiser).__name__} ({slot!r} is a {type(value).__name__}) cannot"
                        " be written to a checkpoint; train without one, or with Adam, AdamW or SGD."
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
