"""How ordinary parameters reach Pyro's parameter store under names that no other model or guide has."""

import itertools
from collections.abc import Mapping
from typing import Any

import pyro
import torch
from torch import Tensor

_NUMBERS = itertools.count()


class StoreName(str):
    """A prefix for names in the parameter store; every model and guide has its own, and so has every copy of one."""

    __slots__ = ()

    @classmethod
    def of(cls, kind: str) -> "StoreName":
        """Return a name that begins with ``kind`` and was never given out before."""
        return cls(f"{kind}_{next(_NUMBERS)}")

    def __deepcopy__(self, memo: dict[int, Any]) -> "StoreName":
        return self.of(self.rsplit("_", 1)[0])


def tell_pyro(prefix: str, parameters: Mapping[str, Tensor]) -> None:
    """Say ``pyro.param`` for each parameter, so that stock SVI finds and trains it."""
    for name, value in parameters.items():
        if value.requires_grad:
            pyro.param(f"{prefix}.{name}", value)


def buffered(value: float | Tensor) -> Tensor:
    """Return a number as a tensor: hyper-parameters are buffers, so that replicas can have their own.

    In float64, so that a model made in float32 and moved to float64 has lost nothing of the number it was given.
    """
    return value if isinstance(value, Tensor) else torch.as_tensor(value, dtype=torch.float64)
