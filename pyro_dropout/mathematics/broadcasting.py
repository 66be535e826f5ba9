"""The shape that tensors of several shapes broadcast to.

``torch.broadcast_shapes`` gives the same, and loads sympy the first time, which takes a second or more.
"""

from collections.abc import Sequence

import torch


def broadcast_shape(*shapes: Sequence[int]) -> torch.Size:
    """Return the shape that tensors of these shapes broadcast to.

    Raises:
        RuntimeError: there is none.

    Example:
        >>> broadcast_shape((2,), (3, 1), (1, 1, 1)), broadcast_shape()
        (torch.Size([1, 3, 2]), torch.Size([]))
    """
    found = [1] * max(map(len, shapes), default=0)
    for shape in shapes:
        for place in range(-len(shape), 0):
            if shape[place] != 1 and found[place] not in (1, shape[place]):
                given = ", ".join(str(tuple(each)) for each in shapes)
                raise RuntimeError(f"shapes do not broadcast: {given}")
            found[place] = shape[place] if found[place] == 1 else found[place]
    return torch.Size(found)
