"""Shapes: how they are annotated, what tensors broadcast to, the rows of a weight, and distributions inside wrappers.

The tests check annotated shapes with jaxtyping, a development dependency; without it they are comments.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
import pyro.distributions
import torch
from torch import Size, Tensor
from torch.distributions import Independent

from pyro_dropout.errors import RangeError, ShapeError
from pyro_dropout.protocols import Distribution

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
else:
    try:
        from jaxtyping import Bool, Float, Int
    except ImportError:

        class _Unchecked:
            def __class_getitem__(cls, item: tuple[type, str]) -> type:
                return item[0]

        Bool = Float = Int = _Unchecked

__all__ = ["Bool", "Float", "Int", "RowDim", "RowLayout", "base_distribution", "broadcast_shape", "keeps_density"]

_ABSTRACT = (torch.distributions.Distribution, pyro.distributions.Distribution)  # whose log_prob is another's to define


def base_distribution(p: Distribution, *wrappers: type) -> Distribution:
    """Return the distribution inside ``Independent``, and inside the other wrappers given."""
    while any(isinstance(p, kind) for kind in (Independent, *wrappers)):
        p = p.base_dist
    return p


def keeps_density(p: Distribution, kind: type | None = None) -> bool:
    """Whether closed forms for a distribution of torch, Pyro or this package hold; with ``kind``, if it is one of that.

    Not for a class below one of them with a ``log_prob`` of its own, such as a Normal that is censored at zero.
    """
    base = base_distribution(p)
    own, *behind = [each for each in type(base).__mro__ if "log_prob" in vars(each)]
    ours = own.__module__.partition(".")[0] in ("torch", "pyro", "pyro_dropout")
    return (kind is None or isinstance(base, kind)) and (ours or all(each in _ABSTRACT for each in behind))


def broadcast_shape(*shapes: Sequence[int]) -> Size:
    """Return the shape that tensors of these shapes broadcast to, or raise a ``ValueError``; torch's loads sympy."""
    return Size(np.broadcast_shapes(*map(tuple, shapes)))


# Which dimension indexes rows: an index; None, every weight is a row; "all", the tensor is one row.
RowDim = int | Literal["all"] | None


class RowLayout:
    """The rows of a tensor of a given shape: ``rows`` of them, with ``rest`` weights each."""

    def __init__(self, shape: Size, row_dim: RowDim) -> None:
        if isinstance(row_dim, bool) or not (isinstance(row_dim, int) or row_dim is None or row_dim == "all"):
            raise RangeError(f"row_dim must be a whole number, None or 'all'; got {row_dim!r}.")
        if isinstance(row_dim, int):
            if not -len(shape) <= row_dim < len(shape):
                allowed = f"{-len(shape)} to {len(shape) - 1}" if len(shape) else "only None"
                allowed += f" for shape {tuple(shape)}"
                raise ShapeError(f"row_dim must index a dimension of the weights, {allowed}; got {row_dim}.")
            row_dim = row_dim % len(shape)
            self.rows = shape[row_dim]
        else:
            self.rows = shape.numel() if row_dim is None else 1
        self.shape, self.row_dim = shape, row_dim
        self.rest = shape.numel() // max(self.rows, 1)

    def to_rows(self, value: Float[Tensor, "*batch_and_shape"]) -> Float[Tensor, "*batch rows rest"]:
        """Lay a tensor of the shape out as (..., rows, rest)."""
        lead = value.shape[: value.dim() - len(self.shape)]
        if isinstance(self.row_dim, int):
            value = value.movedim(self.row_dim - len(self.shape), len(lead))
        return value.reshape(*lead, self.rows, self.rest)

    def from_rows(self, value: Float[Tensor, "*batch rows rest"]) -> Float[Tensor, "*batch_and_shape"]:
        """Undo ``to_rows``."""
        lead, shape = value.shape[:-2], list(self.shape)
        if not isinstance(self.row_dim, int):
            return value.reshape((*lead, *shape))
        rest = shape[: self.row_dim] + shape[self.row_dim + 1 :]
        return value.reshape(*lead, self.rows, *rest).movedim(len(lead), self.row_dim - len(shape))

    def check_per_row(self, name: str, value: Tensor) -> None:
        """Raise unless ``value`` is one number, or one for each row."""
        if tuple(value.shape) not in ((), (1,), (self.rows,)):
            allowed = f"a number or one for each of {self.rows} rows"
            raise ShapeError(f"{name} must be {allowed}; got shape {tuple(value.shape)}.")

    def per_row(self, value: Tensor) -> Tensor:
        """Reshape one number per row, (..., rows), so that it broadcasts against the tensor."""
        if self.row_dim is None:
            return value.reshape((*value.shape[:-1], *self.shape))
        if self.row_dim == "all":
            return value.reshape((*value.shape[:-1], *[1] * len(self.shape)))
        after = len(self.shape) - self.row_dim - 1
        return value.reshape(*value.shape[:-1], *[1] * self.row_dim, self.rows, *[1] * after)
