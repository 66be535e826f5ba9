"""What a network does in training mode alone: noise that it draws itself, and running statistics that move.

Noise (dropout that is not on rows of one weight, stochastic depth, attention dropout) is a part of the model, an
auxiliary variable whose posterior is its prior: it adds nothing to the KL, and every pass draws it anew for every data
point. The modules that draw it stay as they are; they run in training mode, whatever the mode of the rest.

torch updates the statistics of a BatchNorm layer at every pass in training mode, whether its parameters are frozen or
not. A layer whose statistics stay runs in evaluation mode: it normalises with them and does not change them.
"""

import contextlib
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Literal

import torch
from torch import nn

from pyro_dropout.errors import PyroDropoutError
from pyro_dropout.generative.process_state import bound
from pyro_dropout.generative.trial_run import in_mode

_SILENT: ContextVar[bool] = ContextVar("silent", default=False)


@contextlib.contextmanager
def kept_random(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Within this context these modules draw their noise, in evaluation mode too; not inside ``silent()``."""
    found = list(modules)
    fast = torch.backends.mha.get_fastpath_enabled()
    with in_mode(found, not _SILENT.get()):
        try:
            # One kernel for a whole encoder layer looks at the mode of the layer, not at those of its dropout layers.
            torch.backends.mha.set_fastpath_enabled(fast and not found)
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)


def silent(on: bool = True) -> contextlib.AbstractContextManager[None]:
    """Within this context networks draw no noise of their own: one pass with mean weights, as at test time."""
    return bound(_SILENT, on)


def noise_of(model: object) -> list[str]:
    """Return the modules of a model that draw noise of their own, as far as they are known; all, once it has run."""
    found: list[str] = getattr(getattr(model, "model", model), "noise", [])  # inside Standardised
    return [path or "forward" for path in found]  # of the network itself


def check_no_noise(model: object, asker: str) -> None:
    """Raise if a network that has run draws noise of its own, where the same weights must give the same output."""
    noise = noise_of(model)
    if noise:
        raise PyroDropoutError(
            f"{asker} needs a network that gives the same output for the same weights, but this one draws noise of its"
            f" own at every pass, in {', '.join(map(repr, noise))}. Use BayesianNet(net) with a network without it."
        )


def may_write(net: nn.Module, noise: list[str]) -> bool:
    """Whether noise may be written to its input, perhaps to the data: they would carry it into the next pass."""
    modules = [net.get_submodule(path) for path in noise]
    return any(getattr(m, "inplace", False) or type(m).__module__.split(".")[0] != "torch" for m in modules)


def drawn_in_place(noise: list[str], cause: Exception) -> PyroDropoutError | None:
    """Return an error for noise that vmap cannot draw for each of several networks; None if the cause is another."""
    if not noise or not str(cause).startswith("vmap: ") or "inplace" not in str(cause):
        return None
    return PyroDropoutError(
        f"the network draws noise in place (tensor.bernoulli_()), in one of {', '.join(map(repr, noise))}, so that"
        " networks that run as one would share it. Write torch.rand_like(x) < keep there, or train and predict one"
        " network at a time, without an ensemble or a fleet."
    )


FrozenStatistics = bool | Literal["all"]


def with_statistics(net: nn.Module) -> dict[str, nn.Module]:
    """Return the layers of a network that have running statistics, by name."""
    found = {path: module for path, module in net.named_modules() if isinstance(module, nn.modules.batchnorm._NormBase)}
    return {path: module for path, module in found.items() if module.track_running_stats}


def still_layers(net: nn.Module, choice: FrozenStatistics) -> list[str]:
    """Return the names of the layers whose statistics stay: those of frozen layers, all, or none."""
    return [path for path in with_statistics(net) if choice == "all" or (choice and _is_frozen(net, path))]


def _is_frozen(net: nn.Module, path: str) -> bool:
    """Whether a layer's parameters are frozen; one without parameters is as frozen as the module that holds it."""
    flags = [parameter.requires_grad for parameter in net.get_submodule(path).parameters()]
    return not any(flags) if flags or not path else _is_frozen(net, path.rpartition(".")[0])
