"""The state of a Pyro optimiser, shared by compiled and eager steps: each continues where the other left off.

Pyro keeps one torch optimiser for each parameter. A compiled step reads its moments there and writes the new ones
back, so that ``get_state`` and ``save`` hold what eager steps would, and ``set_state`` takes effect.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import pyro
import torch
from pyro.optim.optim import PyroOptim, _load_state_dict
from torch import Tensor

from pyro_dropout.protocols import Record
from pyro_dropout.training.optimisers import Update, adam, plain, sgd

_SLOTS = {"adam": ("exp_avg", "exp_avg_sq"), "adamw": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}
_OPTIONS = ("betas", "eps", "weight_decay", "decoupled_weight_decay", "momentum", "nesterov")


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


def from_group(kind: type, group: Record) -> Update | None:
    """Return the update of a torch optimiser of this class with one group; None if it is not implemented here."""
    options = {name: plain(value) for name, value in group.items() if name != "params"}
    if any(options.get(name) for name in ("amsgrad", "maximize", "dampening")):
        return None
    if kind in (torch.optim.Adam, torch.optim.AdamW):
        decoupled = kind is torch.optim.AdamW or bool(options.get("decoupled_weight_decay"))
        found = adam(
            options["lr"], tuple(options["betas"]), options["eps"], options["weight_decay"], decoupled=decoupled
        )
    elif kind is torch.optim.SGD:
        found = sgd(*(options[name] for name in ("lr", "momentum", "weight_decay", "nesterov")))
    else:
        return None
    return replace(found, options=tuple((name, options[name]) for name in _OPTIONS if name in options))
