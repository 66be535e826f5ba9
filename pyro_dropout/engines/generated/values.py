"""Tensors as expressions in C: what an element is, as a function of its indices.

A view changes indices, and costs nothing. An elementwise operation is an expression of its inputs' elements.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, fx

from pyro_dropout.engines.generated.formulas import literal
from pyro_dropout.errors import PyroDropoutError

Indices = tuple[str, ...]
Shape = tuple[int, ...]

WORD = 8  # bytes
C_TYPES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.bool: "bool",
    torch.int32: "int",
    torch.int64: "long long",
}


class UnsupportedError(PyroDropoutError):
    """An operation that a kernel of chains does not know."""


@dataclass(frozen=True)
class Value:
    """A tensor, by its elements.

    Attributes:
        shape, dtype: those of the tensor.
        at: the expression of the element at some indices.
        cost: about how many operations that expression has.
        name: what it is stored as; None if it is not stored.
        memory: the name of the memory that it is a view of, and the view, where a program in plain C has one.
    """

    shape: Shape
    dtype: torch.dtype
    at: Callable[[Indices], str]
    cost: int = 0
    name: str | None = None
    memory: tuple[str, Tensor] | None = None

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)


def c_type(dtype: torch.dtype) -> str:
    """Return the type in C of a tensor's elements."""
    if dtype not in C_TYPES:
        raise UnsupportedError(f"a kernel has no numbers of type {dtype}")
    return C_TYPES[dtype]


def number(value: float | int | bool, dtype: torch.dtype, shape: Shape = ()) -> Value:
    """Return a tensor of one number."""
    text = f"(({c_type(dtype)}){literal(value)})"
    return Value(shape, dtype, lambda at: text)


def flat_index(at: Indices, shape: Shape) -> str:
    """Return the number of an element, in order of rows."""
    terms, stride = [], 1
    for index, size in zip(reversed(at), reversed(shape), strict=True):
        if size != 1 and index != "0":
            terms.append(f"{wrapped(index)} * {stride}" if stride != 1 else index)
        stride *= size
    return " + ".join(reversed(terms)) or "0"


def indices_of(flat: str, shape: Shape) -> Indices:
    """Return the indices of an element from its number."""
    found: list[str] = []
    stride = prod(shape)
    first = True
    for size in shape:
        stride //= max(size, 1)
        if size == 1:
            found.append("0")
            continue
        text = f"{wrapped(flat)} / {stride}" if stride != 1 else flat
        found.append(text if first else f"{wrapped(text)} % {size}")
        first = False
    return tuple(found)


def wrapped(text: str) -> str:
    """Return the text of an index as a factor."""
    return text if text.isidentifier() or text.isdigit() else f"({text})"


def broadcast(value: Value, shape: Shape) -> Value:
    """Return a tensor expanded to a shape."""
    if value.shape == shape:
        return value
    more = len(shape) - len(value.shape)

    def at(indices: Indices) -> str:
        own = indices[more:]
        return value.at(tuple("0" if size == 1 else i for size, i in zip(value.shape, own, strict=True)))

    return Value(shape, value.dtype, at, value.cost)


def reshaped(value: Value, shape: Shape) -> Value:
    """Return the same elements in another shape."""
    if value.shape == shape:
        return value
    if [s for s in value.shape if s != 1] == [s for s in shape if s != 1]:  # nothing but sides of one

        def kept(indices: Indices) -> str:
            rest = iter([i for i, size in zip(indices, shape, strict=True) if size != 1])
            return value.at(tuple("0" if size == 1 else next(rest) for size in value.shape))

        return Value(shape, value.dtype, kept, value.cost)
    return Value(
        shape,
        value.dtype,
        lambda indices: value.at(indices_of(flat_index(indices, shape), value.shape)),
        value.cost + 4,
    )


def permuted(value: Value, order: Sequence[int]) -> Value:
    """Return a tensor with its dimensions in another order."""
    order = [k % len(value.shape) for k in order]
    back = [order.index(k) for k in range(len(order))]
    shape = tuple(value.shape[k] for k in order)
    return Value(shape, value.dtype, lambda at: value.at(tuple(at[k] for k in back)), value.cost)


def shifted(value: Value, dim: int, start: int, step: int, shape: Shape) -> Value:
    """Return every ``step``-th element from ``start`` along a dimension."""

    def at(indices: Indices) -> str:
        own = list(indices)
        moved = wrapped(own[dim]) if step == 1 else f"{wrapped(own[dim])} * {step}"
        if step != 1 or start:
            own[dim] = f"{moved} + {start}" if start else moved
        return value.at(tuple(own))

    return Value(shape, value.dtype, at, value.cost)


def joined(values: Sequence[Value], dim: int, shape: Shape, dtype: torch.dtype) -> Value:
    """Return tensors laid one after another along a dimension."""

    def at(indices: Indices) -> str:
        begin, text, ends = 0, "", 0
        for k, value in enumerate(values):
            own = (
                *indices[:dim],
                f"{wrapped(indices[dim])} - {begin}" if begin else indices[dim],
                *indices[dim + 1 :],
            )
            begin += value.shape[dim]
            if k < len(values) - 1:
                text += f"({wrapped(indices[dim])} < {begin} ? {value.at(own)} : "
                ends += 1
            else:
                text += value.at(own)
        return f"({c_type(dtype)})({text}{')' * ends})"

    return Value(shape, dtype, at, sum(value.cost + 1 for value in values))


def within(value: Value, other: Value, dim: int, start: int, shape: Shape) -> Value:
    """Return ``other`` with ``value`` in place of its elements from ``start`` along a dimension."""
    end = start + value.shape[dim]

    def at(indices: Indices) -> str:
        i = wrapped(indices[dim])
        own = (*indices[:dim], f"{i} - {start}" if start else indices[dim], *indices[dim + 1 :])
        return f"({i} >= {start} && {i} < {end} ? {value.at(own)} : {other.at(indices)})"

    return Value(shape, other.dtype, at, value.cost + other.cost + 2)


def power_of_two(number: int) -> int:
    """Return the largest power of 2 that is not above a number."""
    return 1 << (max(number, 1).bit_length() - 1)


class Constants:
    """Tensors that a graph holds, to be read from the GPU's memory."""

    def __init__(self, *, live: bool = False) -> None:
        self.tensors: list[Tensor] = []
        self.live = live

    def value(self, tensor: Tensor) -> Value:
        """Return a tensor's elements."""
        if self.live and tensor.is_cuda:
            return self._held(tensor)
        tensor, shape = tensor.detach().cpu(), tuple(tensor.shape)
        if tensor.numel() and bool((tensor == tensor.reshape(-1)[0]).all()):
            return number(tensor.reshape(-1)[0].item(), tensor.dtype, shape)
        return self._held(tensor.contiguous())

    def _held(self, tensor: Tensor) -> Value:
        name, shape = f"c{len(self.tensors)}", tuple(tensor.shape)
        self.tensors.append(tensor)
        return Value(shape, tensor.dtype, lambda at: f"{name}[{flat_index(at, shape)}]")


class Draws:
    """Random numbers that a function draws, each kind one after another.

    Attributes:
        counts: how many numbers of each kind one call draws, by what fills a tensor with them and its type.
        places: where those of each operation begin.
    """

    def __init__(self) -> None:
        self.counts: dict[tuple[str, torch.dtype], int] = {}
        self.places: dict[fx.Node, tuple[tuple[str, torch.dtype], int]] = {}

    def value(self, kind: str, node: fx.Node) -> Value:
        """Return the numbers that an operation draws."""
        example: Tensor = node.meta["val"]
        if node.kwargs.get("generator") is not None:
            raise UnsupportedError("a kernel has no generator of random numbers but torch's own")
        key, shape = (kind, example.dtype), tuple(example.shape)
        begin = self.counts.get(key, 0)
        self.counts[key] = begin + prod(shape)
        self.places[node] = key, begin
        name = self.name(key)
        return Value(shape, example.dtype, lambda at: f"{name}[{begin} + {flat_index(at, shape)}]")

    @staticmethod
    def name(key: tuple[str, torch.dtype]) -> str:
        """Return the name of the numbers of a kind."""
        return f"{key[0]}{key[1].itemsize}"
