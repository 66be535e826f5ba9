"""Training runs with an optimiser of this package inside their step, or with one of torch beside it."""

import torch
from torch import Tensor

from pyro_dropout.mathematics.errors import PyroDropoutError
from pyro_dropout.protocols import Record, Tree
from pyro_dropout.training.batches import Source
from pyro_dropout.training.compile.decision import HowCompiled
from pyro_dropout.training.compile.functional import Gradients, Parameters, StepInPlace, make_step
from pyro_dropout.training.kept_memory import keep_freed_memory
from pyro_dropout.training.loss.temperature import at_step
from pyro_dropout.training.optimisers import Update, plain
from pyro_dropout.training.runner import TrainingRun, copy_into
from pyro_dropout.training.torch_optimisers import held_by


class TorchOptimiserRun(TrainingRun):
    """A training run whose optimiser is torch's own, and runs outside a compiled step that returns gradients."""

    _tapes = False

    def __init__(
        self,
        gradients: Gradients,
        parameters: list[Tensor],
        update: Update,
        *,
        inputs: tuple[Tree, ...],
        batches: Source | None,
        compile: HowCompiled,
    ) -> None:
        assert update.optimiser is not None
        self._parameters, self._update, self._optimiser = parameters, update, update.optimiser
        held = held_by(update.optimiser)
        self._held = [k for k, each in enumerate(parameters) if id(each) in held]
        if parameters and not self._held:
            raise PyroDropoutError(
                f"optim must hold parameters of the guide or the model; this {type(update.optimiser).__name__} holds"
                " none of them. Make it with guide.parameters()."
            )

        def step(
            values: list[Tensor], state: list[list[Tensor]], t: Tensor, lr: Tensor, *inputs: Tree
        ) -> tuple[list[Tensor], list[list[Tensor]], Tensor]:
            with at_step(t):
                loss, slopes = gradients(values, *inputs)
            return slopes, state, loss

        # No CUDA graph of several steps: the optimiser runs between two steps.
        values = [p.detach() for p in parameters]
        super().__init__(step, values, update, write=self._write_back, inputs=inputs, batches=batches, compile=False)
        self.traced = compile in ("traced", "plain")  # the optimiser is no part of a program in C
        if compile is not False:
            self._try_to_compile("traced" if self.traced else compile)
        if self._program is None:
            keep_freed_memory(values)
            self._chain = None

    def _write_back(self, values: list[Tensor]) -> None:
        copy_into(self._parameters, values)

    def advance(self, steps: int) -> Tensor:
        """Take one step; return the loss before it."""
        self.leaves, t = [p.detach() for p in self._parameters], self.t.clone()
        losses = super().advance(1)
        if self.failed is not None:
            return losses
        slopes, factor = self._update.prepared([self.leaves[k] for k in self._held], t, torch.ones_like(t))
        for k, slope in zip(self._held, slopes, strict=True):
            self._parameters[k].grad = slope
        rates = [group["lr"] for group in self._optimiser.param_groups]
        if self._update.schedule is not None:
            for group, rate in zip(self._optimiser.param_groups, rates, strict=True):
                group["lr"] = rate * float(factor)
        self._optimiser.step()
        self._optimiser.zero_grad()
        for group, rate in zip(self._optimiser.param_groups, rates, strict=True):
            group["lr"] = rate
        self.leaves = [p.detach() for p in self._parameters]
        return losses

    def restore(self, values: list[Tensor]) -> None:
        """Restore a snapshot of the parameters."""
        self._write_back(values)
        self.leaves = [p.detach() for p in self._parameters]

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
        self._write_back(self.leaves)


def make_run(
    gradients_of: Gradients,
    parameters: Parameters,
    update: Update,
    *,
    inputs: tuple[Tree, ...],
    batches: Source | None,
    compile: HowCompiled,
    guarded: bool = True,
    decays: bool = False,
) -> TrainingRun:
    """Return a training run: with an optimiser of this package inside its step, or with one of torch beside it.

    ``decays`` is that of ``StepInPlace``.
    """
    if update.beside:
        trained = list(parameters.by_name.values())
        return TorchOptimiserRun(gradients_of, trained, update, inputs=inputs, batches=batches, compile=compile)
    return TrainingRun(
        make_step(gradients_of, parameters, update),
        parameters.values,
        update,
        write=parameters.write,
        inputs=inputs,
        batches=batches,
        compile=compile,
        gradients=gradients_of,
        in_place=StepInPlace(gradients_of, parameters, update, decays=decays),
        guarded=guarded,
    )


def _like(now: object, value: object) -> object:
    """Return a number read from a file as a tensor, if the current value is a tensor."""
    return torch.as_tensor(value).to(now) if isinstance(now, Tensor) else value
