"""What a network's parameters must be to be random; half precision, for which guides keep float32."""

from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from pyro_dropout.mathematics.errors import PyroDropoutError

HALF = (torch.float16, torch.bfloat16)


def plain_network(net: nn.Module) -> nn.Module:
    """Return the network inside ``torch.compile``; raise if its parameters have no shapes yet.

    Steps are compiled here, weight draws included, and a compiled network inside them cannot be looked into.
    """
    net = getattr(net, "_orig_mod", net) if type(net).__name__ == "OptimizedModule" else net
    for name, parameter in net.named_parameters():
        if is_lazy(parameter):
            raise PyroDropoutError(
                f"{name!r} has no shape before the network has seen data. Run it once, net(x[:2]), and then build the"
                " model."
            )
    return net


def check_types(net: nn.Module, sites: Iterable[str]) -> None:
    """Raise if a random parameter is complex."""
    for name in sites:
        kind = net.get_parameter(name).dtype
        if kind.is_complex:
            raise PyroDropoutError(
                f"{name!r} is complex ({kind}), and weights are real here. Hold its real and imaginary part as two"
                " parameters, or leave it out with Prior(hide=...)."
            )
