"""The state of a Pyro optimiser, shared by compiled and eager steps: each continues where the other left off.

Pyro keeps one torch optimiser for each parameter. A compiled step reads its moments there and writes the new ones
back, so that ``get_state`` and ``save`` hold what eager steps would, and ``set_state`` takes effect.
"""

from collections.abc import Iterator
from dataclasses import replace

import pyro
import torch
from pyro.optim.optim import PyroOptim, _load_state_dict
from torch import Tensor

from pyro_dropout.protocols import Record
from pyro_dropout.training.optimisers import Update, adam, plain, sgd

_SLOTS = {"adam": ("exp_avg", "exp_avg_sq"), "adamw": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}


class OptimiserState:
    """The torch optimisers behind a Pyro optimiser, for the parameters that a step trains."""

    def __init__(self, optim: PyroOptim, parameters: list[Tensor]) -> None:
        self._parameters = parameters
        self._clip = getattr(optim, "pt_clip_args", None) or {}
        found = [_known(optim, parameter) for parameter in parameters]
        self._each = [each for each in found if isinstance(each, torch.optim.Optimizer)]
        # A scheduler wraps its optimiser, and steps separately.
        self._simple = 0 < len(self._each) == len(found) and not callable(self._clip)
        self._options: Record | None = None
        self._update: Update | None = None

    @property
    def update(self) -> Update | None:
        """The update that all parameters share; None if they differ, or if it is not implemented here."""
        if not self._simple:
            return None
        groups = [each.param_groups for each in self._each]
        if any(len(group) != 1 for group in groups):
            return None
        options = [{name: value for name, value in group[0].items() if name != "params"} for group in groups]
        if any(other != options[0] for other in options[1:]):
            return None
        if self._options != options[0]:
            self._options = options[0]
            update = from_group(type(self._each[0]), self._options)
            norm, value = self._clip.get("clip_norm"), self._clip.get("clip_value")
            self._update = update and replace(update, clip_norm=norm, clip_value=value, clip_each=True)
        return self._update

    @property
    def steps(self) -> int | None:
        """How many steps all parameters have taken, where that is counted; None if the numbers differ."""
        if not self._simple:
            return None
        counts = {int(float(each.state[p].get("step", 0))) if p in each.state else 0 for each, p in self._pairs()}
        return counts.pop() if len(counts) == 1 else None

    def read(self, update: Update) -> list[list[Tensor]]:
        """Return the moments of all parameters; zeros where there are none yet."""
        names = _SLOTS[update.name][: update.slots]
        found = []
        for each, p in self._pairs():
            state = each.state.get(p) or {}
            found.append([torch.zeros_like(p.detach()) if state.get(k) is None else state[k] for k in names])
        return found

    def write(self, update: Update, slots: list[list[Tensor]]) -> None:
        """Write the moments after one more step back to the optimisers."""
        names = _SLOTS[update.name][: update.slots]
        counters = []
        for (each, p), values in zip(self._pairs(), slots, strict=True):
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

    def _pairs(self) -> Iterator[tuple[torch.optim.Optimizer, Tensor]]:
        return zip(self._each, self._parameters, strict=True)


def _known(optim: PyroOptim, parameter: Tensor) -> object:
    """Return the torch optimiser of a parameter, created as Pyro does when it first sees the parameter."""
    if parameter not in optim.optim_objs:
        optim.optim_objs[parameter] = optim._get_optim(parameter)
        optim.grad_clip[parameter] = optim._get_grad_clip(parameter)  # type: ignore[arg-type]  # Pyro gives it too
        name = pyro.get_param_store().param_name(parameter)
        waiting = optim._state_waiting_to_be_consumed.pop(name, None)
        if waiting is not None:
            _load_state_dict(optim.optim_objs[parameter], waiting)
    return optim.optim_objs[parameter]


_OPTIONS = ("betas", "eps", "weight_decay", "decoupled_weight_decay", "momentum", "nesterov")


def from_group(kind: type, group: Record) -> Update | None:
    """Return the update of a torch optimiser of this class with one group; None if it is not implemented here."""
    options = {name: plain(value) for name, value in group.items() if name != "params"}
    if any(options.get(name) for name in ("amsgrad", "maximize", "dampening")):
        return None
    if kind in (torch.optim.Adam, torch.optim.AdamW):
        decoupled = kind is torch.optim.AdamW or bool(options.get("decoupled_weight_decay"))
        beta1, beta2 = options["betas"]
        found = adam(options["lr"], (beta1, beta2), options["eps"], options["weight_decay"], decoupled=decoupled)
    elif kind is torch.optim.SGD:
        found = sgd(*(options[name] for name in ("lr", "momentum", "weight_decay", "nesterov")))
    else:
        return None
    return replace(found, options=tuple((name, options[name]) for name in _OPTIONS if name in options))
