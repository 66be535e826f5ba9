"""Which of inductor's kernels are fused or launched together on a GPU.

Kernels that are combined share the sizes of their blocks. What suits sums over the points of a batch is far too small
for a kernel that updates a million weights and sums their squares, which then takes ten times as long: long reductions
are combined only with reductions of the same shape.

A sum that is fused with a kernel which writes over what it reads goes through its numbers twice: once for the sum, with
what it is to write in memory of its own, and once to write that over its input. For the parameters of a large network
both are as much work as the update itself: such sums stay apart.
"""

import math
from typing import Any

from pyro_dropout.engines.torch_internals import reads_of

_LONG = 2**19  # numbers that a reduction reads


def by_shape(nodes: list[Any]) -> list[list[Any]]:
    """Return kernels in groups: each shape of long reductions, and all others."""
    groups: dict[object, list[Any]] = {}
    for node in nodes:
        sizes = tuple(node.group[-1])
        known = all(str(size).isdigit() for size in sizes)
        long = known and node.is_reduction() and math.prod(map(int, sizes)) >= _LONG
        groups.setdefault(sizes if long else None, []).append(node)
    return list(groups.values())


def updates_apart(one: Any, other: Any) -> bool:
    """Whether two kernels may be fused: a sum with elementwise operations only if one needs the other's result."""
    return one.is_reduction() == other.is_reduction() or needs(one, other) or needs(other, one)


def needs(one: Any, other: Any) -> bool:
    """Whether a kernel of inductor's scheduler reads what another one has computed."""
    return not reads_of(one).isdisjoint(other.get_buffer_names())
