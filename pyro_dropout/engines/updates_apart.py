"""Keeps inductor from fusing sums with kernels that write over what they read.

Such a kernel goes through its numbers twice: once for the sum, with what it is to write in memory of its own, and once
to write that over its input. For the parameters of a large network both are as much work as the update itself.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def updates_apart() -> Iterator[None]:
    """Within this context inductor fuses a sum with elementwise operations only if one needs the other's result."""
    from torch._inductor.choices import InductorChoices

    before = getattr(InductorChoices, "can_fuse", None)
    if before is None:  # a version of torch that decides in another way
        yield
        return

    def can_fuse(scheduler: Any, one: Any, other: Any, *rest: Any) -> bool:
        if one.is_reduction() != other.is_reduction() and not (needs(one, other) or needs(other, one)):
            return False
        return bool(before(scheduler, one, other, *rest))

    InductorChoices.can_fuse = staticmethod(can_fuse)  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        InductorChoices.can_fuse = staticmethod(before)  # type: ignore[method-assign]


def needs(one: Any, other: Any) -> bool:
    """Whether a kernel of inductor's scheduler reads what another one has computed."""
    from torch._inductor.dependencies import MemoryDep  # others only keep an order

    read = {dep.name for dep in one.read_writes.reads if isinstance(dep, MemoryDep)}
    return not read.isdisjoint(other.get_buffer_names())
