"""Which parameters of a network are frozen, so that a part of it is Bayesian: the last layer, adapters."""

from collections.abc import Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn

from pyro_dropout.mathematics.errors import PyroDropoutError


def freeze_all_but(net: nn.Module, only: str | Sequence[str]) -> None:
    """Freeze every parameter whose name matches none of some patterns, and thaw the others.

    Example:
        >>> import torch
        >>> from pyro_dropout.generative.frozen import freeze_all_but
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
        >>> freeze_all_but(net, "1.*")
        >>> [name for name, parameter in net.named_parameters() if parameter.requires_grad]
        ['1.weight', '1.bias']
    """
    patterns = [only] if isinstance(only, str) else list(only) if isinstance(only, Sequence) else []
    if not patterns or not all(isinstance(each, str) for each in patterns):
        raise PyroDropoutError(f"only must be a pattern of names such as 'classifier.*', or several; got {only!r}.")
    by_name = dict(net.named_parameters(remove_duplicate=False))
    chosen: set[int] = set()
    for pattern in patterns:
        found = [id(parameter) for name, parameter in by_name.items() if fnmatchcase(name, pattern)]
        if not found:
            near = get_close_matches(pattern, by_name, n=3, cutoff=0.0)
            raise PyroDropoutError(
                f"only names {pattern!r}, which matches no parameter of {type(net).__name__}; there are"
                f" {len(by_name)}, such as {', '.join(near) or 'none'}."
            )
        chosen.update(found)
    for name, parameter in by_name.items():
        if id(parameter) in chosen and not (parameter.is_floating_point() or parameter.is_complex()):
            raise PyroDropoutError(f"only names {name!r}, which holds whole numbers: it cannot be random.")
        parameter.requires_grad_(id(parameter) in chosen)
