"""Calls of torch that write the result of an operation into memory that is there already.

Which function takes ``out=``, and under which name, differs from operation to operation. Every call that is found here
has been compared with the operation itself; where none gives the same bits, its result is copied.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pyro_dropout.engines.torch_internals import OpOverload


def written(
    operation: OpOverload, args: Sequence[Any], named: dict[str, Any], places: Sequence[Tensor | None]
) -> Callable[[], object]:
    """Return a call that writes what an operation gives into ``places``."""
    place, *others = places
    expected = operation(*args, **named)
    if isinstance(expected, Tensor) and place is not None and not others:
        for call in _candidates(operation, args, named, place):
            place.zero_() if expected.any() else place.fill_(1)
            try:
                with warnings.catch_warnings(action="error"):  # torch warns before it gives a result another shape
                    call()
            except (RuntimeError, TypeError, Warning):
                continue
            if place.shape == expected.shape and torch.allclose(place, expected, rtol=0, atol=0, equal_nan=True):
                return call
    return partial(_copied, operation, args, named, places)


def _candidates(
    operation: OpOverload, args: Sequence[Any], named: dict[str, Any], place: Tensor
) -> Iterator[Callable[[], object]]:
    """Yield calls that may write the result of an operation into ``place``, the fastest first."""
    packet = operation.overloadpacket
    if hasattr(torch, packet.__name__):  # begins two microseconds sooner than the operation
        yield partial(getattr(torch, packet.__name__), *args, **named, out=place)
    for each in (getattr(packet, name) for name in packet.overloads()):
        outs = [argument.name for argument in each._schema.arguments if argument.is_out]
        if len(outs) == 1:
            yield partial(each, *args, **named, **{outs[0]: place})


def _copied(operation: OpOverload, args: Sequence[Any], named: dict[str, Any], places: Sequence[Tensor | None]) -> None:
    found = operation(*args, **named)
    for place, each in zip(places, [found] if isinstance(found, Tensor) else found, strict=False):
        if place is not None:
            place.copy_(each)
