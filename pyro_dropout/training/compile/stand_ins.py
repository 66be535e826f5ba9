"""Tensors that stand in for parameters wherever an operation uses them.

A network that a plain function registers with ``pyro.module`` is in its closure, among the globals, or anywhere else;
what holds its parameters need not be found. An operation that is given one of them computes with its stand-in.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from pyro_dropout.engines.torch_internals import function_modes


class StandIns(TorchFunctionMode):
    """Within this context, operations compute with other tensors in the place of some parameters.

    Args:
        pairs: the stand-in of each parameter, by the parameter's ``id``.

    Example:
        >>> import torch
        >>> from pyro_dropout.training.compile.stand_ins import StandIns
        >>> layer, ones = torch.nn.Linear(2, 1, bias=False), torch.ones(1, 2)
        >>> with StandIns({id(layer.weight): ones}):
        ...     layer(ones).item()
        2.0
    """

    def __init__(self, pairs: Mapping[int, Tensor]) -> None:
        super().__init__()
        self.pairs = pairs

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation with the stand-ins of its arguments."""
        return func(*map(self._now, args), **{key: self._now(value) for key, value in (kwargs or {}).items()})

    def _now(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.pairs.get(id(value), value)
        if type(value) in (list, tuple):  # as the weights of a recurrent layer
            return type(value)(map(self._now, value))
        return value


def stand_in_of(parameter: Tensor) -> Tensor | None:
    """Return the tensor that stands in for a parameter here; None if there is none."""
    modes = (mode for mode in reversed(function_modes()) if isinstance(mode, StandIns))
    return next((mode.pairs[id(parameter)] for mode in modes if id(parameter) in mode.pairs), None)
