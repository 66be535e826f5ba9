"""An optimiser of torch's own, beside a training step: it trains what it holds, with the state and settings it has."""

from typing import Any

import torch
from torch import Tensor

from pyro_dropout.errors import PyroDropoutError
from pyro_dropout.protocols import Record
from pyro_dropout.training.optimisers import Update, plain


class TorchOptimiser:
    """Lets a torch optimiser take the steps, for the parameters ``trained`` that a step has gradients of."""

    def __init__(self, update: Update, trained: list[Tensor]) -> None:
        assert update.optimiser is not None
        self._update, self._optimiser, self._trained = update, update.optimiser, trained
        held = {id(each) for group in self._optimiser.param_groups for each in group["params"]}
        self._held = {k: each for k, each in enumerate(trained) if id(each) in held}
        if trained and not self._held:
            raise PyroDropoutError(
                f"optim must hold parameters of the guide or the model; this {update.name} holds none of them. Make it"
                " with guide.parameters()."
            )

    def move(self, values: list[Tensor], gradients: list[Tensor], t: Tensor) -> None:
        """Take step number ``t``, at the optimiser's learning rates times the schedule.

        ``values`` are the parameters' memory, which stays the same.
        """
        slopes, factor = self._update.prepared([gradients[k] for k in self._held], t, torch.ones_like(t))
        for parameter, slope in zip(self._held.values(), slopes, strict=True):
            parameter.grad = slope.clone()  # the optimiser may change it
        rates = [group["lr"] for group in self._optimiser.param_groups]
        if self._update.schedule is not None:
            for group, rate in zip(self._optimiser.param_groups, rates, strict=True):
                group["lr"] = rate * float(factor)
        self._optimiser.step()
        self._optimiser.zero_grad()
        for group, rate in zip(self._optimiser.param_groups, rates, strict=True):
            group["lr"] = rate
        for mine, theirs in zip(values, self._trained, strict=True):
            if mine.data_ptr() != theirs.data_ptr():  # the optimiser has given a parameter new memory
                theirs.data = mine.copy_(theirs.detach())

    def state(self) -> tuple[dict[str, Tensor], Record]:
        """Return its state: tensors by name, and the rest, which is JSON."""
        found: dict[str, Tensor] = {}
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
        state: dict[int, dict[str, Any]] = {}
        for name, value in tensors.items():
            if name.startswith("optimiser."):
                _, index, slot = name.split(".", 2)
                state.setdefault(int(index), {})[slot] = value
        for index, slot, number in rest["numbers"]:
            state.setdefault(index, {})[slot] = number
        groups = [
            {key: torch.as_tensor(v).to(now[key]) if isinstance(now.get(key), Tensor) else v for key, v in kept.items()}
            for kept, now in zip(rest["groups"], self._optimiser.param_groups, strict=True)
        ]
        self._optimiser.load_state_dict({"state": state, "param_groups": groups})
