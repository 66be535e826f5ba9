"""Which of inductor's kernels are launched together on a GPU: long reductions only with reductions of the same shape.

Kernels that are combined share the sizes of their blocks. What suits sums over the points of a batch is far too small
for a kernel that updates a million weights and sums their squares, which then takes ten times as long.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_LONG = 2**19  # numbers that a reduction reads


@contextmanager
def alike_together() -> Iterator[None]:
    """Within this context inductor combines long reductions with those of the same shape alone."""
    from torch._inductor.codegen import triton_combo_kernel as combined

    name = "_custom_combo_kernel_horizontal_partition_algorithm"
    before = getattr(combined, name, None)
    if before is None:  # a version of torch that combines kernels in another way
        yield
        return

    def parted(nodes: list[Any], *rest: Any) -> list[list[Any]]:
        return [part for group in by_shape(nodes) for part in before(group, *rest)]

    setattr(combined, name, parted)
    try:
        yield
    finally:
        setattr(combined, name, before)


def by_shape(nodes: list[Any]) -> list[list[Any]]:
    """Return the kernels in groups: each shape of long reductions, and all others.

    Args:
        nodes: of inductor's scheduler; ``group[-1]`` is how many results a kernel has, and the terms of each.
    """
    groups: dict[object, list[Any]] = {}
    for node in nodes:
        sizes = tuple(node.group[-1])
        known = all(str(size).isdigit() for size in sizes)
        long = known and node.is_reduction() and math.prod(map(int, sizes)) >= _LONG
        groups.setdefault(sizes if long else None, []).append(node)
    return list(groups.values())
