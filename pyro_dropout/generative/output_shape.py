"""Outputs of a network that are sequences or maps: where each kind of number lies, and how they become (N, D)."""

import math
from dataclasses import dataclass

from torch import Tensor

from pyro_dropout.mathematics.errors import RangeError, ShapeError

Dims = tuple[int | None, ...]


@dataclass(frozen=True)
class OutputShape:
    """The shape of a network's output at one point. Between the network and its likelihood it is one row, (N, D).

    Args:
        dims: the sizes, such as (T, C) for a sequence or (C, H, W) for a map; one of them may be None, if it differs
            from batch to batch.
        dim: which of them holds the parts of one position, such as its classes.

    Example:
        >>> import torch
        >>> shape = OutputShape((3, 8, 8), 0)
        >>> flat = shape.flat(torch.zeros(5, 3, 8, 8))
        >>> flat.shape, shape.whole(flat).shape, shape.positions(flat)
        (torch.Size([5, 192]), torch.Size([5, 3, 8, 8]), (8, 8))
    """

    dims: Dims
    dim: int

    def __post_init__(self) -> None:
        sizes = self.dims if isinstance(self.dims, tuple) else ()
        whole = all(
            size is None or (isinstance(size, int) and not isinstance(size, bool) and size > 0) for size in sizes
        )
        if not sizes or not whole or sizes.count(None) > 1:
            raise ShapeError(
                "dims must be the shape of the network's output at one point, such as (T, C) or (C, H, W), with at most"
                f" one None for a size that differs; got {self.dims!r}."
            )
        if isinstance(self.dim, bool) or not isinstance(self.dim, int) or not -len(sizes) <= self.dim < len(sizes):
            raise RangeError(f"dim must be the place of a size in dims, {self.dims}; got {self.dim!r}.")
        if sizes[self.dim] is None:
            raise ShapeError(f"dims must have a size at {self.dim}, where dim points; got {self.dims}.")

    @property
    def parts(self) -> int:
        """The size of the dimension that holds the parts of a position."""
        size = self.dims[self.dim]
        assert size is not None
        return size

    @property
    def from_end(self) -> int:
        """That dimension, counted from the last one."""
        return self.dim if self.dim < 0 else self.dim - len(self.dims)

    def flat(self, f: Tensor) -> Tensor:
        """Return outputs (N, *dims) as rows, (N, D)."""
        sizes = tuple(f.shape[1:])
        fits = len(sizes) == len(self.dims) and all(a in (None, b) for a, b in zip(self.dims, sizes, strict=True))
        if not fits:
            wanted = ", ".join(str(size or "any") for size in self.dims)
            raise ShapeError(f"net must give outputs (N, {wanted}), as dims says; it gave {tuple(f.shape)}.")
        return f.flatten(1)

    def whole(self, f: Tensor) -> Tensor:
        """Return rows (..., N, D) as outputs, (..., N, *dims)."""
        found: Tensor = f.unflatten(-1, self._sizes(f))
        return found

    def positions(self, f: Tensor) -> tuple[int, ...]:
        """Return the sizes of the other dimensions, for outputs in rows."""
        sizes = list(self._sizes(f))
        del sizes[self.dim]
        return tuple(sizes)

    def _sizes(self, f: Tensor) -> tuple[int, ...]:
        known = math.prod(size for size in self.dims if size is not None)
        if f.shape[-1] % known or (None not in self.dims and f.shape[-1] != known):
            raise ShapeError(f"the model's {f.shape[-1]} outputs do not have the shape {self.dims} that dims gives.")
        return tuple(f.shape[-1] // known if size is None else size for size in self.dims)
