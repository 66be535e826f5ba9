"""Noise that a network draws itself: dropout that is not on rows of one weight, stochastic depth, attention dropout.

Such noise is a part of the model, an auxiliary variable whose posterior is its prior: it adds nothing to the KL, and
every pass draws it anew for every data point. The modules that draw it stay as they are; they run in training mode,
whatever the mode of the rest, so that what they draw is the network's own distribution by construction.
"""

import contextlib
from collections.abc import Iterable, Iterator
from contextvars import ContextVar

import torch
from torch import nn

from pyro_dropout.mathematics.errors import PyroDropoutError

_SILENT: ContextVar[bool] = ContextVar("silent", default=False)


@contextlib.contextmanager
def kept_random(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Within this context these modules draw their noise, in evaluation mode too; not inside ``silent()``."""
    found = list(modules)
    changed = [module for module in found if module.training is _SILENT.get()]
    fast = torch.backends.mha.get_fastpath_enabled()
    try:
        for module in changed:
            module.training = not module.training
        # One kernel for a whole encoder layer looks at the mode of the layer, not at those of its dropout layers.
        torch.backends.mha.set_fastpath_enabled(fast and not found)
        yield
    finally:
        for module in changed:
            module.training = not module.training
        torch.backends.mha.set_fastpath_enabled(fast)


@contextlib.contextmanager
def silent(on: bool = True) -> Iterator[None]:
    """Within this context networks draw no noise of their own: one pass with mean weights, as at test time."""
    before = _SILENT.get()
    try:  # Ctrl-C may come as soon as the variable is set
        _SILENT.set(on)
        yield
    finally:
        _SILENT.set(before)


def noise_of(model: object) -> list[str]:
    """Return the modules of a model that draw noise of their own, as far as they are known; all, once it has run."""
    found: list[str] = getattr(getattr(model, "model", model), "noise", [])  # inside Standardised
    return found


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
