"""Running statistics of normalisation layers: which of them move when a network runs in training mode, and which stay.

torch updates the statistics of a BatchNorm layer at every pass in training mode, whether its parameters are frozen or
not. A layer whose statistics stay runs in evaluation mode: it normalises with them and does not change them.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Literal

from torch import nn

FrozenStatistics = bool | Literal["all"]


def with_statistics(net: nn.Module) -> dict[str, nn.Module]:
    """Return the layers of a network that have running statistics, by name."""
    found = {path: module for path, module in net.named_modules() if isinstance(module, nn.modules.batchnorm._NormBase)}
    return {path: module for path, module in found.items() if module.track_running_stats}


def still_layers(net: nn.Module, choice: FrozenStatistics) -> list[str]:
    """Return the names of the layers whose statistics stay: those of frozen layers, all, or none."""
    if isinstance(choice, str) or not choice:
        return list(with_statistics(net)) if choice else []
    return [path for path in with_statistics(net) if _is_frozen(net, path)]


def _is_frozen(net: nn.Module, path: str) -> bool:
    """Whether a layer's parameters are frozen; one without parameters is as frozen as the module that holds it."""
    while True:
        flags = [parameter.requires_grad for parameter in net.get_submodule(path).parameters()]
        if flags or not path:
            return bool(flags) and not any(flags)
        path = path.rpartition(".")[0]


@contextlib.contextmanager
def held_still(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Within this context these layers normalise with their statistics and do not change them."""
    changed = [layer for layer in layers if layer.training]
    try:
        for layer in changed:
            layer.training = False
        yield
    finally:
        for layer in changed:
            layer.training = True
